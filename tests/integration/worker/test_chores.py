"""Chores on a real Redis: retention sweeps, maintenance, and restarts."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from api import background
from api.chores import maintenance, retention, rq_queue
from api.chores.retention import sweep_chunk
from api.chores.rq_queue import ChoreQueue
from api.chores.rq_worker import WORKER_TTL_S, ChoresWorker, RqWorker
from api.chores.schedule import Schedule
from shared.config.settings import Settings
from shared.errors import NotFound, StorageUnavailable
from shared.job import InputRef, Job, State
from shared.job_record import Outcome
from shared.queue import Queue, Submission
from shared.storage import Storage, connect

ROOT = Path(__file__).parents[3]
Make = Callable[..., Submission]


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    storage = connect(Settings(storage_dir=tmp_path / "objects"))
    yield storage
    await storage.close()


@pytest.fixture
async def durable_queue(durable_server: Any, settings_for: Callable[..., Settings]) -> AsyncIterator[Queue]:
    """A queue on a Redis that the test can kill and restart."""
    queue = Queue.connect(settings_for(durable_server.url))
    yield queue
    await queue.close()


async def _finished(queue: Queue, submission: Submission) -> Job:
    """Submit, claim and settle a job."""
    await queue.jobs.submit([submission])
    (claim,) = await queue.claims.claim("worker-1", [submission.job.model], 8)
    assert await queue.claims.settle("worker-1", claim.job.id, claim.epoch, Outcome(state=State.SUCCEEDED))
    return claim.job


async def _expire_retention(queue: Queue) -> None:
    """End the retention of all rows."""
    for row in await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1):
        await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})


async def test_a_sweep_removes_everything_of_an_ended_job(
    queue: Queue, storage: Storage, make_submission: Make
) -> None:
    """Its images, files of an unfinished attempt, and its record; other jobs are kept."""
    job = await _finished(queue, make_submission())
    await storage.put(f"jobs/{job.id}/1/0.png", b"unfinished", "image/png")
    await storage.put(f"jobs/{job.id}/2/0.png", b"result", "image/png")
    await _expire_retention(queue)
    kept = await _finished(queue, make_submission())
    await storage.put(f"jobs/{kept.id}/1/0.png", b"kept", "image/png")

    result = await sweep_chunk(queue, storage)

    assert (result.removed, result.failed, result.more) == (1, 0, False)
    for attempt in (1, 2):
        with pytest.raises(NotFound):
            await storage.head(f"jobs/{job.id}/{attempt}/0.png")
    assert await queue.jobs.get(job.id) is None
    assert await storage.read(f"jobs/{kept.id}/1/0.png") == b"kept"
    assert await queue.jobs.get(kept.id) is not None


async def test_an_input_of_a_queued_job_is_kept(queue: Queue, storage: Storage, make_submission: Make) -> None:
    """It is removed after the job has ended."""
    ref = InputRef(id="in_1", key="inputs/default/in_1/a.png", content_type="image/png", bytes=1, width=1, height=1)
    await storage.put(ref.key, b"x", "image/png")
    await queue.inputs.put("default", ref, 60)
    submission = make_submission(images=(ref,))
    await queue.jobs.submit([submission])
    await _expire_retention(queue)
    assert (await sweep_chunk(queue, storage)).removed == 0
    assert await storage.read(ref.key) == b"x"

    await queue.jobs.cancel(submission.job.id)
    await _expire_retention(queue)
    await sweep_chunk(queue, storage)
    with pytest.raises(NotFound):
        await storage.head(ref.key)


class FailingStorage:
    """Storage that fails to delete some prefixes, or has an outage."""

    def __init__(self, storage: Storage, *, fails: Callable[[str], bool], is_down: bool = False) -> None:
        self._storage = storage
        self._fails = fails
        self._is_down = is_down

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def delete_prefix(self, prefix: str) -> int:
        if self._fails(prefix):
            raise StorageUnavailable("no")
        return await self._storage.delete_prefix(prefix)

    async def check(self) -> None:
        if self._is_down:
            raise StorageUnavailable("no")


async def test_a_row_is_kept_until_its_objects_are_deleted(
    queue: Queue, storage: Storage, make_submission: Make
) -> None:
    """While storage is unavailable, the rows stay due."""
    job = await _finished(queue, make_submission())
    await storage.put(f"jobs/{job.id}/1/0.png", b"result", "image/png")
    await _expire_retention(queue)
    with pytest.raises(StorageUnavailable):
        await sweep_chunk(queue, FailingStorage(storage, fails=lambda prefix: True, is_down=True))
    assert [item.id for item in await queue.maintenance.expired_items(10)] == [job.id]
    assert (await sweep_chunk(queue, storage)).removed == 1


@pytest.mark.parametrize("failing", [1, 9])
async def test_failed_deletions_do_not_block_others(
    queue: Queue, storage: Storage, make_submission: Make, failing: int
) -> None:
    """Also if the oldest objects, more than are deleted at once, can never be deleted; they are tried again later."""
    jobs = [await _finished(queue, make_submission()) for _ in range(12)]
    await _expire_retention(queue)
    due = await queue.maintenance.expired_items(failing)
    prefixes = {item.prefix for item in due}
    failing_storage = FailingStorage(storage, fails=prefixes.__contains__)
    results = [await sweep_chunk(queue, failing_storage, rows=9) for _ in range(2)]
    assert (sum(one.removed for one in results), sum(one.failed for one in results)) == (len(jobs) - failing, failing)
    assert await queue.maintenance.expired_items(20) == []
    await _expire_retention(queue)
    assert {item.prefix for item in await queue.maintenance.expired_items(20)} == prefixes
    assert (await sweep_chunk(queue, storage)).removed == failing


class CountingStorage:
    """Storage whose first deletion takes until the others have ended."""

    def __init__(self, storage: Storage, others: int) -> None:
        self._storage = storage
        self._others = others
        self._left = asyncio.Event()
        self.prefixes: list[str] = []
        self.now = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def delete_prefix(self, prefix: str) -> int:
        self.prefixes.append(prefix)
        self.now += 1
        self.most = max(self.most, self.now)
        if len(self.prefixes) == 1:
            await self._left.wait()
        else:
            await asyncio.sleep(0)
            self._others -= 1
            if self._others == 0:
                self._left.set()
        self.now -= 1
        return 0


async def test_a_slow_deletion_keeps_one_place_only(queue: Queue, storage: Storage) -> None:
    """Over pages: each deletion that ends makes room for another one, and none is begun twice."""
    await _store_expired(queue, storage, 450)
    counting = CountingStorage(storage, 449)
    async with asyncio.timeout(60):
        result = await sweep_chunk(queue, counting, budget_s=60)
    assert (result.removed, result.more) == (450, False)
    assert len(counting.prefixes) == len(set(counting.prefixes)) == 450
    assert 1 < counting.most <= retention.CONCURRENCY


async def test_an_invalid_row_does_not_stop_the_sweep(queue: Queue, storage: Storage, make_submission: Make) -> None:
    """The row is logged and dropped: no object can have such a key."""
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {"job|default|../..|": 1})
    await _finished(queue, make_submission())
    await _expire_retention(queue)
    assert (await sweep_chunk(queue, storage)).removed == 2
    assert await queue.maintenance.expired_items(10) == []


async def test_a_chunk_is_bounded_and_reports_more(queue: Queue, storage: Storage, make_submission: Make) -> None:
    for _ in range(5):
        await _finished(queue, make_submission())
    await _expire_retention(queue)
    sizes = [(result.removed, result.more) for result in [await sweep_chunk(queue, storage, rows=2) for _ in range(3)]]
    assert sizes == [(2, True), (2, True), (1, False)]


def test_a_chore_id_is_enqueued_once(redis_server: Any, settings_for: Callable[..., Settings]) -> None:
    """Two workers that enqueue the same chore run it once; rq's keys expire."""
    settings = settings_for(redis_server.url)
    with rq_queue.connect(settings) as connection:
        queue = rq_queue.rq_queue(settings, connection, ChoreQueue.UPKEEP)
        assert rq_queue.enqueue(queue, "api.chores.maintenance.move_on", chore_id="x-1", start_within_s=60)
        assert not rq_queue.enqueue(queue, "api.chores.maintenance.move_on", chore_id="x-1", start_within_s=60)
        assert queue.job_ids == [f"fusequeue-{settings.namespace}-chores-upkeep-x-1"]
        assert 0 < connection.ttl(f"rq:job:{queue.job_ids[0]}") <= 60
        queue.delete()


