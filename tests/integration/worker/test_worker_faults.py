"""A worker on a real Redis with a stub engine: lost claims, unexpected errors, cost curves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from harness.stub_engine import StubFleet

from shared.job import Job, JobRecord, Priority
from shared.queue import Queue

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
