"""Jobs that wait for the end of others."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from harness.queue import claim, claim_ids, come_due, end, lose, put, state_of

from shared.errors import FusequeueError, InvalidRequest
from shared.job import State
from shared.job_fields import OnParentFailure
from shared.queue import Queue, Submission, scripts
from shared.queue.scripts import DUE_AT_ONCE

Make = Callable[..., Submission]


async def refusal(queue: Queue, submission: Submission) -> FusequeueError:
    (outcome,) = await queue.jobs.submit([submission])
    assert isinstance(outcome, FusequeueError)
    return outcome


async def test_a_job_starts_when_its_last_parent_has_ended_with_the_settle_of_that(
    queue: Queue, make_submission: Make
) -> None:
    parents = await put(queue, make_submission(), make_submission())
    (child,) = await put(queue, make_submission(after=tuple(parents)))
    first, second = await claim(queue)
    assert {first.job.id, second.job.id} == set(parents)
    assert await end(queue, first)
    assert await claim_ids(queue) == []
    record = await queue.jobs.get(child)
    assert record is not None
    assert record.waits
    assert await end(queue, second)
    assert await claim_ids(queue) == [child]


async def test_the_failure_of_a_parent_fails_a_chain_of_jobs(queue: Queue, make_submission: Make) -> None:
    (first,) = ids = await put(queue, make_submission())
    for _ in range(5):
        ids += await put(queue, make_submission(after=(ids[-1],)))
    (one,) = await claim(queue)
    assert one.job.id == first
    assert await end(queue, one, state=State.FAILED)
    assert [await state_of(queue, job_id) for job_id in ids] == [State.FAILED] * 6
    for parent, child in pairwise(ids):
        record = await queue.jobs.get(child)
        assert record is not None
        assert record.error is not None
        assert record.error.code == "parent_failed"
        assert parent in record.error.message
    assert await queue.maintenance.waiting_jobs() == 0


@pytest.mark.parametrize("how", ["canceled", "lost", "deadline"])
async def test_a_job_that_is_to_run_all_the_same_runs_after_a_parent_that_ended_otherwise(
    queue: Queue, make_submission: Make, how: str
) -> None:
    (parent,) = await put(queue, make_submission(time_limit_ms=1 if how == "deadline" else None))
    anyway = make_submission(after=(parent,), on_parent_failure=OnParentFailure.RUN)
    child, other = await put(queue, anyway, make_submission(after=(parent,)))
    if how == "canceled":
        await queue.jobs.cancel(parent)
    elif how == "deadline":
        while not await queue.maintenance.expire():
            pass
    else:
        for _ in range(queue.client.settings.max_attempts + 1):
            assert await claim_ids(queue) == [parent]
            await lose(queue, parent)
            await queue.maintenance.reclaim()
    assert (await state_of(queue, parent)).terminal
    assert await queue.maintenance.queue_due() == 3
    assert await claim_ids(queue) == [child]
    assert await state_of(queue, other) is State.FAILED


async def test_a_parent_with_many_children_is_settled_in_pieces(queue: Queue, make_submission: Make) -> None:
    (parent,) = await put(queue, make_submission())
    count = 2 * DUE_AT_ONCE + 10
    children = await put(queue, *(make_submission(after=(parent,)) for _ in range(count)))
    (one,) = await claim(queue)
    assert await end(queue, one)
    assert await queue.maintenance.waiting_jobs() == count  # the first piece is told, and due
    assert await queue.maintenance.queue_due() == 2 * count - DUE_AT_ONCE
    claimed: list[str] = []
    while claims := await claim(queue, 64):
        claimed += [one.job.id for one in claims]
        for one in claims:
            await end(queue, one)
    assert sorted(claimed) == sorted(children)
    keys = queue.client.redis_keys
    assert await queue.client.redis.exists(keys.ended_parents, keys.children(parent)) == 0


async def test_what_a_job_cannot_wait_for_is_refused_and_nothing_is_kept(queue: Queue, make_submission: Make) -> None:
    (foreign,) = await put(queue, make_submission(tenant="other"))
    (failed,) = await put(queue, make_submission())
    (one,) = [one for one in await claim(queue) if one.job.id == failed]
    assert await end(queue, one, state=State.FAILED)
    for parents, param in (
        ((foreign,), "after.0"),
        (("job_00000000000000000000000000",), "after.0"),
        ((failed,), "after.0"),
    ):
        error = await refusal(queue, make_submission(after=parents))
        assert isinstance(error, InvalidRequest)
        assert error.param == param
    assert await queue.maintenance.waiting_jobs() == 0
    (child,) = await put(queue, make_submission(after=(failed,), on_parent_failure=OnParentFailure.RUN))
    assert await claim_ids(queue) == [child]


async def test_a_job_has_a_bounded_number_of_children(queue: Queue, make_submission: Make) -> None:
    (parent,) = await put(queue, make_submission())
    keys = queue.client.redis_keys
    others = {f"job_{number}": number for number in range(scripts.MAX_CHILDREN)}
    await queue.client.redis.zadd(keys.children(parent), others)
    error = await refusal(queue, make_submission(after=(parent,)))
    assert "10000 jobs wait for it already" in error.message


async def test_a_canceled_job_is_waited_for_no_more_and_leaves_its_parents(queue: Queue, make_submission: Make) -> None:
    (parent,) = await put(queue, make_submission())
    (child,) = await put(queue, make_submission(after=(parent,)))
    await queue.jobs.cancel(child)
    assert await queue.client.redis.exists(queue.client.redis_keys.children(parent)) == 0
    assert await claim_ids(queue) == [parent]


async def test_a_deadline_counts_from_the_end_of_the_parents(queue: Queue, make_submission: Make) -> None:
    (parent,) = await put(queue, make_submission())
    (child,) = await put(queue, make_submission(after=(parent,), time_limit_ms=3_600_000))
    record = await queue.jobs.get(child)
    assert record is not None
    assert record.deadline_at_ms is None
    (one,) = await claim(queue)
    await end(queue, one)
    (one,) = await claim(queue)
    assert one.job.id == child
    assert one.time_left_ms is not None
    assert 3_590_000 < one.time_left_ms <= 3_600_000


async def test_a_paused_child_is_told_and_starts_when_it_is_resumed(queue: Queue, make_submission: Make) -> None:
    (parent,) = await put(queue, make_submission())
    (child,) = await put(queue, make_submission(after=(parent,)))
    await queue.jobs.pause(child)
    (one,) = await claim(queue)
    await end(queue, one)
    await queue.maintenance.queue_due()
    assert await claim_ids(queue) == []
    await queue.jobs.resume(child)
    assert await claim_ids(queue) == [child]


async def test_a_parent_whose_worker_is_killed_is_waited_for_until_it_has_run_again(
    queue: Queue, make_submission: Make
) -> None:
    (parent,) = await put(queue, make_submission())
    (child,) = await put(queue, make_submission(after=(parent,)))
    assert await claim_ids(queue) == [parent]
    await lose(queue, parent)
    await queue.maintenance.reclaim()
    assert await queue.maintenance.queue_due() == 0
    (again,) = await claim(queue)
    assert again.job.id == parent
    await end(queue, again)
    assert await claim_ids(queue) == [child]


@pytest.mark.parametrize("parent_state", ["queued", "succeeded", "failed", "gone"])
async def test_a_link_that_a_failover_has_lost_is_repaired(
    queue: Queue, make_submission: Make, parent_state: str
) -> None:
    (parent,) = await put(queue, make_submission())
    (child,) = await put(queue, make_submission(after=(parent,)))
    keys, redis = queue.client.redis_keys, queue.client.redis
    await redis.delete(keys.children(parent))
    if parent_state in ("succeeded", "failed"):
        (one,) = await claim(queue)
        await end(queue, one, state=State(parent_state))
    elif parent_state == "gone":
        await queue.jobs.cancel(parent)
        await queue.jobs.forget(parent)
    assert await queue.maintenance.reconcile() >= 1
    await queue.maintenance.queue_due()
    assert await queue.maintenance.reconcile() == 0
    if parent_state == "queued":
        assert await redis.zscore(keys.children(parent), child) is not None
    elif parent_state == "succeeded":
        assert await claim_ids(queue) == [child]
    else:
        assert await state_of(queue, child) is State.FAILED


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("parent_state", [None, State.SUCCEEDED, State.FAILED])
async def test_a_job_that_has_lost_its_place_and_its_link_is_repaired_at_once(
    queue: Queue, make_submission: Make, parent_state: State | None, paused: bool
) -> None:
    """One run repairs both: the next one is ten minutes later."""
    (parent,) = await put(queue, make_submission())
    (child,) = await put(queue, make_submission(after=(parent,)))
    if paused:
        await queue.jobs.pause(child)
    keys, redis = queue.client.redis_keys, queue.client.redis
    sets = (keys.later, keys.later_jobs("default"), keys.paused, keys.paused_jobs("default"))
    await redis.delete(keys.children(parent), *sets)
    if parent_state is not None:
        (one,) = await claim(queue)
        await end(queue, one, state=parent_state)
    await queue.maintenance.reconcile()
    await queue.maintenance.queue_due()
    assert await queue.maintenance.reconcile() == 0
    if parent_state is None:
        (one,) = await claim(queue)
        await end(queue, one)
    if parent_state is State.FAILED:
        assert await state_of(queue, child) is State.FAILED
        return
    await queue.jobs.resume(child)
    assert await claim_ids(queue) == [child]


async def test_a_lost_link_is_repaired_while_children_of_others_are_to_be_told(
    queue: Queue, make_submission: Make
) -> None:
    """Where many jobs wait for others, some are always yet to be told; that is no fault."""
    parent, other = await put(queue, make_submission(), make_submission())
    (child, _) = await put(queue, make_submission(after=(parent,)), make_submission(after=(other,)))
    keys, redis = queue.client.redis_keys, queue.client.redis
    await redis.delete(keys.children(parent))
    await queue.jobs.cancel(other)
    await queue.jobs.cancel(parent)
    assert await redis.exists(keys.ended_parents)
    assert await queue.maintenance.reconcile() == 1
    assert await state_of(queue, child) is State.FAILED
    assert await queue.maintenance.reconcile() == 0


async def test_a_parent_that_is_deleted_before_its_children_are_told_has_succeeded_for_them(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the repairs, to which it looks as if it had never been."""
    (parent,) = await put(queue, make_submission())
    (child,) = await put(queue, make_submission(after=(parent,)))
    (one,) = await claim(queue)
    with monkeypatch.context() as patch:
        patch.setattr(queue.client.scripts, "queue_due", nothing_due)  # the worker ends before it tells them
        assert await end(queue, one)
    assert await queue.jobs.forget(parent)
    assert await queue.maintenance.reconcile() == 0
    await queue.maintenance.queue_due()
    assert await claim_ids(queue) == [child]


