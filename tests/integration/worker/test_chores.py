"""Chores on a real Redis: what a sweep removes, and that no kill keeps it from being removed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from shared.config.settings import Settings
from shared.errors import NotFound, StorageUnavailable
from shared.job import InputRef, Job, Outcome, State
from shared.queue import Queue, Submission
from shared.storage import Storage, connect
from worker.chores import rq_queue
from worker.chores.maintenance import sweep_chunk
from worker.chores.schedule import Schedule

ROOT = Path(__file__).parents[3]
Make = Callable[..., Submission]


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    opened = connect(Settings(storage_dir=tmp_path / "objects"))
    yield opened
    await opened.close()


@pytest.fixture
async def durable_queue(durable_server: Any, settings_for: Callable[..., Settings]) -> AsyncIterator[Queue]:
    """A queue on a Redis that the test may kill and start again."""
    opened = Queue.connect(settings_for(durable_server.url))
    yield opened
    await opened.close()


async def _finished(queue: Queue, submission: Submission) -> Job:
    """Put a job through to its end."""
    await queue.jobs.submit([submission])
    (claim,) = await queue.claims.claim("worker-1", [submission.job.model], 8)
    assert await queue.claims.settle("worker-1", claim.job.id, claim.epoch, Outcome(state=State.SUCCEEDED))
    return claim.job


async def _age(queue: Queue) -> None:
    """Let the retention of all that is there be over."""
    for row in await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1):
        await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})


async def test_a_sweep_removes_all_of_a_finished_job(queue: Queue, storage: Storage, make_submission: Make) -> None:
    """Its pictures, a half-done attempt that nobody points to, its record: all goes, and nothing else does."""
    job = await _finished(queue, make_submission())
    await storage.put(f"jobs/{job.id}/1/0.png", b"half done", "image/png")
    await storage.put(f"jobs/{job.id}/2/0.png", b"result", "image/png")
    await _age(queue)
    kept = await _finished(queue, make_submission())
    await storage.put(f"jobs/{kept.id}/1/0.png", b"kept", "image/png")

    swept = await sweep_chunk(queue, storage)

    assert (swept.removed, swept.failed, swept.more) == (1, 0, False)
    for attempt in (1, 2):
        with pytest.raises(NotFound):
            await storage.head(f"jobs/{job.id}/{attempt}/0.png")
    assert await queue.jobs.get(job.id) is None
    assert await storage.read(f"jobs/{kept.id}/1/0.png") == b"kept"
    assert await queue.jobs.get(kept.id) is not None


async def test_an_input_that_a_waiting_job_uses_is_kept(queue: Queue, storage: Storage, make_submission: Make) -> None:
    """An input's time is not over while a job still needs it; then it is."""
    ref = InputRef(id="in_1", key="inputs/default/in_1/a.png", content_type="image/png", bytes=1, width=1, height=1)
    await storage.put(ref.key, b"x", "image/png")
    await queue.jobs.put_input("default", ref, 60)
    submission = make_submission(images=(ref,))
    await queue.jobs.submit([submission])
    await _age(queue)
    assert (await sweep_chunk(queue, storage)).removed == 0
    assert await storage.read(ref.key) == b"x"

    await queue.jobs.cancel(submission.job.id)
    await _age(queue)
    await sweep_chunk(queue, storage)
    with pytest.raises(NotFound):
        await storage.head(ref.key)


class Failing:
    """A folder that will not delete some prefixes."""

    def __init__(self, storage: Storage, *, fails: Callable[[str], bool]) -> None:
        self._storage = storage
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def delete_prefix(self, prefix: str) -> int:
        if self._fails(prefix):
            raise StorageUnavailable("no")
        return await self._storage.delete_prefix(prefix)


async def test_nothing_is_forgotten_that_storage_still_holds(
    queue: Queue, storage: Storage, make_submission: Make
) -> None:
    """Storage first, then the row: while storage is down, the rows stay due."""
    job = await _finished(queue, make_submission())
    await storage.put(f"jobs/{job.id}/1/0.png", b"result", "image/png")
    await _age(queue)
    with pytest.raises(StorageUnavailable):
        await sweep_chunk(queue, Failing(storage, fails=lambda prefix: True))
    assert [doomed.id for doomed in await queue.maintenance.expired_items(10)] == [job.id]
    assert (await sweep_chunk(queue, storage)).removed == 1


