"""The least-served tenant goes first: within a batch, between signatures, and between models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection

import pytest
from harness.queue import MODELS, claim, claim_ids, end, put

from shared.auth import TenantLimits
from shared.job_fields import Priority
from shared.queue import Claim, Queue, Submission
from shared.queue.maintenance.pauses import Pause, PauseKind

Make = Callable[..., Submission]
SIZES = [(64 + 16 * (at % 20), 64 + 16 * (at // 20)) for at in range(400)]


async def served(queue: Queue, slots: int) -> list[str]:
    """Return the tenants of one claim, in order."""
    return [one.job.tenant for one in await claim(queue, slots)]


async def charge(queue: Queue, make_submission: Make, tenant: str, device_seconds: float) -> None:
    """Let a tenant have used the GPU for that long, just now."""
    await put(queue, make_submission(tenant=tenant))
    for one in await claim(queue):
        assert await end(queue, one, device_seconds=device_seconds)


async def test_a_flood_does_not_drown_a_single_job(queue: Queue, make_submission: Make) -> None:
    """One job of another tenant is in the next batch, however many came before it."""
    await put(queue, *[make_submission(tenant="flood") for _ in range(100)])
    await put(queue, make_submission(tenant="single"))
    assert sorted(await served(queue, 4)) == ["flood", "flood", "flood", "single"]


async def test_the_least_served_leads(queue: Queue, make_submission: Make) -> None:
    """GPU-seconds count, not jobs and not arrival."""
    await charge(queue, make_submission, "a", 30.0)
    await charge(queue, make_submission, "b", 10.0)
    for tenant in "abc":
        await put(queue, *[make_submission(tenant=tenant) for _ in range(3)])
    assert await served(queue, 1) == ["c"]  # charged at once with what a slot has cost: 28 s
    assert await served(queue, 5) == ["b", "c", "a", "b", "c"]  # slots are shared, the rest goes to who leads


async def test_charges_add_up(queue: Queue, make_submission: Make) -> None:
    """Many small jobs weigh as much as a large one."""
    for _ in range(6):
        await charge(queue, make_submission, "many", 5.0)
    await charge(queue, make_submission, "one", 20.0)
    await put(queue, make_submission(tenant="many"), make_submission(tenant="one"))
    scores = await queue.client.redis.zmscore(queue.client.redis_keys.gpu_usage, ["many", "one"])
    assert await served(queue, 2) == ["one", "many"]
    assert abs((scores[0] - scores[1]) - 0.585) < 0.05  # log2(30 / 20)


async def test_an_operator_reads_which_tenant_uses_the_devices(queue: Queue, make_submission: Make) -> None:
    """Device seconds of the last minutes, halved every five, and the images that run now."""
    await charge(queue, make_submission, "busy", 30.0)
    await put(queue, make_submission(tenant="new", n=2))
    assert await served(queue, 2) == ["new"]
    use = await queue.api_keys.tenant_use()
    assert 15.0 < use["busy"].device_seconds <= 30.1
    assert use["new"].running_slots == 2
    assert use["busy"].running_slots == 0


async def test_what_was_used_long_ago_is_forgotten(queue: Queue, make_submission: Make) -> None:
    """Service decays: rows that weigh nothing any more are pruned at the next charge."""
    await charge(queue, make_submission, "old", 1000.0)
    await queue.client.redis.zincrby(
        queue.client.redis_keys.gpu_usage, -60, "old"
    )  # as if sixty half-lives had gone by
    await charge(queue, make_submission, "new", 1.0)
    assert await queue.client.redis.zscore(queue.client.redis_keys.gpu_usage, "old") is None


async def test_what_costs_nothing_is_not_charged(queue: Queue, make_submission: Make) -> None:
    """A job that failed before it reached the GPU leaves its tenant's standing as it was."""
    await charge(queue, make_submission, "free", 0.0)
    assert await queue.client.redis.exists(queue.client.redis_keys.gpu_usage) == 0


async def test_many_tenants_are_all_served(queue: Queue, make_submission: Make) -> None:
    """More tenants than a claim looks at: those that wait longest are looked at first, and none is left out."""
    await put(queue, *[make_submission(tenant=f"t{at}") for at in range(150)])
    seen: list[str] = []
    while batch := await served(queue, 32):
        seen += batch
    assert sorted(seen) == sorted(f"t{at}" for at in range(150))


