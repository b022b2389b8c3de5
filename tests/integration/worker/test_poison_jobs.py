"""Jobs that end their engine every time they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NoReturn

import pytest
from harness.stub_engine import StubFleet

from shared.job import Job, State
from shared.queue import Queue
from shared.runtime.asyncio_tools import cancel_and_wait
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
