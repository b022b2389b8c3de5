"""Clocks of machines differ, and can be set: only the clock of Redis and durations decide."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from harness.queue import claim, put, redis_ms, state_of
from harness.stub_engine import StubFleet

from api.jobs.request import JobRequest
from api.jobs.resolve import resolve_for_model
from api.routes.operators.operations import fleet_of
from shared.autoscaling import ReadyTimes
from shared.config.model_spec import ModelSpec
from shared.job import Job, State
from shared.queue import Queue, Submission
from shared.runtime.clock import now_ms

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]
HOUR_MS = 3_600_000
SPEC = ModelSpec(id="demo", source="none")


@pytest.fixture(params=[-HOUR_MS, HOUR_MS], ids=["behind", "ahead"])
def skew_ms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The clock of this machine, API and worker, is an hour behind that of Redis, or ahead of it."""
    skew, real = int(request.param), time.time_ns
    monkeypatch.setattr("shared.runtime.clock.time.time_ns", lambda: real() + skew * 1_000_000)
    return skew


def a_job(deadline_s: float) -> Job:
    request = JobRequest(model="demo", prompt="x", deadline_s=deadline_s)
    return resolve_for_model(request, SPEC, "default", now_ms())


async def test_a_deadline_counts_from_the_submit_by_the_clock_of_redis(
    queue: Queue, tmp_path: Path, skew_ms: int
) -> None:
    """A queued job keeps its time, the claim says how much is left, and clients see when it ends."""
    job = a_job(60)
    assert abs(job.created_at_ms - await redis_ms(queue) - skew_ms) < HOUR_MS / 2
    await StubFleet(queue, tmp_path).submit(job)
    assert await queue.maintenance.expire() == 0
    record = await queue.jobs.get(job.id)
    assert record is not None
    assert record.deadline_at_ms is not None
    assert 0 < record.deadline_at_ms - await redis_ms(queue) <= 60_000
    (one,) = await claim(queue)
    assert one.time_left_ms is not None
    assert 0 < one.time_left_ms <= 60_000


async def test_a_running_job_expires_by_the_clock_of_redis(
    queue: Queue, tmp_path: Path, eventually: Eventually, skew_ms: int
) -> None:
    """One ends while it runs, one that has time left ends with its result."""
    fleet = StubFleet(queue, tmp_path)
    async with fleet.worker("demo") as (worker, engine):
        made = {"created_at_ms": int(await redis_ms(queue))}  # by another machine
        short, long = (a_job(deadline_s).model_copy(update=made) for deadline_s in (1, 60))
        await fleet.submit(short, long)
        await eventually(lambda: worker.slots_in_use == 2, "both jobs run")

        async def expired() -> bool:
            return await state_of(queue, short.id) is State.EXPIRED

        await eventually(expired, "the first job expired")
        engine.finish(next(iter(engine.requests)))

        async def ended() -> bool:
            return await state_of(queue, long.id) is State.SUCCEEDED

        await eventually(ended, "the second job ended")


async def test_the_age_of_a_fleet_does_not_depend_on_clocks(
    queue: Queue, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has become ready just now is new to an API whose clock is an hour ahead."""
    real = time.time_ns
    async with StubFleet(queue, tmp_path).worker("demo"):
        monkeypatch.setattr("shared.runtime.clock.time.time_ns", lambda: real() + HOUR_MS * 1_000_000)

        async def ready_s() -> float:
            return fleet_of(await queue.workers.all(), start_s=0.0).serving.get("demo", ReadyTimes()).first_s

        async def known() -> bool:
            return await ready_s() != 0

        await eventually(known, "the worker is ready")
        assert 0 < await ready_s() < HOUR_MS / 2000


async def test_a_redriven_job_has_no_deadline(queue: Queue, make_submission: Make) -> None:
    """It has passed long ago: the new run has the time that it needs."""
    (job_id,) = await put(queue, make_submission(time_limit_ms=60_000))
    (one,) = await claim(queue)
    assert one.time_left_ms is not None
    ended = ("failed", "[]", None, "{}", "{}", 0.0, 0, 0, 0, 0, "", "0,0,0,0,0,0", None, "", 0)
    await queue.client.scripts.settle("w1", job_id, one.epoch, "t", *ended)
    await queue.dead_letters.bury(job_id, "worker_lost", "")
    assert await queue.dead_letters.redrive(job_id)
    (again,) = await claim(queue)
    assert again.time_left_ms is None
