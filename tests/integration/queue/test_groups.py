"""Groups: how many of their jobs have each state, whatever happens to them, and when a group begins and ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from harness.queue import claim, end, end_retention, lose, miss_deadline, put, state_of

from shared.errors import NotFound, QuotaExceeded
from shared.job import State
from shared.job_fields import Priority
from shared.job_record import Outcome
from shared.queue import Queue, Submission, scripts
from shared.queue.groups import STATES
from shared.queue.maintenance.changes import JobUpdate

Make = Callable[..., Submission]
GROUP = "nightly.7"


async def jobs_of(queue: Queue) -> dict[str, int]:
    """Return how many jobs of the group have each state that a job has, after a comparison with their records."""
    counted = {name: count for name, count in (await queue.groups.get("default", GROUP)).jobs.items() if count}
    records, _ = await queue.jobs.page("default", group=GROUP, limit=1000)
    paused = [record.state is State.QUEUED and record.paused_at_ms is not None for record in records]
    states = ["paused" if is_paused else record.state.value for record, is_paused in zip(records, paused, strict=True)]
    assert counted == Counter(states)
    return counted


async def test_a_group_counts_its_jobs_by_state_through_their_lives(queue: Queue, make_submission: Make) -> None:
    """Only its own jobs, of its own tenant."""
    await put(queue, make_submission(), make_submission(group="other"), make_submission(group=GROUP, tenant="acme"))
    await queue.changes.cancel([record.job.id for record in (await queue.jobs.page("default"))[0]])
    ids = await put(queue, *(make_submission(group=GROUP) for _ in range(4)))
    assert await jobs_of(queue) == {"queued": 4}
    first, second, *_ = [one for one in await claim(queue) if one.job.tenant == "default"]
    assert await jobs_of(queue) == {"running": 4}
    assert await end(queue, first)
    assert await end(queue, second, state=State.FAILED)
    await queue.claims.release("w1", {ids[2]: 1})
    assert await jobs_of(queue) == {"succeeded": 1, "failed": 1, "running": 1, "queued": 1}
    await lose(queue, ids[3])
    await queue.maintenance.reclaim()
    assert await jobs_of(queue) == {"succeeded": 1, "failed": 1, "queued": 2}
    await queue.jobs.cancel(ids[3])
    await queue.jobs.pause(ids[2])
    assert await jobs_of(queue) == {"succeeded": 1, "failed": 1, "canceled": 1, "paused": 1}
    await queue.changes.update([ids[2]], JobUpdate(Priority.BULK, 60_000))
    assert await jobs_of(queue) == {"succeeded": 1, "failed": 1, "canceled": 1, "paused": 1}
    await queue.jobs.resume(ids[2])
    await miss_deadline(queue, ids[2])
    await queue.maintenance.expire()
    assert await jobs_of(queue) == {"succeeded": 1, "failed": 1, "canceled": 1, "expired": 1}


async def test_a_running_job_that_is_paused_is_counted_when_its_worker_releases_it(
    queue: Queue, make_submission: Make
) -> None:
    (job_id,) = await put(queue, make_submission(group=GROUP))
    (one,) = await claim(queue)
    await queue.jobs.pause(job_id)
    assert await jobs_of(queue) == {"running": 1}
    await queue.claims.release("w1", {job_id: one.epoch})
    assert await jobs_of(queue) == {"paused": 1}
    await queue.jobs.resume(job_id)
    assert await jobs_of(queue) == {"queued": 1}


async def test_a_job_that_waits_for_another_is_queued_again_after_its_pause(
    queue: Queue, make_submission: Make
) -> None:
    (parent,) = await put(queue, make_submission(group=GROUP))
    (child,) = await put(queue, make_submission(group=GROUP, after=(parent,)))
    await queue.jobs.pause(child)
    assert await jobs_of(queue) == {"queued": 1, "paused": 1}
    await queue.jobs.resume(child)
    assert await jobs_of(queue) == {"queued": 2}


async def test_a_redriven_job_is_queued_again(queue: Queue, make_submission: Make) -> None:
    (job_id,) = await put(queue, make_submission(group=GROUP))
    await end(queue, (await claim(queue))[0], state=State.FAILED)
    await queue.dead_letters.bury(job_id, "failed", "")
    assert await queue.dead_letters.redrive(job_id)
    assert await jobs_of(queue) == {"queued": 1}


@pytest.mark.parametrize("batch_id", [None, "b1"])
@pytest.mark.parametrize("by_retention", [False, True], ids=["deleted", "expired"])
async def test_a_group_ends_with_its_last_job(
    queue: Queue, make_submission: Make, batch_id: str | None, by_retention: bool
) -> None:
    """A job leaves its group when it is deleted, and when its retention ends and its record has expired."""
    ids = await put(queue, *(make_submission(group=GROUP, batch_id=batch_id) for _ in range(2)))
    for one in await claim(queue):
        await end(queue, one)
    for left, job_id in zip((1, 0), ids, strict=True):
        if by_retention:
            await queue.client.redis.delete(queue.client.redis_keys.job(job_id))
            await end_retention(queue, job_id)
        else:
            assert await queue.jobs.forget(job_id)
        if left:
            assert await jobs_of(queue) == {"succeeded": 1}
    with pytest.raises(NotFound):
        await queue.groups.get("default", GROUP)
    assert await queue.groups.page("default", None, 20) == ([], None)
    assert await queue.jobs.page("default", batch_id=batch_id) == ([], None)


async def test_a_tenant_has_a_limited_number_of_groups(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one script count too; a group that exists takes more jobs, and the refused ones are not kept."""
    monkeypatch.setattr(scripts, "MAX_GROUPS", 2)
    names = ("a", "b", "c", "a")
    results = await queue.jobs.submit([make_submission(group=name) for name in names])
    assert [isinstance(result, QuotaExceeded) for result in results] == [False, False, True, False]
    assert isinstance(results[2], QuotaExceeded)
    assert (results[2].quota, "name a group that exists" in results[2].message) == ("groups", True)
    await put(queue, make_submission(group="c", tenant="acme"), make_submission())
    assert len((await queue.jobs.page("default"))[0]) == 4


