"""Workers that cannot load a model: its jobs stay queued, and fail only where no worker may serve it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from harness.stub_engine import StubFleet

from shared.errors import LoadPostponed, ModelUnavailable
from shared.job import Job, State
from shared.job_record import JobRecord
from shared.queue import Queue

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]
POSTPONED = LoadPostponed("model 'demo' cannot be loaded from org/demo now: Connection refused")
REFUSED = ModelUnavailable("model 'demo' cannot be loaded from /models/demo: it has no folder unet")


@pytest.fixture
async def fleet(queue: Queue, tmp_path: Path) -> AsyncIterator[StubFleet]:
    fleet = StubFleet(queue, tmp_path)
    yield fleet
    await fleet.close()


async def records_of(fleet: StubFleet, jobs: Sequence[Job]) -> list[JobRecord]:
    return [record for record in await fleet.queue.jobs.get_many([job.id for job in jobs]) if record is not None]


async def states_of(fleet: StubFleet, jobs: Sequence[Job]) -> Counter[State]:
    return Counter(record.state for record in await records_of(fleet, jobs))


async def ended(fleet: StubFleet, jobs: Sequence[Job]) -> bool:
    return all(record.state.terminal for record in await records_of(fleet, jobs))


async def state_of_worker(fleet: StubFleet) -> dict[str, str]:
    return {worker.id: worker.state for worker in await fleet.queue.workers.all()}


async def test_a_model_that_cannot_be_loaded_now_loses_no_job(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """Claimed jobs are released without an attempt, none is claimed any more, and all run once the load succeeds."""
    jobs = [make_job() for _ in range(60)]
    async with fleet.worker("demo", job_s=0.0, loaded=()) as (worker, engine):
        engine.unloadable["demo"] = POSTPONED
        await fleet.submit(*jobs)

        async def unavailable() -> bool:
            return (await state_of_worker(fleet)).get(worker.name) == "unavailable"

        await eventually(unavailable, "the worker's record says so", 30)
        assert "Connection refused" in (worker.unready() or "")
        (info,) = await fleet.queue.workers.all()
        assert (info.ready_s, info.unavailable["demo"].permanent) == (None, False)
        assert 0 < info.unavailable["demo"].retry_in_s <= 60
        claimed = len(engine.submitted)
        await asyncio.sleep(1.0)
        assert len(engine.submitted) == claimed, "it claims none"
        records = await records_of(fleet, jobs)
        assert {(record.state, record.attempts, record.losses) for record in records} == {(State.QUEUED, 0, 0)}
        engine.unloadable.clear()
        await eventually(lambda: ended(fleet, jobs), "all jobs have ended", 60)
        assert worker.unready() is None
    records = await records_of(fleet, jobs)
    assert {(record.state, record.attempts, record.losses) for record in records} == {(State.SUCCEEDED, 1, 0)}


async def test_jobs_claimed_before_the_failure_is_known_are_released(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """The load that their claim started fails."""
    job = make_job()
    async with fleet.worker("demo", loaded=()) as (_, engine):
        await fleet.submit(job)
        await eventually(lambda: len(engine.requests) == 1, "the job waits for its model", 30)
        engine.unloadable["demo"] = POSTPONED
        engine.finish(engine.submitted[0], POSTPONED)

        async def released() -> bool:
            (record,) = await records_of(fleet, [job])
            return (record.state, record.attempts) == (State.QUEUED, 0)

        await eventually(released, "the job is queued again", 30)


async def test_the_other_models_of_a_worker_are_served_meanwhile(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    lost, served = [make_job() for _ in range(5)], [make_job(model="other") for _ in range(5)]
    async with fleet.worker("demo", "other", job_s=0.0) as (worker, engine):
        engine.unloadable["demo"] = POSTPONED
        await fleet.submit(*lost, *served)
        await eventually(lambda: ended(fleet, served), "the other model's jobs have ended", 60)
        assert worker.unready() is None
        assert await states_of(fleet, lost) == {State.QUEUED: 5}
    assert await states_of(fleet, served) == {State.SUCCEEDED: 5}


async def test_jobs_fail_when_every_worker_refuses_their_model(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """Permanent causes on all live workers: they end with the reason."""
    jobs = [make_job() for _ in range(20)]
    async with (
        fleet.worker("demo", job_s=0.0, loaded=()) as (_, first),
        fleet.worker("demo", job_s=0.0, loaded=()) as (_, second),
    ):
        first.unloadable["demo"] = second.unloadable["demo"] = REFUSED
        await fleet.submit(*jobs)
        await eventually(lambda: ended(fleet, jobs), "all jobs have ended", 90)
    records = await records_of(fleet, jobs)
    failures = {(record.state, record.error.code, record.error.message) for record in records if record.error}
    assert failures == {
        (State.FAILED, "model_unavailable", "model 'demo' cannot be loaded from demo: it has no folder unet")
    }


@pytest.mark.parametrize("serves_later", [False, True])
async def test_no_job_fails_on_the_word_of_one_worker_while_another_serves_its_model(
    serves_later: bool, fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """Also while the other one cannot load it now."""
    jobs = [make_job() for _ in range(30)]
    async with (
        fleet.worker("demo", job_s=0.0, loaded=()) as (faulty, broken),
        fleet.worker("demo", job_s=0.01) as (_, working),
    ):
        broken.unloadable["demo"] = REFUSED
        if serves_later:
            working.unloadable["demo"] = POSTPONED
        await fleet.submit(*jobs)
        if serves_later:

            async def both_known() -> bool:
                return Counter((await state_of_worker(fleet)).values()) == {"unavailable": 2}

            await eventually(both_known, "no worker can load it", 30)
            await asyncio.sleep(3.0)  # longer than the check of other workers
            assert await states_of(fleet, jobs) == {State.QUEUED: 30}
            working.unloadable.clear()
        await eventually(lambda: ended(fleet, jobs), "all jobs have ended", 60)
        assert "unet" in (faulty.unready() or "")
    assert await states_of(fleet, jobs) == {State.SUCCEEDED: 30}
    assert {record.attempts for record in await records_of(fleet, jobs)} == {1}
