"""An error that no part of the worker expects fails the job that it belongs to, at once and under its own name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from harness.stub_engine import StubFleet

from shared.job import Job, State
from shared.job_record import JobRecord
from shared.queue import Queue
from worker.claims.claimed_job import ClaimedJob
from worker.job_runner import JobRunner
from worker.output import upload

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]


@pytest.fixture
async def fleet(queue: Queue, tmp_path: Path) -> AsyncIterator[StubFleet]:
    fleet = StubFleet(queue, tmp_path)
    yield fleet
    await fleet.close()


async def ended(fleet: StubFleet, eventually: Eventually, *jobs: Job) -> list[JobRecord]:
    """Return the jobs' records once all have ended, which no lease's expiry may bring about."""

    async def all_ended() -> bool:
        records = await fleet.queue.jobs.get_many([job.id for job in jobs])
        return all(record is not None and record.state.terminal for record in records)

    await eventually(all_ended, "the jobs have ended", timeout_s=10)
    return [record for record in await fleet.queue.jobs.get_many([job.id for job in jobs]) if record is not None]


def failing_for(job: Job, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, which raises for calls that name the job."""

    def names(value: Any) -> bool:
        found = getattr(value, "claim", value)
        found = getattr(found, "job", found)
        return (isinstance(found, Job) and found == job) or (isinstance(value, str) and job.id in value)

    def fail(*args: Any, **named: Any) -> Any:
        if any(names(value) for value in args):
            raise ZeroDivisionError("broken part")
        return method(*args, **named)

    return fail


def break_encoding(monkeypatch: pytest.MonkeyPatch, fleet: StubFleet, job: Job) -> None:
    monkeypatch.setattr(upload, "encode", failing_for(job, upload.encode))


def break_storage(monkeypatch: pytest.MonkeyPatch, fleet: StubFleet, job: Job) -> None:
    monkeypatch.setattr(fleet.storage, "put", failing_for(job, fleet.storage.put))


def break_inputs(monkeypatch: pytest.MonkeyPatch, fleet: StubFleet, job: Job) -> None:
    monkeypatch.setattr(JobRunner, "_fetch_inputs", failing_for(job, JobRunner._fetch_inputs))


def break_output_event(monkeypatch: pytest.MonkeyPatch, fleet: StubFleet, job: Job) -> None:
    method = ClaimedJob.upload

    def fail(claimed: ClaimedJob, *args: Any) -> None:
        failing_for(job, method)(claimed, *args)

    monkeypatch.setattr(ClaimedJob, "upload", fail)


def break_settling(monkeypatch: pytest.MonkeyPatch, fleet: StubFleet, job: Job) -> None:
    method = JobRunner._settle

    async def fail(runner: JobRunner, claimed: ClaimedJob, outcome: Any) -> bool:
        if claimed.job == job and outcome.state is State.SUCCEEDED:
            raise ZeroDivisionError("broken part")
        return await method(runner, claimed, outcome)

    monkeypatch.setattr(JobRunner, "_settle", fail)


def break_start(monkeypatch: pytest.MonkeyPatch, fleet: StubFleet, job: Job) -> None:
    batch_log = fleet.workers[0]._batch_log
    monkeypatch.setattr(batch_log, "admit", failing_for(job, batch_log.admit))


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (break_encoding, "encoding_failed"),
        (break_storage, "upload_failed"),
        (break_inputs, "internal_error"),
        (break_output_event, "internal_error"),
        (break_settling, "internal_error"),
        (break_start, "internal_error"),
    ],
)
async def test_unexpected_error_fails_its_job_at_once_and_its_batch_mates_finish(
    fleet: StubFleet,
    make_job: MakeJob,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[..., None],
    code: str,
) -> None:
    bad, *mates = (make_job() for _ in range(3))
    async with fleet.worker("demo", job_s=0.05) as (worker, _):
        broken(monkeypatch, fleet, bad)
        await fleet.submit(bad, *mates)
        record, *others = await ended(fleet, eventually, bad, *mates)
        await eventually(lambda: worker.slots_in_use == 0, "the worker holds no job")
    assert [other.state for other in others] == [State.SUCCEEDED] * 2
    assert (record.state, record.attempts, record.losses) == (State.FAILED, 1, 0)
    assert record.error is not None
    assert (record.error.code, record.error.message.count("broken part")) == (code, 1)
    assert await fleet.queue.dead_letters.page() == ([], None)


async def test_preview_that_cannot_be_encoded_is_dropped(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image follows."""
    job = make_job(previews=1)
    async with fleet.worker("demo") as (_, engine):
        await fleet.submit(job)
        await eventually(lambda: len(engine.requests) == 1, "the job runs")
        monkeypatch.setattr("worker.output.image_encoding.encode_preview", lambda *_: 1 / 0)
        engine.preview(f"{job.id}:1")
        engine.finish(f"{job.id}:1")
        (record,) = await ended(fleet, eventually, job)
    assert record.state is State.SUCCEEDED


async def test_background_loop_that_fails_during_a_drain_ends_the_worker_and_releases_its_jobs(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without renewals the leases of its jobs would expire long before the drain timeout, and count as losses."""
    job = make_job()
    fleet.settings = fleet.settings.model_copy(update={"drain_timeout_s": 60.0})
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the worker ends with its block
        async with asyncio.timeout(30), fleet.worker("demo") as (worker, engine):
            await fleet.submit(job)
            await eventually(lambda: len(engine.requests) == 1, "the job runs")
            worker.drain()
            await asyncio.sleep(0)
            monkeypatch.setattr(fleet.queue.claims, "renew", lambda *_: 1 / 0)
    record = await fleet.queue.jobs.get(job.id)
    assert record is not None
    assert (record.state, record.losses) == (State.QUEUED, 0)