@contextmanager
def _chores(url: str, namespace: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a chores worker; it is killed at the end."""
    environment = {
        **os.environ,
        "FUSEQUEUE_REDIS_URL": url,
        "FUSEQUEUE_NAMESPACE": namespace,
        "FUSEQUEUE_STORAGE_DIR": str(folder / "objects"),
    }
    with open(folder / "chores.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "api.chores"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def _log(folder: Path) -> str:
    path = folder / "chores.log"
    return path.read_text() if path.exists() else ""


async def _store_expired(queue: Queue, storage: Storage, count: int) -> None:
    """Store the images of `count` jobs whose retention has ended."""
    job_ids = [f"job_{number:05d}" for number in range(count)]
    for start in range(0, len(job_ids), 100):
        await asyncio.gather(
            *(storage.put(f"jobs/{job_id}/1/0.png", b"x", "image/png") for job_id in job_ids[start : start + 100])
        )
    await queue.client.redis.zadd(
        queue.client.redis_keys.retention, {f"job|default|{job_id}|": 1 for job_id in job_ids}
    )


@pytest.mark.parametrize("budget_s", [0.0, 30.0])
async def test_a_reconcile_that_used_up_its_time_is_continued(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    """The next chunk is enqueued at once, not at the next period."""
    settings = queue.client.settings
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("FUSEQUEUE_NAMESPACE", settings.namespace)
    monkeypatch.setattr(maintenance, "RECONCILE_BUDGET_S", budget_s)
    await queue.jobs.submit([make_submission()])
    await asyncio.to_thread(maintenance.reconcile, "reconcile-1", 0, time.time() + 60)
    with rq_queue.connect(settings) as connection:
        enqueued = rq_queue.rq_queue(settings, connection, ChoreQueue.UPKEEP)
        expected = [] if budget_s else [f"{enqueued.name}-reconcile-1-1"]
        assert enqueued.job_ids == expected
        enqueued.empty()


async def test_chores_without_work_are_not_enqueued(queue: Queue) -> None:
    """An idle service runs no chores for webhooks and batches."""
    settings, keys, redis = queue.client.settings, queue.client.redis_keys, queue.client.redis
    with rq_queue.connect(settings) as connection:
        queues = [rq_queue.rq_queue(settings, connection, kind) for kind in ChoreQueue]
        schedules = [Schedule(settings, connection, kind) for kind in ChoreQueue]

        async def enqueued_at(now_s: float) -> list[str]:
            for one, schedule in zip(queues, schedules, strict=True):
                one.empty()
                await asyncio.to_thread(schedule.tick, now_s)
            ids = [job_id.removeprefix(f"{one.name}-") for one in queues for job_id in one.job_ids]
            return sorted({chore_id.partition("-")[0] for chore_id in ids})

        assert await enqueued_at(1000.0) == ["move", "reconcile", "sweep"]
        assert await enqueued_at(1004.0) == []
        await redis.zadd(keys.outbox_tenants, {"default": 1})
        assert await enqueued_at(1008.0) == ["deliver"]
        await redis.zadd(keys.batch_tenants, {"default": 1})
        assert await enqueued_at(1012.0) == ["advance", "deliver", "move"]
        await redis.delete(keys.outbox_tenants)
        await redis.zadd(keys.webhook_tenants, {"default": 2**41})
        assert await enqueued_at(1016.0) == ["advance", "deliver"]
        for one in queues:
            one.delete()


async def test_the_next_worker_completes_a_killed_sweep(
    durable_server: Any,
    durable_queue: Queue,
    tmp_path: Path,
    storage: Storage,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    """After `kill -9` during a sweep the next worker removes the rest, and rows that are not due are kept."""
    queue = durable_queue
    await storage.put("jobs/job_kept/1/0.png", b"kept", "image/png")

    def left() -> int:
        return len(list((tmp_path / "objects" / "jobs").iterdir()))

    for _ in range(5):  # retries: a sweep can end before the kill
        await _store_expired(queue, storage, 700)
        with _chores(durable_server.url, queue.client.settings.namespace, tmp_path) as first:
            await eventually(lambda: left() < 600, "the first worker sweeps", 60)
            first.kill()
            first.wait(60)
        if left() > 1:
            break
    assert left() > 1, "the sweeps ended before the kill"
    assert await queue.client.redis.zcard(queue.client.redis_keys.retention) > 0

    with _chores(durable_server.url, queue.client.settings.namespace, tmp_path) as second:
        await eventually(lambda: left() == 1, "the second worker has swept", 60)

        async def rows_removed() -> bool:
            return await queue.client.redis.zcard(queue.client.redis_keys.retention) == 0

        await eventually(rows_removed, "the rows are removed")
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
    assert await storage.read("jobs/job_kept/1/0.png") == b"kept"


async def test_maintenance_runs_without_gpu_workers(
    queue_with: Callable[..., Queue],
    redis_server: Any,
    tmp_path: Path,
    make_submission: Make,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    """An expired job ends, a lost job is queued again, and a job that a failover lost from its lane too."""
    queue = queue_with(lease_ms=50)
    lost, late = make_submission(), make_submission(model="other", time_limit_ms=0)
    await queue.jobs.submit([lost, late])
    (claim,) = await queue.claims.claim("worker-1", [lost.job.model], 1)
    assert claim.job.id == lost.job.id

    missing = make_submission(model="third")
    await queue.jobs.submit([missing])
    await queue.client.redis.delete(queue.client.redis_keys.lane(missing.signature, "standard", "default"))
    assert await queue.claims.claim("worker-1", ["third"], 1) == []

    async def moved() -> bool:
        states = [record.state if record else None for record in await queue.jobs.get_many([lost.job.id, late.job.id])]
        return states == [State.QUEUED, State.EXPIRED]

    with _chores(redis_server.url, queue.client.settings.namespace, tmp_path) as process:
        await eventually(moved, "both jobs moved", 60)

        async def claimed() -> bool:
            return [claim.job.id for claim in await queue.claims.claim("worker-1", ["third"], 1)] == [missing.job.id]

        await eventually(claimed, "the missing job is claimed", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with redis.Redis.from_url(redis_server.url) as plain:
        names = list(plain.scan_iter(match=f"rq:*fusequeue-{queue.client.settings.namespace}-*"))
        without_ttl = {name for name in names if plain.ttl(name) == -1}
        bounded = (b"rq:finished:", b"rq:workers:", b"rq:failed:", b"rq:wip:", b"rq:scheduled:", b"rq:queue:")
        assert names
        assert {name for name in without_ttl if not name.startswith(bounded)} == set()
        plain.delete(*names)


async def test_retention_deletes_while_redis_is_full(
    durable_server: Any,
    durable_queue: Queue,
    storage: Storage,
    tmp_path: Path,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    """It frees memory; rq, whose writes are refused, continues when there is some."""
    redis, retention = durable_queue.client.redis, durable_queue.client.redis_keys.retention

    async def swept() -> bool:
        return await redis.zcard(retention) == 0

    await _store_expired(durable_queue, storage, 250)
    await redis.config_set("maxmemory", 1)
    with _chores(durable_server.url, durable_queue.client.settings.namespace, tmp_path) as process:
        await eventually(swept, "the expired objects are deleted", 60)
        assert not list((tmp_path / "objects" / "jobs").glob("*/*/*.png"))
        await redis.config_set("maxmemory", 0)
        refusals = _log(tmp_path).count("chores_ready")
        await eventually(lambda: _log(tmp_path).count("chores_ready") > refusals, "the worker has started", 60)

        async def chore_ran() -> bool:
            return (
                await redis.exists(
                    f"rq:finished:{rq_queue.queue_name(durable_queue.client.settings.namespace, ChoreQueue.UPKEEP)}"
                )
                == 1
            )

        await eventually(chore_ran, "rq runs chores again", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


async def test_a_chain_of_sweeps_keeps_its_connections(
    queue: Queue, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client for each chunk stayed in memory: 100 MB after 200,000 jobs. A client of S3 takes 0.1 s to create."""
    opened: list[Settings] = []

    def connected(settings: Settings, requests: int) -> Storage:
        opened.append(settings)
        return connect(settings, requests)

    def clients() -> int:
        gc.collect()
        return sum(type(thing) is redis.Redis for thing in gc.get_objects())

    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", queue.client.settings.redis_url)
    monkeypatch.setenv("FUSEQUEUE_NAMESPACE", queue.client.settings.namespace)
    monkeypatch.setenv("FUSEQUEUE_STORAGE_DIR", str(tmp_path / "objects"))
    monkeypatch.setattr(retention, "connect", connected)
    monkeypatch.setattr(retention, "CHUNK_S", 0.0)
    await _store_expired(queue, storage, 450)
    before = clients()
    try:
        removed = [await asyncio.to_thread(maintenance.sweep, "chain", chunk, time.time() + 60) for chunk in range(6)]
    finally:
        await asyncio.to_thread(background.close_all)
    assert removed == [100, 100, 100, 100, 50, 0]
    assert clients() - before <= 1
    assert len(opened) == 1


async def test_a_chores_worker_reconnects_after_a_redis_restart(
    durable_server: Any,
    durable_queue: Queue,
    tmp_path: Path,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    """It continues after the restart, and stops on SIGTERM."""
    queue, settings = durable_queue, durable_queue.client.settings
    with _chores(durable_server.url, settings.namespace, tmp_path) as process:
        await eventually(lambda: "chores_ready" in _log(tmp_path), "the worker has started", 60)
        durable_server.kill()
        await eventually(lambda: "redis_unavailable" in _log(tmp_path), "the worker notices", 60)
        durable_server.start()

        await queue.client.redis.zadd(queue.client.redis_keys.retention, {"job|default|job_1|": 1})
        with rq_queue.connect(settings) as connection:
            rq_queue.enqueue(
                rq_queue.rq_queue(settings, connection, ChoreQueue.UPKEEP),
                "api.chores.maintenance.sweep",
                "restart",
                0,
                0.0,
                chore_id="restart-0",
                start_within_s=60,
            )

        async def swept() -> bool:
            return await queue.client.redis.zcard(queue.client.redis_keys.retention) == 0

        await eventually(swept, "a sweep after the restart", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_an_idle_queue_is_read_by_a_connection_that_waits_for_long(
    redis_server: Any, settings_for: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the timeout of commands, an idle process would lose its connection at each blocking read."""
    timeouts: list[float] = []

    def work(worker: RqWorker, **_options: object) -> None:
        pool = worker.connection.connection_pool
        connection = pool.get_connection()
        timeouts.append(connection.socket_timeout)
        pool.release(connection)
        raise KeyboardInterrupt  # ends the process

    monkeypatch.setattr(RqWorker, "work", work)
    kept = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            ChoresWorker(settings_for(redis_server.url), ChoreQueue.WEBHOOKS).run()
    finally:
        signal.signal(signal.SIGTERM, kept)
    (timeout,) = timeouts
    assert timeout >= WORKER_TTL_S - 15