async def fill(queue: Queue, submissions: list[Submission]) -> list[str]:
    """Queue any number of jobs."""
    return [
        one for first in range(0, len(submissions), 500) for one in await put(queue, *submissions[first : first + 500])
    ]


async def run_batch(queue: Queue, slots: int = 8, device_seconds: float = 1.0) -> list[Claim]:
    """Claim one batch and end its jobs."""
    claims = await claim(queue, slots)
    for one in claims:
        assert await end(queue, one, device_seconds=device_seconds)
    return claims


async def batches_until(queue: Queue, wanted: Collection[str], most: int = 60, slots: int = 8) -> int:
    """Return how many batches run until all `wanted` jobs have started."""
    missing = set(wanted)
    for batches in range(1, most + 1):
        missing -= {one.job.id for one in await run_batch(queue, slots)}
        if not missing:
            return batches
    return most + 1


async def test_a_job_of_another_size_starts_within_two_batches(queue: Queue, make_submission: Make) -> None:
    """One tenant's 2,000 jobs of 200 sizes came before it."""
    flood = [
        make_submission(tenant="flood", width=SIZES[at % 200][0], height=SIZES[at % 200][1]) for at in range(2_000)
    ]
    await fill(queue, flood)
    await run_batch(queue)
    others = await put(
        queue, make_submission(tenant="single", width=1024), make_submission(tenant="pair", width=SIZES[150][0], n=2)
    )
    assert await batches_until(queue, others) <= 2


async def test_a_newcomer_of_a_shared_signature_waits_for_one_turn_of_the_others(
    queue: Queue, make_submission: Make
) -> None:
    """300 tenants with seven jobs each: every one of them has a turn before any has a second one."""
    await fill(queue, [make_submission(tenant=f"t{at % 300}") for at in range(2_100)])
    for _ in range(5):
        await run_batch(queue)
    (newcomer,) = await put(queue, make_submission(tenant="newcomer"))
    assert await batches_until(queue, [newcomer]) <= 300 / 8 + 2


