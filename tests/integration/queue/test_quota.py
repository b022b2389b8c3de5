"""Running slots of a tenant: limited at every claim, without delaying other tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import MODELS, a_moment, claim, claim_ids, end, lose, put, state_of

from shared.auth import TenantLimits
from shared.job import State
from shared.job_fields import Priority
from shared.queue import Claim, Queue, Submission
from shared.queue.maintenance.pauses import Pause, PauseKind

Make = Callable[..., Submission]
LONG_MS = 60_000


async def limit(queue: Queue, slots: int, tenant: str = "acme") -> None:
    await queue.api_keys.set_limits(tenant, TenantLimits(running_slots=slots))


async def drained(queue: Queue, slots: int = 8, worker: str = "w1") -> list[Claim]:
    """Return all claimable jobs, batch by batch."""
    found: list[Claim] = []
    while batch := await claim(queue, slots, worker):
        found += batch
    return found


def tenants(claims: list[Claim]) -> Counter[str]:
    return Counter(one.job.tenant for one in claims)


async def test_a_tenant_has_no_more_slots_than_it_may(queue: Queue, make_submission: Make) -> None:
    """Over several workers, signatures and priorities; other tenants get what they need."""
    await limit(queue, 3)
    for width in (64, 128):
        for priority in Priority:
            await put(queue, *[make_submission(tenant="acme", width=width, priority=priority) for _ in range(2)])
            await put(queue, *[make_submission(tenant="other", width=width, priority=priority) for _ in range(2)])
    claims = await drained(queue) + await drained(queue, 2, "w2")
    assert tenants(claims) == {"acme": 3, "other": 12}
    assert await queue.client.redis.hgetall(queue.client.redis_keys.running_slots) == {"acme": "3", "other": "12"}
    mine = [one for one in claims if one.job.tenant == "acme"]
    assert await end(queue, mine[0])
    assert tenants(await drained(queue)) == {"acme": 1}


@pytest.mark.parametrize("most", [1, 2])
async def test_bulk_jobs_fill_the_slots_that_others_leave(most: int, queue: Queue, make_submission: Make) -> None:
    """Also where many standard jobs are queued that their tenant's limit does not let start."""
    await limit(queue, most)
    await put(queue, *[make_submission(tenant="acme") for _ in range(20)])
    await put(queue, make_submission(tenant="other"))
    await put(queue, *[make_submission(tenant=f"bulk{at}", priority=Priority.BULK) for at in range(8)])
    assert tenants(await claim(queue, 1)) == {"acme": 1}
    started = {"other": 1} | ({"acme": 1} if most == 2 else {})
    bulk = {f"bulk{at}": 1 for at in range(8 - len(started))}
    assert tenants(await claim(queue, 8, "w2")) == started | bulk