async def test_one_object_that_stays_does_not_keep_the_others(
    queue: Queue, storage: Storage, make_submission: Make
) -> None:
    """A fault of one prefix is told, and the rest of the piece is done."""
    jobs = [await _finished(queue, make_submission()) for _ in range(12)]
    await _age(queue)
    swept = await sweep_chunk(queue, Failing(storage, fails=lambda prefix: jobs[0].id in prefix))
    assert (swept.removed, swept.failed) == (11, 1)
    assert [doomed.id for doomed in await queue.maintenance.expired_items(20)] == [jobs[0].id]


async def test_a_row_that_names_no_key_does_not_stop_the_sweep(
    queue: Queue, storage: Storage, make_submission: Make
) -> None:
    """Such a row is dropped, with a line in the log: nothing can be stored under it."""
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {"job|default|../..|": 1})
    await _finished(queue, make_submission())
    await _age(queue)
    assert (await sweep_chunk(queue, storage)).removed == 2
    assert await queue.maintenance.expired_items(10) == []


async def test_a_piece_is_bounded_and_tells_of_more(queue: Queue, storage: Storage, make_submission: Make) -> None:
    """A sweep of any backlog is made of small pieces."""
    for _ in range(5):
        await _finished(queue, make_submission())
    await _age(queue)
    sizes = [(swept.removed, swept.more) for swept in [await sweep_chunk(queue, storage, rows=2) for _ in range(3)]]
    assert sizes == [(2, True), (2, True), (1, False)]


def test_a_chore_is_in_line_once_for_each_id(redis_server: Any, settings_for: Callable[..., Settings]) -> None:
    """Two workers that put the same chore in get it done once; what rq keeps of it ends by itself."""
    settings = settings_for(redis_server.url)
    with rq_queue.connect(settings) as connection:
        queue = rq_queue.rq_queue(settings, connection)
        assert rq_queue.enqueue(queue, "worker.chores.maintenance.move_on", chore_id="x-1", start_within_s=60)
        assert not rq_queue.enqueue(queue, "worker.chores.maintenance.move_on", chore_id="x-1", start_within_s=60)
        assert queue.job_ids == [f"fusequeue-{settings.namespace}-chores-x-1"]
        assert 0 < connection.ttl(f"rq:job:{queue.job_ids[0]}") <= 60
        queue.delete()


@contextmanager
def _chores(url: str, namespace: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A chores worker's process; killed at the end if it still runs."""
    environment = {
        **os.environ,
        "FUSEQUEUE_REDIS_URL": url,
        "FUSEQUEUE_NAMESPACE": namespace,
        "FUSEQUEUE_STORAGE_DIR": str(folder / "objects"),
    }
    with open(folder / "chores.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker.chores"], cwd=ROOT, env=environment, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def _log(folder: Path) -> str:
    path = folder / "chores.log"
    return path.read_text() if path.exists() else ""


async def _doom(queue: Queue, storage: Storage, count: int) -> None:
    """Store the pictures of that many jobs, whose retention is over."""
    doomed = [f"job_{number:05d}" for number in range(count)]
    for start in range(0, len(doomed), 100):
        await asyncio.gather(
            *(storage.put(f"jobs/{job_id}/1/0.png", b"x", "image/png") for job_id in doomed[start : start + 100])
        )
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {f"job|default|{job_id}|": 1 for job_id in doomed})


async def test_what_would_find_nothing_to_do_is_not_put_in_line(queue: Queue) -> None:
    """An idle service does not run chores every two seconds for webhooks and batches that it has none of."""
    with rq_queue.connect(queue.client.settings) as connection:
        schedule = Schedule(queue.client.settings, connection)
        waiting = rq_queue.rq_queue(queue.client.settings, connection)

        async def put_at(now_s: float) -> list[str]:
            waiting.empty()
            await asyncio.to_thread(schedule.tick, now_s)
            return sorted({job_id.removeprefix(f"{waiting.name}-").partition("-")[0] for job_id in waiting.job_ids})

        assert await put_at(1000.0) == ["move", "reconcile", "sweep"]
        assert await put_at(1004.0) == []
        await queue.client.redis.xadd(queue.client.redis_keys.webhook_outbox, {"event": "1-0"})
        assert await put_at(1008.0) == ["webhooks"]
        await queue.client.redis.zadd(queue.client.redis_keys.active_batches, {"default|batch_1": 1})
        assert await put_at(1012.0) == ["batches", "move", "webhooks"]
        await queue.client.redis.delete(queue.client.redis_keys.webhook_outbox)
        await queue.client.redis.zadd(queue.client.redis_keys.webhook_hosts, {"example.com": 2**41})
        assert await put_at(1016.0) == ["batches", "webhooks"]
        waiting.delete()


