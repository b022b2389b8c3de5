"""A worker on a real Redis with a stub engine: lost claims, unexpected errors, cost curves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from harness.queue import lose
from harness.stub_engine import StubFleet

from shared.job import Job
from shared.job_fields import Priority
from shared.job_record import JobRecord
from shared.queue import Queue
from worker.claims import leases

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]


@pytest.fixture
async def fleet(queue: Queue, tmp_path: Path) -> AsyncIterator[StubFleet]:
    fleet = StubFleet(queue, tmp_path)
    yield fleet
    await fleet.close()


async def record_of(queue: Queue, job: Job) -> JobRecord:
    record = await queue.jobs.get(job.id)
    assert record is not None
    return record


async def test_forward_times_count_for_the_size_of_their_own_job(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """Rows of the large size cost twice as much as one; the small size still fills its batch."""
    small, large = make_job(), make_job(width=96, height=96, priority=Priority.INTERACTIVE)
    async with fleet.worker("demo") as (_, engine):
        await fleet.submit(small)
        await eventually(lambda: len(engine.submitted) == 1, "the small job runs")
        await fleet.submit(large)
        await eventually(lambda: len(engine.submitted) == 2, "the large job preempts it")
        _, large_key = engine.submitted
        for rows in (1, 2) * 8:
            engine.forward(large_key, rows, seconds=float(rows))
        engine.finish(large_key)
        mates = [make_job(), make_job()]
        await fleet.submit(*mates)
        joined = {f"{job.id}:1" for job in mates}
        await eventually(lambda: joined <= engine.requests.keys(), "two jobs join the small one", timeout_s=6)
        fleet.workers[0].drain()
        for claim_key in tuple(engine.requests):
            engine.finish(claim_key)


async def test_worker_that_claims_its_own_lost_job_again_stops_the_first_run(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run waits for storage, its lease expires, and the job comes back before the next renewal."""
    monkeypatch.setattr(leases, "RENEW_EVERY_S", 2.0)
    storage_responds = asyncio.Event()
    monkeypatch.setattr(fleet.storage, "put", slow_put(fleet, "/1/", storage_responds))
    job = make_job()
    async with fleet.worker("demo") as (worker, engine):
        await fleet.submit(job)
        await eventually(lambda: len(engine.requests) == 1, "the job runs")
        engine.finish(f"{job.id}:1")
        await lose(fleet.queue, job.id)
        await fleet.queue.maintenance.reclaim()
        await eventually(lambda: f"{job.id}:2" in engine.requests, "the worker claims the job again")
        await eventually(lambda: f"{job.id}:1" in engine.canceled, "the first run is stopped", timeout_s=8)
        storage_responds.set()
        engine.finish(f"{job.id}:2")
        await eventually(lambda: worker.slots_in_use == 0, "both runs have ended")
    assert (await record_of(fleet.queue, job)).artifacts[0].key.startswith(f"jobs/{job.id}/2/")


def slow_put(fleet: StubFleet, part: str, responds: asyncio.Event) -> Callable[[str, bytes, str], Awaitable[None]]:
    """Return the storage's `put`; for keys with `part` it waits until `responds`."""
    put = fleet.storage.put

    async def slow(key: str, data: bytes, content_type: str) -> None:
        if part in key:
            await responds.wait()
        await put(key, data, content_type)

    return slow