async def nothing_due(limit: int) -> int:
    return 0


async def test_a_parent_that_is_redriven_fails_its_children_and_ends_again_for_later_ones(
    queue: Queue, make_submission: Make
) -> None:
    """Also those that are told of its failure while it runs again, and are linked to it by the repairs."""
    (parent,) = await put(queue, make_submission())
    first, second = await put(
        queue,
        make_submission(after=(parent,)),
        make_submission(after=(parent,), on_parent_failure=OnParentFailure.RUN),
    )
    for _ in range(queue.client.settings.max_attempts + 1):
        assert await claim_ids(queue) == [parent]
        await lose(queue, parent)
        await queue.maintenance.reclaim()
    assert await state_of(queue, parent) is State.FAILED
    assert await queue.dead_letters.redrive(parent)
    (third,) = await put(queue, make_submission(after=(parent,)))
    await queue.maintenance.reconcile()
    await queue.maintenance.queue_due()
    assert await state_of(queue, first) is State.FAILED
    claims = {one.job.id: one for _ in range(2) for one in await claim(queue)}
    assert claims.keys() == {parent, second}
    for one in claims.values():
        await end(queue, one)
    assert await claim_ids(queue) == [third]
    keys = queue.client.redis_keys
    assert not await queue.client.redis.exists(keys.ended_parents, keys.children(parent), keys.later)


