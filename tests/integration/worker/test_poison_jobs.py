"""Jobs that end their engine every time they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from harness.stub_engine import StubFleet

from shared.job import Job, State
from shared.queue import Queue
from shared.runtime.asyncio_tools import cancel_and_wait
from worker.engine.protocol import EngineRequest
from worker.worker import EXIT_HUNG

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]


class ProcessExit(BaseException):
    """Takes the place of the end of the worker's process."""


@pytest.fixture
async def fleet(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StubFleet]:
    def end_process(status: int) -> NoReturn:
        assert status == EXIT_HUNG
        raise ProcessExit

    monkeypatch.setattr("worker.worker.os._exit", end_process)
    fleet = StubFleet(queue, tmp_path)
    yield fleet
    await fleet.close()


async def run_workers(fleet: StubFleet, jobs: list[Job], poison: Job, failure: str | None) -> int:
    """Run one worker after the other until all jobs have ended; return how many ended with their engine."""
    exits = 0
    while exits < 9 and not await all_ended(fleet, jobs):
        worker, engine, running = fleet.start("demo", job_s=0.05)
        engine.poison, engine.failure = {poison.id}, failure
        while not running.done() and not (not engine.hung and await all_ended(fleet, jobs)):
            await asyncio.sleep(0.01)
        worker.drain()
        await asyncio.wait((running,))
        exits += isinstance(running.exception(), ProcessExit)
        await cancel_and_wait(worker._tasks)
    return exits


async def all_ended(fleet: StubFleet, jobs: list[Job]) -> bool:
    records = await fleet.queue.jobs.get_many([job.id for job in jobs])
    return all(record is not None and record.state.terminal for record in records)


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("the engine process was killed by signal 9", "the engine process was killed by signal 9"),
        ("the engine process exited with status 1", "the engine process exited with status 1"),
        (None, "the GPU thread made no progress"),
    ],
)
async def test_job_that_ends_its_engine_every_time_becomes_a_dead_letter_with_the_cause(
    fleet: StubFleet, make_job: MakeJob, failure: str | None, cause: str
) -> None:
    """Its batch mates finish, and no lease has to expire."""
    poison, *mates = jobs = [make_job() for _ in range(4)]
    await fleet.submit(*jobs)
    most = fleet.settings.max_attempts
    async with asyncio.timeout(fleet.settings.lease_ms / 1000):
        assert await run_workers(fleet, jobs, poison, failure) == 1 + most  # first with batch mates
    record, *others = await fleet.queue.jobs.get_many([job.id for job in jobs])
    assert [other.state for other in others if other] == [State.SUCCEEDED] * len(mates)
    assert [other.losses for other in others if other] == [0] * len(mates)
    assert record is not None
    assert record.error is not None
    message = f"{cause} while it ran this job solo (loss {most} of {most})"
    assert (record.state, record.error.code, record.error.message) == (State.FAILED, "worker_lost", message)
    ((letter,), _) = await fleet.queue.dead_letters.page()
    assert (letter.id, letter.reason, letter.detail) == (poison.id, "worker_lost", message)


async def lose(queue: Queue, job: Job) -> str:
    """Claim a queued job for a worker that is lost then; return the key of its next claim."""
    (claim,) = await queue.claims.claim("lost-worker", ["demo"], 8)
    assert (claim.job.id, await queue.claims.lose("lost-worker", {job.id: claim.epoch}, "killed")) == (job.id, 1)
    return f"{job.id}:{claim.epoch + 1}"


async def test_lost_job_starts_when_its_worker_holds_no_other_job(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is claimed when the others are in their last forward, and waits until they are uploaded and settled."""
    other, lost = make_job(), make_job(width=128)
    slots_at_start: dict[str, int] = {}
    storage_available = asyncio.Event()
    put = fleet.storage.put

    async def put_later(*args: Any) -> None:
        await storage_available.wait()
        await put(*args)

    monkeypatch.setattr(fleet.storage, "put", put_later)
    async with fleet.worker("demo") as (worker, engine):
        submit = engine.submit

        def submit_recorded(*requests: EngineRequest) -> None:
            slots_at_start.update({request.claim_key: worker.slots_in_use for request in requests})
            submit(*requests)

        monkeypatch.setattr(engine, "submit", submit_recorded)
        await fleet.submit(other)
        await eventually(lambda: len(engine.submitted) == 1, "the other job runs")
        await fleet.submit(lost)
        lost_key = await lose(fleet.queue, lost)
        engine.step(engine.submitted[0], step=3, total=4)
        await eventually(lambda: worker.slots_in_use == 2, "the lost job is claimed")
        engine.finish(engine.submitted[0])
        await eventually(lambda: engine.submitted[0] not in engine.requests, "the other job has left the engine")
        storage_available.set()
        await eventually(lambda: lost_key in engine.submitted, "the lost job runs")
        assert slots_at_start[lost_key] == lost.slots
        engine.finish(lost_key)
        await eventually(partial(all_ended, fleet, [other, lost]), "both have ended")


async def test_lost_job_that_waits_for_others_can_be_canceled(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    other, lost = make_job(), make_job(width=128)
    async with fleet.worker("demo") as (worker, engine):
        await fleet.submit(other)
        await eventually(lambda: len(engine.submitted) == 1, "the other job runs")
        await fleet.submit(lost)
        await lose(fleet.queue, lost)
        engine.step(engine.submitted[0], step=3, total=4)
        await eventually(lambda: worker.slots_in_use == 2, "the lost job is claimed")
        await fleet.queue.jobs.cancel(lost.id)
        await eventually(partial(all_ended, fleet, [lost]), "the lost job has ended")
        assert len(engine.submitted) == 1
        engine.finish(engine.submitted[0])
        await eventually(partial(all_ended, fleet, [other]), "the other job has ended")


async def test_worker_claims_nothing_until_its_lost_job_has_ended(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    """Also in the job's last forward, after which its slots are free: what ends the worker can be the decoding."""
    lost, other = make_job(), make_job()
    await fleet.submit(lost)
    lost_key = await lose(fleet.queue, lost)
    async with fleet.worker("demo") as (_, engine):
        await eventually(lambda: engine.submitted == [lost_key], "the lost job runs")
        engine.step(lost_key, step=3, total=4)
        await fleet.submit(other)
        async with fleet.worker("demo") as (_, next_engine):
            await eventually(lambda: len(next_engine.submitted) == 1, "another worker runs the other job")
            next_engine.finish(next_engine.submitted[0])
            await eventually(partial(all_ended, fleet, [other]), "it has ended")
        engine.finish(lost_key)
        await eventually(partial(all_ended, fleet, [lost]), "the lost job has ended")
