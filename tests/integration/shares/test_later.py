"""Jobs for later wait in no lane, and are queued when they are due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.queue import MODELS, a_moment, claim, claim_ids, come_due, end, lose, put, redis_ms, state_of

from shared.auth import TenantLimits
from shared.errors import QueueFull
from shared.job import State
from shared.job_fields import Priority
from shared.queue import Queue, Submission
from shared.queue.maintenance.changes import JobUpdate
from shared.queue.order.position import QueuePosition
from shared.queue.records import WorkerInfo
from shared.queue.scripts import DUE_AT_ONCE

Make = Callable[..., Submission]
HOUR_MS = 3_600_000


async def in_an_hour(queue: Queue) -> int:
    return int(await redis_ms(queue)) + HOUR_MS


async def claimed_while(queue: Queue, count: int) -> dict[str, float]:
    """Queue what is due and claim it until `count` jobs are claimed; return the Redis time after each claim."""
    seen: dict[str, float] = {}
    async with asyncio.timeout(20):
        while len(seen) < count:
            await queue.maintenance.queue_due()
            for one in await claim(queue, 64):
                seen[one.job.id] = await redis_ms(queue)
                await end(queue, one)
            await a_moment(2)
    return seen


async def test_jobs_for_later_start_in_the_order_in_which_they_are_due_and_none_early(
    queue: Queue, make_submission: Make
) -> None:
    start_ms = int(await redis_ms(queue)) + 1000
    due = [start_ms + 7 * (number * 37 % 60) for number in range(60)]
    ids = await put(queue, *(make_submission(not_before_ms=at) for at in due))
    at_of = dict(zip(ids, due, strict=True))
    seen = await claimed_while(queue, 60)
    assert all(seen[job_id] >= at_of[job_id] for job_id in ids)
    assert [at_of[job_id] for job_id in seen] == sorted(due)


async def test_jobs_that_are_due_at_one_time_are_queued_in_pieces_and_in_their_order(
    queue: Queue, make_submission: Make
) -> None:
    due_ms = await in_an_hour(queue)
    count = 2 * DUE_AT_ONCE + 10
    ids = await put(queue, *(make_submission(not_before_ms=due_ms) for _ in range(count)))
    await come_due(queue, *ids)
    assert await queue.maintenance.queue_due(0.0) == DUE_AT_ONCE
    assert await queue.maintenance.waiting_jobs() == count - DUE_AT_ONCE
    assert await queue.maintenance.queue_due() == count - DUE_AT_ONCE
    assert await queue.maintenance.queue_due() == 0
    assert list(await claimed_while(queue, count)) == sorted(ids)


async def test_a_job_that_is_due_with_many_of_another_tenant_is_in_the_first_batch_of_all(
    queue: Queue, make_submission: Make
) -> None:
    """Although it was submitted last, and is queued last: tenants take turns at the claim."""
    due_ms = await in_an_hour(queue)
    many = await put(queue, *(make_submission(tenant="many", not_before_ms=due_ms) for _ in range(2 * DUE_AT_ONCE)))
    (lone,) = await put(queue, make_submission(tenant="lone", not_before_ms=due_ms))
    await come_due(queue, *many, lone)
    assert await queue.maintenance.queue_due() == 2 * DUE_AT_ONCE + 1
    assert lone in await claim_ids(queue, 4)


async def test_a_job_for_later_wants_no_worker_and_counts_in_the_limit_of_its_tenant(
    queue: Queue, make_submission: Make
) -> None:
    await queue.api_keys.set_limits("default", TenantLimits(queued_jobs=2))
    due_ms = await in_an_hour(queue)
    ids = await put(queue, *(make_submission(not_before_ms=due_ms) for _ in range(2)))
    (refused,) = await queue.jobs.submit([make_submission()])
    assert isinstance(refused, QueueFull)
    assert await claim_ids(queue) == []
    assert await queue.workers.queue_depths() == []
    backlog = await queue.workers.backlog(await queue.workers.load(), {})
    assert not backlog.loads
    assert await queue.jobs.position(ids[0]) == QueuePosition(None, None)
    assert await queue.maintenance.waiting_jobs() == 2
    assert await queue.api_keys.queued_jobs(["default", "other"]) == {"default": 2, "other": 0}


async def test_a_due_job_arrives_when_it_was_due_and_wakes_a_waiting_worker(
    queue: Queue, make_submission: Make
) -> None:
    (job_id,) = await put(queue, make_submission(not_before_ms=await in_an_hour(queue)))
    await queue.wakeups.list_as_waiting("w1", MODELS, wait_s=5.0)
    assert await queue.workers.heartbeat(WorkerInfo(id="w2", models=MODELS)) is False
    await come_due(queue, job_id)
    due_ms = await redis_ms(queue)
    assert await queue.workers.heartbeat(WorkerInfo(id="w2", models=MODELS)) is True
    await a_moment(30)
    await queue.maintenance.queue_due()
    assert await queue.wakeups.wait("w1", 1.0) is not None
    (one,) = await claim(queue)
    assert one.job.id == job_id
    assert 30 <= one.queued_ms <= await redis_ms(queue) - due_ms + 100
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert not record.waits


async def test_a_time_that_has_passed_queues_a_job_at_once(queue: Queue, make_submission: Make) -> None:
    (job_id,) = await put(queue, make_submission(not_before_ms=int(await redis_ms(queue)) - 1000))
    assert await claim_ids(queue) == [job_id]


async def test_a_deadline_counts_from_when_the_job_is_due(queue: Queue, make_submission: Make) -> None:
    due_ms = await in_an_hour(queue)
    (job_id,) = await put(queue, make_submission(not_before_ms=due_ms, time_limit_ms=5000))
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert record.deadline_at_ms == due_ms + 5000
    assert await queue.maintenance.expire() == 0
    await queue.client.redis.hset(queue.client.redis_keys.job(job_id), "deadline", str(int(await redis_ms(queue))))
    await come_due(queue, job_id)
    await queue.maintenance.queue_due()
    await a_moment(5)
    assert await queue.maintenance.expire() == 1
    assert await state_of(queue, job_id) is State.EXPIRED


async def test_a_job_for_later_is_canceled_paused_and_changed_as_a_queued_one(
    queue: Queue, make_submission: Make
) -> None:
    due_ms = await in_an_hour(queue)
    canceled, paused, changed = await put(queue, *(make_submission(not_before_ms=due_ms) for _ in range(3)))
    record = await queue.jobs.cancel(canceled)
    assert record is not None
    assert record.state is State.CANCELED
    await queue.jobs.pause(paused)
    await come_due(queue, paused)
    assert await queue.maintenance.queue_due() == 0
    await queue.changes.update([changed], JobUpdate(Priority.INTERACTIVE, 2 * HOUR_MS))
    await come_due(queue, changed)
    assert await queue.maintenance.queue_due() == 1
    (one,) = await claim(queue)
    assert (one.job.id, one.job.priority) == (changed, Priority.INTERACTIVE)
    assert one.time_left_ms is not None
    await queue.jobs.resume(paused)
    assert await claim_ids(queue) == [paused]
    assert await queue.maintenance.waiting_jobs() == 0


async def test_a_pause_of_a_job_for_later_lasts_until_results_of_a_due_one_would_be_deleted(
    queue: Queue, make_submission: Make
) -> None:
    due_ms = await in_an_hour(queue)
    (job_id,) = await put(queue, make_submission(not_before_ms=due_ms))
    await queue.jobs.pause(job_id)
    ends_ms = await queue.client.redis.zscore(queue.client.redis_keys.paused, job_id)
    assert ends_ms == due_ms + 1000 * queue.client.policy("retention_s")
    await queue.jobs.resume(job_id)
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert record.waits
    assert await claim_ids(queue) == []


async def test_a_job_for_later_that_a_worker_loses_is_queued_like_any_other(
    queue: Queue, make_submission: Make
) -> None:
    (job_id,) = await put(queue, make_submission(not_before_ms=await in_an_hour(queue)))
    await come_due(queue, job_id)
    await queue.maintenance.queue_due()
    assert await claim_ids(queue) == [job_id]
    await lose(queue, job_id)
    assert await queue.maintenance.reclaim() == [job_id]
    assert await claim_ids(queue) == [job_id]


async def test_a_key_makes_one_job_for_later(queue: Queue, make_submission: Make) -> None:
    one = make_submission(not_before_ms=await in_an_hour(queue), idempotency_key="k", fingerprint="f")
    other = replace(make_submission(), idempotency_key="k", fingerprint="f")
    (first,) = await queue.jobs.submit([one])
    (again,) = await queue.jobs.submit([other])
    assert (getattr(again, "job_id", None), getattr(again, "replayed", None)) == (one.job.id, True)
    assert getattr(first, "job_id", None) == one.job.id


@pytest.mark.parametrize("lost", ["later", "later_jobs", "both"])
async def test_a_job_for_later_whose_sets_are_lost_waits_on(queue: Queue, make_submission: Make, lost: str) -> None:
    due_ms = await in_an_hour(queue)
    (job_id,) = await put(queue, make_submission(not_before_ms=due_ms, time_limit_ms=5000))
    keys = queue.client.redis_keys
    names = {"later": [keys.later], "later_jobs": [keys.later_jobs("default")]}
    await queue.client.redis.delete(*names.get(lost, [name for some in names.values() for name in some]))
    assert await queue.maintenance.reconcile() == 1
    assert await queue.client.redis.zscore(keys.later, job_id) == due_ms
    assert await queue.client.redis.smembers(keys.later_jobs("default")) == {job_id}
    assert await queue.maintenance.reconcile() == 0
    assert await claim_ids(queue) == []
