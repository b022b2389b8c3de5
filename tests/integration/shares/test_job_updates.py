"""Queued jobs with a new priority or deadline: they keep their arrival, and workers see the new values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from harness.queue import a_moment, claim, claim_ids, end, put, state_of

from shared.job import Job, State
from shared.job_fields import Priority
from shared.queue import Queue, Submission
from shared.queue.maintenance.changes import JobUpdate

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]


async def job_of(queue: Queue, job_id: str) -> Job:
    record = await queue.jobs.get(job_id)
    assert record is not None
    return record.job


async def test_a_raised_job_is_claimed_first_with_its_new_priority(queue: Queue, make_submission: Make) -> None:
    first, urgent = await put(queue, make_submission(), make_submission(priority=Priority.BULK))
    assert await queue.changes.update([urgent], JobUpdate(Priority.INTERACTIVE)) == [State.QUEUED]
    assert (await job_of(queue, urgent)).priority is Priority.INTERACTIVE
    (one,) = await claim(queue, 1)
    assert (one.job.id, one.job.priority) == (urgent, Priority.INTERACTIVE)
    assert await end(queue, one)
    assert await claim_ids(queue) == [first]
    assert await queue.maintenance.reconcile() == 0


async def test_jobs_keep_their_order_by_arrival(queue: Queue, make_submission: Make) -> None:
    """Also where the new lane has jobs already: earlier arrivals go first."""
    older, *moved = await put(queue, make_submission(priority=Priority.BULK), *[make_submission() for _ in range(3)])
    await a_moment(2)
    (younger,) = await put(queue, make_submission(priority=Priority.BULK))
    await queue.changes.update(moved, JobUpdate(Priority.BULK))
    depths = await queue.workers.queue_depths()
    assert [depth.jobs for depth in depths] == [
        {Priority.INTERACTIVE: 0, Priority.STANDARD: 0, Priority.BULK: 5},
    ]
    claimed = [job_id for _ in range(5) for job_id in await claim_ids(queue, 1)]
    assert [job_id for job_id in claimed if job_id != older] == [*moved, younger]
    assert await queue.maintenance.reconcile() == 0


async def test_moving_to_an_empty_lane_and_back_changes_no_order(queue: Queue, make_submission: Make) -> None:
    ids = await put(queue, *[make_submission() for _ in range(4)])
    for priority in (Priority.BULK, Priority.INTERACTIVE, Priority.STANDARD):
        await queue.changes.update(ids[1:3], JobUpdate(priority))
    assert set(await claim_ids(queue, 2)) <= set(ids[:3])
    await queue.changes.update(ids, JobUpdate(Priority.BULK))
    assert len(await claim_ids(queue)) == 2
    assert await queue.maintenance.reconcile() == 0


async def test_the_age_of_a_job_counts_from_its_arrival(
    queue: Queue, make_submission: Make, eventually: Eventually
) -> None:
    (job_id,) = await put(queue, make_submission())
    arrived = float(await queue.client.redis.hget(queue.client.redis_keys.job(job_id), "arrived"))

    async def is_old() -> bool:
        return await queue.now_ms() >= arrived + 50

    await eventually(is_old, "the job has waited")
    await queue.changes.update([job_id], JobUpdate(Priority.BULK))
    (depth,) = await queue.workers.queue_depths()
    assert (depth.bulk_age_ms or 0) >= 50
    (one,) = await claim(queue)
    assert one.queued_ms >= 50


@pytest.mark.parametrize("waits_for", ["any", "interactive"])
async def test_a_waiting_worker_is_woken(queue: Queue, make_submission: Make, waits_for: str) -> None:
    """An idle one, or one that is full and waits for interactive jobs only."""
    (job_id,) = await put(queue, make_submission(priority=Priority.BULK, window_ms=60_000))
    await queue.client.scripts.list_as_waiting("w1", 60_000, "", waits_for == "any", "", "demo", 0)
    await queue.changes.update([job_id], JobUpdate(Priority.INTERACTIVE))
    assert await queue.client.redis.llen(queue.client.redis_keys.wakeup("w1")) == 1
    assert await claim_ids(queue) == [job_id]


async def test_a_deadline_is_set_and_removed(queue: Queue, make_submission: Make, eventually: Eventually) -> None:
    soon, never = await put(queue, *[make_submission(time_limit_ms=3_600_000) for _ in range(2)])
    assert await queue.changes.update([soon], JobUpdate(time_limit_ms=40)) == [State.QUEUED]
    assert await queue.changes.update([never], JobUpdate(time_limit_ms=0)) == [State.QUEUED]

    async def is_expired() -> bool:
        await queue.maintenance.expire()
        return await state_of(queue, soon) is State.EXPIRED

    await eventually(is_expired, "the job expires")
    (one,) = await claim(queue)
    assert (one.job.id, one.job.time_limit_ms, one.time_left_ms) == (never, None, None)


async def test_a_new_deadline_counts_from_the_change(queue: Queue, make_submission: Make) -> None:
    (job_id,) = await put(queue, make_submission())
    before = await queue.now_ms()
    await queue.changes.update([job_id], JobUpdate(time_limit_ms=60_000))
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert before + 60_000 <= (record.deadline_at_ms or 0) <= await queue.now_ms() + 60_000
    assert (record.job.time_limit_ms or 0) >= 60_000
    (one,) = await claim(queue)
    assert 0 < (one.time_left_ms or 0) <= 60_000


async def test_released_and_lost_jobs_keep_their_place(queue: Queue, make_submission: Make) -> None:
    first, second = await put(queue, make_submission(), make_submission())
    claims = await claim(queue)
    assert await queue.claims.release("w1", {one.job.id: one.epoch for one in claims}) == 2
    await queue.changes.update([second], JobUpdate(Priority.INTERACTIVE))
    assert await claim_ids(queue, 1) == [second]
    assert await claim_ids(queue, 1) == [first]
    assert await queue.maintenance.reconcile() == 0


async def test_other_jobs_are_not_changed(queue: Queue, make_submission: Make) -> None:
    running, ended, queued = await put(queue, *[make_submission() for _ in range(3)])
    (one, two) = await claim(queue, 2)
    assert (one.job.id, two.job.id) == (running, ended)
    assert await end(queue, two)
    update = JobUpdate(Priority.BULK, 1000)
    states = await queue.changes.update([running, "job_unknown", ended, queued], update)
    assert states == [State.RUNNING, None, State.SUCCEEDED, State.QUEUED]
    assert [(await job_of(queue, job_id)).priority for job_id in (running, ended)] == [Priority.STANDARD] * 2


async def test_two_changes_at_the_same_time_both_apply(queue: Queue, make_submission: Make) -> None:
    ids = await put(queue, *[make_submission() for _ in range(40)])
    await asyncio.gather(
        queue.changes.update(ids, JobUpdate(Priority.BULK)), queue.changes.update(ids, JobUpdate(time_limit_ms=60_000))
    )
    for job_id in ids:
        job = await job_of(queue, job_id)
        assert job.priority is Priority.BULK
        assert job.time_limit_ms is not None
    assert await queue.maintenance.reconcile() == 0


async def test_many_jobs_are_canceled_in_any_lane_and_state(queue: Queue, make_submission: Make) -> None:
    kinds = [{"priority": priority, "n": n, "tenant": name} for priority in Priority for n in (1, 2) for name in "ab"]
    first, *others = await put(queue, make_submission(), *[make_submission(**kind) for kind in kinds * 4])
    (running,) = await claim(queue, 1)
    for _ in range(2):
        assert await queue.changes.cancel([first, "job_unknown", *others]) == [True, False, *[True] * len(others)]
    assert await state_of(queue, running.job.id) is State.RUNNING
    assert {await state_of(queue, job_id) for job_id in (first, *others) if job_id != running.job.id} == {
        State.CANCELED
    }
    assert await end(queue, running)
    assert await state_of(queue, running.job.id) is State.CANCELED
    assert await queue.workers.queue_depths() == []
    assert await queue.maintenance.reconcile() == 0