async def test_the_settings_limit_those_without_a_limit_of_their_own(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    queue = queue_with(max_running_slots_per_tenant=2)
    await limit(queue, 4, "large")
    for tenant in ("large", "small"):
        await put(queue, *[make_submission(tenant=tenant) for _ in range(6)])
    assert tenants(await drained(queue)) == {"large": 4, "small": 2}


@pytest.mark.parametrize("how", ["settle", "release", "lose", "cancel"])
async def test_however_a_job_leaves_its_slot_comes_free(queue: Queue, make_submission: Make, how: str) -> None:
    await limit(queue, 1)
    await put(queue, make_submission(tenant="acme"), make_submission(tenant="acme"))
    (first,) = await claim(queue)
    assert await claim(queue) == []
    if how == "settle":
        await end(queue, first)
    elif how == "release":
        assert await queue.claims.release("w1", {first.job.id: first.epoch}) == 1
    elif how == "lose":
        await lose(queue, first.job.id)
        assert await queue.maintenance.reclaim() == [first.job.id]
    else:
        await queue.jobs.cancel(first.job.id)
        await end(queue, first, state=State.CANCELED)
    assert await queue.client.redis.hgetall(queue.client.redis_keys.running_slots) == {}
    assert len(await drained(queue)) == 1


async def test_a_tenant_without_slots_delays_no_other_and_wakes_no_worker(queue: Queue, make_submission: Make) -> None:
    """Older signatures of a tenant without slots are skipped, and idle workers sleep."""
    await limit(queue, 1)
    await put(queue, make_submission(tenant="acme", width=64))
    (running,) = await claim(queue)
    for width in range(128, 128 + 64 * 12, 64):
        await put(queue, make_submission(tenant="acme", width=width))
    await a_moment(3)
    (other,) = await put(queue, make_submission(tenant="other", width=64))
    found = [job_id for _ in range(4) for job_id in await claim_ids(queue)]
    assert found == [other]
    for _ in range(4):
        assert await claim(queue) == []
    assert await queue.claims.next_ready_ms(MODELS) is None
    await end(queue, running)
    assert await queue.claims.next_ready_ms(MODELS) == 0
    assert len(await drained(queue)) == 1


async def test_a_freed_slot_wakes_the_workers(queue: Queue, make_submission: Make) -> None:
    await limit(queue, 1)
    await put(queue, make_submission(tenant="acme"), make_submission(tenant="acme", width=128))
    (running,) = await claim(queue)
    assert await claim(queue) == []
    await queue.wakeups.list_as_waiting("w1", MODELS, wait_s=60)
    await end(queue, running)
    assert await queue.wakeups.wait("w1", 1) is not None
    assert len(await claim(queue)) == 1
    assert not await queue.client.redis.exists(queue.client.redis_keys.deferred("acme"))


async def test_only_arrivals_of_other_tenants_wake_a_worker(queue: Queue, make_submission: Make) -> None:
    """Arrivals of a tenant without slots wake no worker; one job of another tenant is claimed at once."""
    await limit(queue, 1)
    await put(queue, make_submission(tenant="acme"), make_submission(tenant="acme"))
    assert len(await claim(queue, 1)) == 1
    assert await claim(queue) == []
    await queue.wakeups.list_as_waiting("w1", MODELS, wait_s=60)
    await put(queue, *[make_submission(tenant="acme") for _ in range(5)])
    assert await queue.wakeups.wait("w1", 0.05) is None
    assert await queue.claims.next_ready_ms(MODELS) is None
    (other,) = await put(queue, make_submission(tenant="other"))
    assert await queue.wakeups.wait("w1", 1) is not None
    assert await queue.claims.next_ready_ms(MODELS) == 0
    assert await claim_ids(queue) == [other]


async def test_jobs_queued_while_their_tenant_has_no_slots_start_later(queue: Queue, make_submission: Make) -> None:
    """Also in a signature that was empty in the meantime."""
    await limit(queue, 1)
    await put(queue, make_submission(tenant="acme"))
    (running,) = await claim(queue)
    (waiting,) = await put(queue, make_submission(tenant="acme", width=128))
    assert await claim(queue) == []
    await queue.jobs.cancel(waiting)
    await put(queue, make_submission(tenant="acme", width=128))
    assert await queue.claims.next_ready_ms(MODELS) is None
    await end(queue, running)
    assert len(await claim(queue)) == 1


async def test_jobs_of_several_slots_keep_to_the_limit_and_to_their_place(queue: Queue, make_submission: Make) -> None:
    """A job above the limit stays in its lane: it is not skipped, and starts in its turn."""
    await limit(queue, 4)
    ids = await put(queue, *[make_submission(tenant="acme", n=3) for _ in range(3)])
    first = await drained(queue)
    assert [one.job.id for one in first] == ids[:1]
    assert await queue.client.redis.exists(queue.client.redis_keys.front(first[0].signature)) == 0
    for following in ids[1:]:
        await end(queue, first.pop())
        first = await drained(queue)
        assert [one.job.id for one in first] == [following]


async def test_a_job_larger_than_the_limit_runs_while_nothing_else_of_its_tenant_does(
    queue: Queue, make_submission: Make
) -> None:
    await limit(queue, 2)
    small, large = await put(queue, make_submission(tenant="acme"), make_submission(tenant="acme", n=5))
    (running,) = await claim(queue)
    assert running.job.id == small
    assert await claim(queue) == []
    await end(queue, running)
    assert await claim_ids(queue) == [large]


async def test_jobs_given_back_or_lost_wait_for_slots_and_let_others_by(queue: Queue, make_submission: Make) -> None:
    """Before the lanes, too, a tenant without slots is skipped, however many of its jobs are there."""
    await put(queue, *[make_submission(tenant="acme") for _ in range(72)])
    mine = await drained(queue)
    await put(queue, *[make_submission(tenant="other") for _ in range(3)])
    others = await drained(queue, worker="w2")
    await lose(queue, mine[0].job.id, others[0].job.id)
    assert len(await queue.maintenance.reclaim()) == 2
    assert await queue.claims.release("w1", {one.job.id: one.epoch for one in mine[1:71]}) == 70
    assert await queue.claims.release("w2", {one.job.id: one.epoch for one in others[1:]}) == 2
    assert await queue.client.redis.hgetall(queue.client.redis_keys.running_slots) == {"acme": "1"}
    await limit(queue, 1)
    assert {one.job.id for one in await drained(queue, worker="w2")} == {one.job.id for one in others}
    await end(queue, mine[71])
    (lost,) = await drained(queue)
    assert (lost.job.id, lost.must_run_solo) == (mine[0].job.id, True)


async def test_lost_jobs_of_a_paused_tenant_hold_up_no_other(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Neither the lost jobs of others, however many are before them, nor jobs that could join a batch."""
    queue = queue_with(overdue_ms=1)
    await put(queue, *[make_submission(tenant="acme") for _ in range(40)])
    mine = await drained(queue)
    await put(queue, make_submission(tenant="other"))
    (other,) = await drained(queue, worker="w2")
    await lose(queue, *(one.job.id for one in mine), other.job.id)
    assert len(await queue.maintenance.reclaim()) == 41
    await queue.pauses.set(Pause(PauseKind.TENANT, "acme", "", 0))
    await a_moment(5)
    (found,) = await claim(queue)
    assert (found.job.id, found.must_run_solo) == (other.job.id, True)
    await end(queue, found)
    ids = await put(queue, make_submission(tenant="other"), make_submission(tenant="other"))
    (running,) = await claim(queue, 1)
    joined = await queue.claims.join("w1", running.signature, 1, models=MODELS)
    assert [running.job.id, *(one.job.id for one in joined)] == ids


async def test_a_running_batch_is_joined_within_the_limit(queue: Queue, make_submission: Make) -> None:
    await limit(queue, 2)
    await put(queue, make_submission(tenant="acme"))
    (running,) = await claim(queue, 1)
    await put(queue, *[make_submission(tenant="acme") for _ in range(3)])
    await put(queue, make_submission(tenant="other"))
    joined = await queue.claims.join("w1", running.signature, 6, models=MODELS)
    assert tenants(joined) == {"acme": 1, "other": 1}


async def test_a_wrong_counter_is_repaired(queue: Queue, make_submission: Make) -> None:
    """As after a failover: leaked slots would block a tenant permanently."""
    await limit(queue, 2)
    ids = await put(queue, make_submission(tenant="acme"), make_submission(tenant="acme"))
    (running,) = await claim(queue, 1)
    await queue.client.redis.hset(queue.client.redis_keys.running_slots, mapping={"acme": 9, "gone": 4})
    assert await queue.maintenance.reconcile() >= 1
    assert await queue.client.redis.hgetall(queue.client.redis_keys.running_slots) == {"acme": "1"}
    assert await queue.maintenance.reconcile() == 0
    assert await claim_ids(queue) == ids[1:]
    assert await state_of(queue, running.job.id) is State.RUNNING


async def test_a_large_job_at_its_tenants_limit_lets_others_pass_until_it_is_overdue(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Then the slots that become free are kept for it, and no job of its tenant is claimed or joins before it."""
    queue = queue_with(overdue_ms=LONG_MS)
    later = queue_with(namespace=queue.client.settings.namespace, overdue_ms=1)
    await limit(queue, 4)
    small = await put(queue, *[make_submission(tenant="acme") for _ in range(3)])
    running = await drained(queue)
    (large,) = await put(queue, make_submission(tenant="acme", width=128, n=4))
    small += await put(queue, *[make_submission(tenant="acme") for _ in range(6)])
    await put(queue, *[make_submission(tenant="other") for _ in range(2)])
    passed = await drained(queue)
    assert small[3] in [one.job.id for one in passed], "a free slot is used"
    assert tenants(passed) == {"acme": 1, "other": 2}
    running += [one for one in passed if one.job.tenant == "acme"]
    await end(queue, running.pop())
    running += await claim(queue)
    assert running[-1].job.id == small[4], "it was skipped just now"
    await end(queue, running.pop())
    await a_moment(5)
    assert await claim(later) == []
    joined = await later.claims.join("w1", running[0].signature, 8, models=MODELS)
    assert joined == []
    (urgent,) = await put(queue, make_submission(tenant="acme", priority=Priority.INTERACTIVE))
    first = await claim(later)
    assert [one.job.id for one in first] == [urgent], "a higher priority goes before it"
    for one in (*running, *first):
        assert await claim_ids(later) == []
        await end(queue, one)
    assert await claim_ids(later) == [large]
    assert await claim_ids(later) == []
    await end(queue, (await claimed_by(queue, large)))
    assert len(await drained(later)) == 4, "as many as the limit"


async def test_tenants_that_may_not_start_hide_no_other(queue: Queue, make_submission: Make) -> None:
    """However many they are: 700 that are paused have used less than the one that is not."""
    names = [f"paused{at}" for at in range(700)]
    for first in (0, 350):
        await put(queue, *[make_submission(tenant=name) for name in names[first : first + 350]])
    for name in names:
        await queue.pauses.set(Pause(PauseKind.TENANT, name, "", 0))
    (other,) = await put(queue, make_submission(tenant="other"))
    assert [one for _ in range(3) for one in await claim_ids(queue)] == [other]


async def test_a_limit_holds_when_two_workers_claim_at_once(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read that a slot is free; the second one finds that it is not."""
    await limit(queue, 1)
    await put(queue, make_submission(tenant="acme"), make_submission(tenant="acme", model="other"))
    take = queue.client.scripts.take
    first: list[Claim] = []

    async def take_second(*arguments: Any) -> Any:
        monkeypatch.setattr(queue.client.scripts, "take", take)
        first.extend(await queue.claims.claim("w2", ["other"], 8))
        return await take(*arguments)

    monkeypatch.setattr(queue.client.scripts, "take", take_second)
    assert await queue.claims.claim("w1", ["demo"], 8) == []
    assert len(first) == 1


async def test_slots_are_not_kept_for_a_job_that_is_gone(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    queue = queue_with(overdue_ms=1)
    await limit(queue, 4)
    await put(queue, *[make_submission(tenant="acme") for _ in range(3)])
    await drained(queue)
    (large,) = await put(queue, make_submission(tenant="acme", n=4))
    small = await put(queue, *[make_submission(tenant="acme") for _ in range(3)])
    assert await claim_ids(queue) == small[:1]
    await end(queue, await claimed_by(queue, small[0]))
    await a_moment(5)
    assert await claim_ids(queue) == []
    await queue.jobs.cancel(large)
    assert await claim_ids(queue) == small[1:2]


async def claimed_by(queue: Queue, job_id: str) -> Claim:
    """Return the claim of a running job, from its record."""
    record = await queue.jobs.get(job_id)
    assert record is not None
    return Claim(record.job, "", record.epoch, False, 0)