async def test_many_children_that_are_to_be_told_delay_no_job_for_later(queue: Queue, make_submission: Make) -> None:
    """Of another tenant, for example."""
    (parent,) = await put(queue, make_submission())
    children = [make_submission(after=(parent,)) for _ in range(2 * DUE_AT_ONCE)]
    await put(queue, *children)
    (other,) = await put(queue, make_submission(tenant="other", not_before_ms=await queue.now_ms() + 3_600_000))
    await queue.jobs.cancel(parent)
    await come_due(queue, other)
    assert await queue.maintenance.queue_due(0.0) == DUE_AT_ONCE
    assert await claim_ids(queue) == [other]


@pytest.mark.parametrize("parents", [1, 250], ids=["of one parent", "of many parents"])
async def test_many_children_of_a_tenant_delay_the_child_of_another_by_a_turn(
    queue: Queue, make_submission: Make, parents: int
) -> None:
    own = await put(queue, *(make_submission() for _ in range(parents)))
    many = await put(queue, *(make_submission(after=(parent,)) for parent in own for _ in range(250 // parents)))
    (parent,) = await put(queue, make_submission(tenant="other"))
    (child,) = await put(queue, make_submission(tenant="other", after=(parent,)))
    await queue.changes.cancel(own)
    await queue.jobs.cancel(parent)
    assert await queue.maintenance.queue_due(0.0) == DUE_AT_ONCE
    assert await state_of(queue, child) is State.FAILED
    states = [await state_of(queue, job_id) for job_id in many]
    assert states.count(State.QUEUED) == len(many) - (DUE_AT_ONCE - 1)
    await queue.maintenance.queue_due()
    assert {await state_of(queue, job_id) for job_id in many} == {State.FAILED}
