"""How many scripts waiting workers cost: a job wakes the workers that it needs, not all of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.queue import claim_ids, put
from harness.stub_engine import StubFleet

from shared.auth import TenantLimits
from shared.job import Job
from shared.queue import Queue, Submission
from worker.claims import claim_policy

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]
WORKERS = 30
CLAIMING = {"read_order", "read_lanes", "take", "defer", "list_as_waiting"}


def claiming(scripts: Counter[str]) -> int:
    return sum(count for name, count in scripts.items() if name in CLAIMING)


@asynccontextmanager
async def idle_fleet(
    queue: Queue, folder: Path, workers: int, *models: str, **options: Any
) -> AsyncIterator[StubFleet]:
    """Yield `workers` workers that have nothing to do, each with connections of its own."""
    fleet = StubFleet(queue, folder)
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            own = Queue.connect(queue.client.settings)
            stack.push_async_callback(own.close)
            await stack.enter_async_context(fleet.worker(*models, queue=own, **options))
        await asyncio.sleep(0.5)
        yield fleet
        for worker in fleet.workers:  # all at once: one after the other takes half a second each
            worker.drain()
    await fleet.close()


async def ended(queue: Queue, jobs: list[Job]) -> bool:
    records = await queue.jobs.get_many([job.id for job in jobs])
    return all(record is not None and record.state.terminal for record in records)


async def test_a_job_wakes_few_of_many_idle_workers(
    queue: Queue,
    tmp_path: Path,
    make_job: MakeJob,
    eventually: Eventually,
    scripts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """30 idle workers, 20 jobs one after the other: before, each job cost 53 scripts."""
    monkeypatch.setattr(claim_policy, "MAX_PAUSE_S", 600.0)  # no worker finds a job that it is not woken for
    async with idle_fleet(queue, tmp_path, WORKERS, "demo", job_s=0.01) as fleet:
        scripts.clear()
        for _ in range(20):
            job = make_job()
            await fleet.submit(job)
            await eventually(lambda job=job: ended(queue, [job]), "a worker is woken for the job")
        attempts = scripts["read_order"] / 20
        print(f"{claiming(scripts) / 20:.1f} scripts and {attempts:.1f} attempts a job")
        assert scripts["read_order"] <= 20 * 20
        assert claiming(scripts) <= 20 * 30


async def rate(scripts: Counter[str]) -> float:
    """Return the claiming scripts a second, over two seconds."""
    scripts.clear()
    started = time.monotonic()
    await asyncio.sleep(2.0)
    return claiming(scripts) / (time.monotonic() - started)


@pytest.mark.parametrize("ready", [False, True], ids=["idle", "ready"])
async def test_jobs_that_no_worker_can_claim_cost_few_scripts(
    queue: Queue, tmp_path: Path, make_job: MakeJob, eventually: Eventually, scripts: Counter[str], ready: bool
) -> None:
    """30 idle workers without jobs, or with one of each kind that none claims; without a backoff 1,000 a second.

    The kinds: of a tenant at its quota, of a model that no worker has, with more rows than a batch.
    """
    await queue.api_keys.set_limits("default", TenantLimits(running_slots=1))
    async with idle_fleet(queue, tmp_path, WORKERS, "demo") as fleet:
        if ready:
            await fleet.submit(make_job())
            await asyncio.sleep(0.5)
            too_large = make_job(n=fleet.max_batch + 1, tenant="another")
            await fleet.submit(make_job(width=128), make_job(model="other", tenant="another"), too_large)

        async def few() -> bool:
            return await rate(scripts) < 40

        await eventually(few, "the backoff of each worker has grown", timeout_s=30)


async def test_slots_that_become_free_while_nothing_is_queued_cost_no_script(
    queue: Queue,
    tmp_path: Path,
    make_job: MakeJob,
    eventually: Eventually,
    scripts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker waits for a wake-up, and the next job gets one: before, each end of a job cost two attempts."""
    monkeypatch.setattr(claim_policy, "MAX_PAUSE_S", 600.0)  # it does not look by itself
    async with idle_fleet(queue, tmp_path, 1, "demo", job_s=1.0) as fleet:
        jobs = [make_job() for _ in range(5)]
        for job in jobs[:4]:
            await fleet.submit(job)
            await asyncio.sleep(0.05)
        scripts.clear()
        await eventually(lambda: ended(queue, jobs[:3]), "three jobs have ended")
        assert scripts["read_lanes"] <= 2, scripts
        await fleet.submit(jobs[4])
        await eventually(lambda: ended(queue, jobs), "all jobs have ended")


