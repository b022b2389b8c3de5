"""Many drains and many cancellations, at random times."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from harness.stub_engine import StubFleet

from shared.job import Job, State
from shared.job_record import JobRecord
from shared.queue import Queue

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]
DRAINS = 30
CANCELS = int(os.environ.get("FUSEQUEUE_TEST_CANCELS", "500"))


@pytest.fixture
async def fleet(queue: Queue, tmp_path: Path) -> AsyncIterator[StubFleet]:
    fleet = StubFleet(queue, tmp_path)
    yield fleet
    await fleet.close()


async def records_of(fleet: StubFleet, jobs: list[Job]) -> list[JobRecord]:
    return [record for record in await fleet.queue.jobs.get_many([job.id for job in jobs]) if record is not None]


async def all_ended(fleet: StubFleet, jobs: list[Job]) -> bool:
    records = await records_of(fleet, jobs)
    return len(records) == len(jobs) and all(record.state.terminal for record in records)


async def test_drains_run_no_job_twice(fleet: StubFleet, make_job: MakeJob, eventually: Eventually) -> None:
    """Workers are drained one after the other while jobs come: each job runs once, to its end."""
    jobs: list[Job] = []
    rng = random.Random(7)
    for _ in range(DRAINS):
        async with fleet.worker("demo", job_s=rng.uniform(0.0, 0.03)):
            for _ in range(5):
                jobs.append(make_job(width=rng.choice([64, 128])))
                await fleet.submit(jobs[-1])
                await asyncio.sleep(rng.uniform(0.0, 0.01))
    async with fleet.worker("demo", job_s=0.0):
        await eventually(lambda: all_ended(fleet, jobs), "all jobs have ended")
    records = await records_of(fleet, jobs)
    assert Counter(record.state for record in records) == {State.SUCCEEDED: len(jobs)}
    assert {record.losses for record in records} == {0}
    runs = Counter(key.partition(":")[0] for engine in fleet.engines for key in engine.submitted)
    assert runs == {job.id: 1 for job in jobs}


async def test_canceled_job_never_succeeds(fleet: StubFleet, make_job: MakeJob, eventually: Eventually) -> None:
    """Jobs are canceled at random times from before their claim to after their end.

    `FUSEQUEUE_TEST_CANCELS` sets how many.
    """
    rng = random.Random(11)
    responses: dict[str, JobRecord] = {}

    async def cancel_later(job: Job) -> None:
        await asyncio.sleep(rng.uniform(0.0, 0.08))
        record = await fleet.queue.jobs.cancel(job.id)
        assert record is not None
        responses[job.id] = record

    jobs: list[Job] = []
    async with fleet.worker("demo", job_s=0.02), fleet.worker("demo", job_s=0.04):
        for _ in range(0, CANCELS, 20):
            some = [make_job() for _ in range(20)]
            jobs += some
            await fleet.submit(*some)
            await asyncio.gather(*map(cancel_later, some))
        await eventually(lambda: all_ended(fleet, jobs), "all jobs have ended")
    ends = {record.job.id: record for record in await records_of(fleet, jobs)}
    pairs = Counter((responses[name].state, ends[name].state) for name in ends)
    print({f"{before} -> {after}": count for (before, after), count in pairs.items()})
    for (before, after), count in pairs.items():
        assert after is (State.SUCCEEDED if before is State.SUCCEEDED else State.CANCELED), (before, after, count)