async def test_a_newcomer_starts_at_once_among_tenants_that_were_served(queue: Queue, make_submission: Make) -> None:
    """All 300 have used the GPU: the newcomer has not."""
    await fill(queue, [make_submission(tenant=f"t{at % 300}") for at in range(900)])
    for _ in range(-(-300 // 8)):
        await run_batch(queue)
    (newcomer,) = await put(queue, make_submission(tenant="newcomer"))
    assert await batches_until(queue, [newcomer]) <= 2


async def test_skipped_jobs_of_one_tenant_come_in_its_turn(queue: Queue, make_submission: Make) -> None:
    """300 jobs of five images do not fit into the rest of a batch; another tenant's job of four precedes them."""
    await fill(queue, [make_submission(tenant="large", n=5) for _ in range(300)])
    for _ in range(3):
        await run_batch(queue)
    (other,) = await put(queue, make_submission(tenant="other", n=4))
    assert await batches_until(queue, [other]) <= 2


async def test_a_tenant_at_its_quota_delays_no_other(queue: Queue, make_submission: Make) -> None:
    """Its 400 signatures are skipped as a whole, and return when its slots become free."""
    await queue.api_keys.set_limits("acme", TenantLimits(running_slots=1))
    await fill(queue, [make_submission(tenant="acme", width=width, height=height) for width, height in SIZES])
    (running,) = await claim(queue)
    (other,) = await put(queue, make_submission(tenant="other", width=1024))
    assert await claim_ids(queue) == [other]
    assert await claim(queue) == []
    assert await queue.claims.next_ready_ms(MODELS) is None
    await end(queue, running)
    assert await queue.claims.next_ready_ms(MODELS) == 0
    assert [one.job.tenant for one in await claim(queue)] == ["acme"]


async def test_a_raised_limit_counts_at_once(queue: Queue, make_submission: Make) -> None:
    """A waiting worker is woken for the jobs that the old limit held back, while the tenant's other job still runs."""
    await queue.api_keys.set_limits("acme", TenantLimits(running_slots=1))
    first, second = await put(queue, *(make_submission(tenant="acme", width=width) for width in (64, 80)))
    assert await claim_ids(queue) == [first]
    assert await claim(queue) == []
    await queue.wakeups.list_as_waiting("w1", MODELS, wait_s=60)
    await queue.api_keys.set_limits("acme", TenantLimits(running_slots=2))
    assert await queue.wakeups.wait("w1", 2) is not None
    assert await claim_ids(queue) == [second]


async def test_the_counter_of_running_slots_decides_after_a_repair(queue: Queue, make_submission: Make) -> None:
    """A limit above the wrong number holds nothing back."""
    await queue.api_keys.set_limits("acme", TenantLimits(running_slots=1))
    await fill(queue, [make_submission(tenant="acme", width=width) for width in (64, 80, 96)])
    assert len(await claim(queue)) == 1
    assert await claim(queue) == []
    await queue.client.redis.hset(queue.client.redis_keys.running_slots, "acme", 5)
    assert await queue.maintenance.reconcile() >= 1
    await queue.api_keys.set_limits("acme", TenantLimits(running_slots=8))
    assert len(await claim(queue)) == 1


async def test_several_workers_do_not_choose_one_tenant_repeatedly(queue: Queue, make_submission: Make) -> None:
    """A claim is charged at once with its expected cost: no job has to end before another tenant is next."""
    for tenant in ("a", "b", "c"):
        await put(queue, *[make_submission(tenant=tenant, width=64 + 16 * at) for at in range(4)])
    firsts = [(await claim(queue, 1, f"w{at}"))[0].job.tenant for at in range(6)]
    assert Counter(firsts) == {"a": 2, "b": 2, "c": 2}


async def test_a_claim_that_is_released_or_lost_costs_nothing(queue: Queue, make_submission: Make) -> None:
    """The charge of a claim is removed with the claim."""
    await put(queue, make_submission(tenant="a"))
    (one,) = await claim(queue)
    usage = queue.client.redis_keys.gpu_usage
    assert await queue.client.redis.zscore(usage, "a") is not None
    assert await queue.claims.release("w1", {one.job.id: one.epoch}) == 1
    assert await queue.client.redis.zscore(usage, "a") is None


async def test_a_job_that_needs_more_slots_hides_no_other_size(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Signatures that gave nothing are passed in a claim, and in the next one those behind them."""
    queue = queue_with(overdue_ms=60_000)
    large = [make_submission(tenant=f"large{at}", n=4, width=width) for at, (width, _) in enumerate(SIZES[:20])]
    await put(queue, *large)
    for _ in range(3):
        assert await claim(queue, 2) == []
    small = await put(queue, *[make_submission(tenant=f"large{at}", width=1024 + 16 * at) for at in range(20)])
    found: list[str] = []
    for _ in range(80):
        found += [one.job.id for one in await run_batch(queue, slots=2)]
    assert set(found) == set(small)


async def test_signatures_that_gave_nothing_are_passed_at_the_next_claims(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """40 tenants came first, each with a job that needs more slots than this worker has."""
    queue = queue_with(overdue_ms=60_000)
    large = [make_submission(tenant=f"large{at}", n=4, width=64 + 16 * at) for at in range(40)]
    await put(queue, *large)
    for _ in range(10):
        assert await claim(queue, 2) == []
    (small,) = await put(queue, make_submission(tenant="small", width=1024))
    assert small in {job_id for _ in range(10) for job_id in await claim_ids(queue, 2)}


async def test_a_signature_is_found_where_those_that_gave_nothing_have_left(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """The worker begins at the page of ready signatures at which its last claim ended: it is past the end now."""
    queue = queue_with(overdue_ms=60_000)
    large = [make_submission(tenant=f"large{at}", n=4, width=64 + 16 * at) for at in range(40)]
    await put(queue, *large)
    assert await claim(queue, 2) == []
    for one in large:
        await queue.jobs.cancel(one.job.id)
    (small,) = await put(queue, make_submission(tenant="small", width=1024))
    assert await claim_ids(queue, 2) == [small]


async def share_of_bulk(queue: Queue, make_submission: Make, batches: int, bulk_width: int) -> float:
    """Return the share of bulk in the slots of `batches` batches under constant standard load."""
    await fill(queue, [make_submission(tenant="s") for _ in range(8 * batches + 8)])
    await fill(
        queue, [make_submission(tenant="b", priority=Priority.BULK, width=bulk_width) for _ in range(4 * batches)]
    )
    slots: Counter[Priority] = Counter()
    for _ in range(batches):
        for one in await run_batch(queue):
            slots[one.job.priority] += one.job.slots
    return slots[Priority.BULK] / slots.total()


async def test_bulk_gets_its_share_under_constant_standard_load(queue: Queue, make_submission: Make) -> None:
    """In another signature, a tenth of the slots."""
    assert 0.08 <= await share_of_bulk(queue, make_submission, 60, 128) <= 0.12


async def test_bulk_gets_its_share_within_a_signature(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """The same signature, with another setting."""
    queue = queue_with(bulk_share=0.25)
    assert 0.21 <= await share_of_bulk(queue, make_submission, 60, 64) <= 0.29


async def test_without_a_share_bulk_waits(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    assert await share_of_bulk(queue_with(bulk_share=0), make_submission, 30, 128) == 0


async def test_lost_orders_are_rebuilt(queue: Queue, make_submission: Make) -> None:
    """As after a failover: queued, released and lost jobs are found again."""
    keys = queue.client.redis_keys
    first = make_submission(tenant="a")
    ids = await put(queue, first, make_submission(tenant="b", width=128))
    (one,) = await claim(queue, 1)
    assert await queue.claims.release("w1", {one.job.id: one.epoch}) == 1
    rows = [keys.tenant_order("demo", "standard")]
    rows += [keys.tenant_signatures(tenant, "demo", "standard") for tenant in ("a", "b")]
    rows += [keys.lane_order(first.signature, "standard")]
    assert await queue.client.redis.delete(*rows) == 4
    assert await claim(queue) == []
    assert await queue.maintenance.reconcile() >= 2
    assert {found for _ in range(2) for found in await claim_ids(queue)} == set(ids)
    assert await queue.maintenance.reconcile() == 0


@pytest.mark.parametrize("refused", ["paused", "at their limit"])
async def test_tenants_that_cannot_start_hide_no_other(queue: Queue, make_submission: Make, refused: str) -> None:
    """However many are before it in the order of service."""
    tenants = [f"t{number:02}" for number in range(70)]
    for tenant in tenants:
        await queue.api_keys.set_limits(tenant, TenantLimits(running_slots=1))
        await put(queue, make_submission(tenant=tenant))
    started = 0
    while started < len(tenants):
        started += len(await claim(queue, len(tenants)))
    if refused == "paused":
        for tenant in tenants:
            await queue.pauses.set(Pause(PauseKind.TENANT, tenant, "", 0))
    await put(queue, *[make_submission(tenant=tenant) for tenant in tenants])
    await charge_directly(queue, "free", 1e6)
    (job_id,) = await put(queue, make_submission(tenant="free"))
    assert await claim_ids(queue) == [job_id]
    (again,) = await put(queue, make_submission(tenant="free"))
    (joined,) = await queue.claims.join("w1", make_submission().signature, 8, models=MODELS)
    assert joined.job.id == again


async def charge_directly(queue: Queue, tenant: str, seconds: float) -> None:
    usage = math.log2(seconds) + await queue.client.now_ms() / 300_000
    await queue.client.redis.zadd(queue.client.redis_keys.gpu_usage, {tenant: usage})


async def test_a_released_claim_costs_nothing_in_the_tenants_other_orders(queue: Queue, make_submission: Make) -> None:
    """The tenant is the least-served one again, also for its jobs of other priorities and signatures."""
    await charge(queue, make_submission, "x", 600.0)  # what a slot costs
    await put(queue, make_submission(tenant="a"))
    (one,) = await claim(queue)
    for tenant in ["a", *(f"other{number}" for number in range(9))]:
        if tenant != "a":
            await charge_directly(queue, tenant, 1.0)
        await put(queue, make_submission(tenant=tenant, width=128, priority=Priority.INTERACTIVE))
    assert await queue.claims.release("w1", {one.job.id: one.epoch}) == 1
    (first,) = await claim(queue, 1, worker="w2")
    assert (first.job.tenant, first.job.priority) == ("a", Priority.INTERACTIVE)