async def test_a_job_whose_woken_worker_crashed_is_claimed_by_another(
    queue: Queue, tmp_path: Path, make_job: MakeJob, eventually: Eventually
) -> None:
    """The worker that waited first is gone; the others find the job by themselves."""
    async with idle_fleet(queue, tmp_path, 0) as fleet:
        await queue.wakeups.list_as_waiting("crashed", ["demo"], wait_s=60)
        async with fleet.worker("demo", job_s=0.01):
            await asyncio.sleep(0.3)
            job = make_job()
            await fleet.submit(job)
            assert await queue.wakeups.wait("crashed", 1) is not None
            await eventually(lambda: ended(queue, [job]), "the job has ended")


async def lose_next_wakeup(queue: Queue) -> None:
    """List a worker that has crashed before those that wait: it gets the next wake-up."""
    await queue.wakeups.list_as_waiting("crashed", ["demo"], wait_s=60)
    first = queue.client.redis_keys.waiting_workers("any", "demo")
    await queue.client.redis.zadd(first, {"crashed": await queue.now_ms() - 30_000})


async def test_a_lost_wakeup_is_repaired_however_long_idle_workers_pause(
    queue: Queue, tmp_path: Path, make_job: MakeJob, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By heartbeats: after a burst many pause at once, and for long, 11 s with 60 workers."""
    monkeypatch.setattr(claim_policy, "MAX_PAUSE_S", 600.0)  # no worker looks by itself
    async with idle_fleet(queue, tmp_path, 5, "demo", job_s=0.05) as fleet:
        for _ in range(2):
            await lose_next_wakeup(queue)
            job = make_job()
            await fleet.submit(job)
            assert await queue.wakeups.wait("crashed", 1) is not None
            await eventually(lambda job=job: ended(queue, [job]), "the job has ended")


async def test_a_wakeup_that_its_worker_cannot_use_is_passed_on(
    queue: Queue, tmp_path: Path, make_job: MakeJob, eventually: Eventually
) -> None:
    """A worker that stops passes on what it was woken for."""
    await queue.wakeups.list_as_waiting("stops", ["demo"], wait_s=60)
    await asyncio.sleep(0.01)
    await queue.wakeups.list_as_waiting("next", ["demo"], wait_s=60)
    await put(queue, Submission(make_job(), "s", 0, 8))
    wakeup = await queue.wakeups.wait("stops", 1)
    assert wakeup is not None
    assert await queue.wakeups.wait("next", 0.05) is None
    await queue.wakeups.stop_waiting("stops", unused=[wakeup])
    assert await queue.wakeups.wait("next", 1) is not None


async def test_each_claim_that_leaves_ready_jobs_wakes_the_next_worker(queue: Queue, make_job: MakeJob) -> None:
    """At once, and no more than that one."""
    workers = ("first", "second", "third")
    for number, worker in enumerate(workers):
        await queue.wakeups.list_as_waiting(worker, ["demo"], wait_s=60)
        first = queue.client.redis_keys.waiting_workers("any", "demo")
        await queue.client.redis.zincrby(first, number, worker)  # also if they are listed in one millisecond
    await put(queue, *(Submission(make_job(), "s", 0, 8) for _ in range(16)))
    for worker, following in pairwise(workers):
        assert await queue.wakeups.wait(worker, 1) is not None
        assert await queue.wakeups.wait(following, 0.05) is None
        assert len(await claim_ids(queue, worker=worker)) == 8
    assert await queue.wakeups.wait("third", 0.05) is None, "nothing is left"


async def test_many_jobs_wake_as_many_workers_as_they_need(
    queue: Queue, tmp_path: Path, make_job: MakeJob, eventually: Eventually
) -> None:
    async with idle_fleet(queue, tmp_path, 4, "demo") as fleet:
        jobs = [make_job() for _ in range(32)]
        await fleet.submit(*jobs)
        await eventually(
            lambda: [len(engine.requests) for engine in fleet.engines] == [8] * 4, "each worker has a full batch"
        )
        for engine in fleet.engines:
            for claim_key in tuple(engine.requests):
                engine.finish(claim_key)
        await eventually(lambda: ended(queue, jobs), "all jobs have ended")