async def test_a_sweep_that_is_killed_is_finished_by_the_next_worker(
    durable_server: Any,
    durable_queue: Queue,
    tmp_path: Path,
    storage: Storage,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    """`kill -9` in mid-sweep: the worker that follows removes the rest, and what was not due stays."""
    queue = durable_queue
    await storage.put("jobs/job_kept/1/0.png", b"kept", "image/png")

    def left() -> int:
        return len(list((tmp_path / "objects" / "jobs").iterdir()))

    for _ in range(5):  # a sweep may be over before this test gets to kill it: then there is another
        await _doom(queue, storage, 1500)
        with _chores(durable_server.url, queue.client.settings.namespace, tmp_path) as first:
            await eventually(lambda: left() < 1400, "the first worker sweeps", 60)
            first.kill()
            first.wait(60)
        if left() > 1:
            break
    assert left() > 1, "the sweeps were over before the kill"
    assert await queue.client.redis.zcard(queue.client.redis_keys.retention) > 0

    with _chores(durable_server.url, queue.client.settings.namespace, tmp_path) as second:
        await eventually(lambda: left() == 1, "the second worker has swept", 60)

        async def forgotten() -> bool:
            return await queue.client.redis.zcard(queue.client.redis_keys.retention) == 0

        await eventually(forgotten, "the rows are gone")
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 0
    assert await storage.read("jobs/job_kept/1/0.png") == b"kept"


async def test_jobs_move_on_without_any_gpu_worker(
    queue_with: Callable[..., Queue],
    redis_server: Any,
    tmp_path: Path,
    make_submission: Make,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    """One whose deadline passed ends, a lost one is back in line, and one that a failover took out of it too."""
    queue = queue_with(lease_ms=50)
    lost, late = make_submission(), make_submission(model="other", deadline_at_ms=1)
    await queue.jobs.submit([lost, late])
    (claim,) = await queue.claims.claim("worker-1", [lost.job.model], 1)
    assert claim.job.id == lost.job.id

    astray = make_submission(model="third")
    await queue.jobs.submit([astray])
    await queue.client.redis.delete(queue.client.redis_keys.lane(astray.signature, "standard", "default"))
    assert await queue.claims.claim("worker-1", ["third"], 1) == []

    async def moved() -> bool:
        states = [record.state if record else None for record in await queue.jobs.get_many([lost.job.id, late.job.id])]
        return states == [State.QUEUED, State.EXPIRED]

    with _chores(redis_server.url, queue.client.settings.namespace, tmp_path) as process:
        await eventually(moved, "both jobs moved", 60)

        async def found() -> bool:
            return [one.job.id for one in await queue.claims.claim("worker-1", ["third"], 1)] == [astray.job.id]

        await eventually(found, "the job that was nowhere in line is claimed", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    with redis.Redis.from_url(redis_server.url) as plain:
        names = list(plain.scan_iter(match=f"rq:*fusequeue-{queue.client.settings.namespace}-*"))
        forever = {name for name in names if plain.ttl(name) == -1}
        bounded = (b"rq:finished:", b"rq:workers:", b"rq:failed:", b"rq:wip:", b"rq:scheduled:", b"rq:queue:")
        assert names
        assert {name for name in forever if not name.startswith(bounded)} == set()
        plain.delete(*names)


async def test_a_chores_worker_comes_back_with_its_redis(
    durable_server: Any,
    durable_queue: Queue,
    tmp_path: Path,
    eventually: Callable[..., Awaitable[None]],
) -> None:
    """Redis killed and started again: the worker goes on by itself, and stops when it is told to."""
    queue, settings = durable_queue, durable_queue.client.settings
    with _chores(durable_server.url, settings.namespace, tmp_path) as process:
        await eventually(lambda: "chores_ready" in _log(tmp_path), "the worker has started", 60)
        durable_server.kill()
        await eventually(lambda: "redis_unavailable" in _log(tmp_path), "the worker notices", 60)
        durable_server.start()

        await queue.client.redis.zadd(queue.client.redis_keys.retention, {"job|default|job_1|": 1})
        with rq_queue.connect(settings) as connection:
            rq_queue.enqueue(
                rq_queue.rq_queue(settings, connection),
                "worker.chores.maintenance.sweep",
                "again",
                0,
                0.0,
                chore_id="again-0",
                start_within_s=60,
            )

        async def swept() -> bool:
            return await queue.client.redis.zcard(queue.client.redis_keys.retention) == 0

        await eventually(swept, "a sweep after the restart", 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