async def test_groups_are_listed_by_their_last_submit(queue: Queue, make_submission: Make) -> None:
    for name in ("a", "b", "c", "a"):
        await put(queue, make_submission(group=name))
    first, cursor = await queue.groups.page("default", None, 2)
    assert cursor is not None
    rest, end_of_list = await queue.groups.page("default", cursor, 2)
    listed = sorted(group.name for group in (*first, *rest))
    assert (listed, end_of_list) == (["a", "b", "c"], None)
    times = [group.last_submit_ms for group in (*first, *rest)]
    assert times == sorted(times, reverse=True)
    assert await queue.groups.page("acme", None, 20) == ([], None)


async def test_a_group_knows_its_device_time_and_when_it_ends(queue: Queue, make_submission: Make) -> None:
    """At the rate of its ended jobs; canceled ones do not count."""
    ids = await put(queue, *(make_submission(group=GROUP) for _ in range(4)))
    assert (await queue.groups.get("default", GROUP)).eta_s is None
    (one,) = await claim(queue, 1)
    outcome = Outcome(state=State.SUCCEEDED, device_seconds=1.5)
    assert await queue.claims.settle("w1", one.job.id, one.epoch, outcome)
    left = next(job_id for job_id in ids if job_id != one.job.id)
    await queue.jobs.cancel(left)
    group = await queue.groups.get("default", GROUP)
    assert (group.device_seconds, group.recent) == (1.5, 1)
    assert group.eta_s == pytest.approx(2 * group.recent_s)


async def test_a_state_that_an_older_worker_did_not_note_is_repaired(queue: Queue, make_submission: Make) -> None:
    ids = await put(queue, *(make_submission(group=GROUP) for _ in range(2)))
    await end(queue, (await claim(queue, 1))[0])
    (queued,) = [job_id for job_id in ids if await state_of(queue, job_id) is State.QUEUED]
    await queue.jobs.pause(queued)
    name = queue.client.redis_keys.group_states("default", GROUP)
    await queue.client.redis.zadd(name, {ids[0]: 2 * 2**42, ids[1]: 0})
    assert await queue.maintenance.reconcile() >= 2
    assert await jobs_of(queue) == {"succeeded": 1, "paused": 1}
    assert await queue.maintenance.reconcile() == 0


def test_the_states_are_those_of_jobs() -> None:
    assert set(STATES) - {"paused"} == set(State)
