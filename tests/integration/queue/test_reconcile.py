"""Repair after a killed server, a failover or manual changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from harness.queue import MODELS, claim, claim_ids, end, put, state_of

from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import State
from shared.queue import Claim, EventFeed, JobEvent, Queue, Submission, SubmitResult
from shared.queue.maintenance import reconcile
from shared.queue.maintenance.reconcile import Reconciliation
from shared.queue.maintenance.repairs import Repairs

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]


async def test_acknowledged_jobs_survive_a_killed_server(
    durable_server: Any, settings_for: Callable[..., Settings], make_submission: Make
) -> None:
    """kill -9 during submits: every acknowledged job is queued after the restart, once."""
    queue = Queue.connect(settings_for(durable_server.url))
    acknowledged: list[str] = []

    async def submit_until_it_dies() -> None:
        while True:
            outcomes = await queue.jobs.submit([make_submission() for _ in range(5)])
            acknowledged.extend(outcome.job_id for outcome in outcomes if isinstance(outcome, SubmitResult))

    submitting = asyncio.create_task(submit_until_it_dies())
    while len(acknowledged) < 300:
        await asyncio.sleep(0.005)
    durable_server.kill()
    with pytest.raises(RedisUnavailable):
        await submitting
    durable_server.start()
    assert await queue.maintenance.reconcile() == 0  # scripts are whole in the log, or not in it
    claimed: list[str] = []
    while batch := await claim_ids(queue, 64):
        claimed += batch
    assert len(claimed) == len(set(claimed))
    assert set(acknowledged) <= set(claimed)
    await queue.close()


async def test_a_running_job_outlives_its_server(
    durable_server: Any, settings_for: Callable[..., Settings], make_submission: Make
) -> None:
    """Claimed before, settled after: lease and epoch are unchanged."""
    queue = Queue.connect(settings_for(durable_server.url))
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    durable_server.kill()
    with pytest.raises(RedisUnavailable):
        await queue.claims.renew("w1", {job_id: one.epoch})
    durable_server.start()
    assert not (await queue.claims.renew("w1", {job_id: one.epoch})).lost
    assert await end(queue, one)
    assert await state_of(queue, job_id) is State.SUCCEEDED
    await queue.close()


async def test_the_feed_catches_up_after_an_outage(
    durable_server: Any, settings_for: Callable[..., Settings], make_submission: Make, eventually: Eventually
) -> None:
    """After an outage subscribers get the state, and end."""
    queue = Queue.connect(settings_for(durable_server.url))
    (job_id,) = await put(queue, make_submission())
    seen: list[JobEvent] = []

    async def read(events: Any) -> None:
        async for event in events:
            seen.append(event)

    async with EventFeed(queue) as feed, feed.subscribe(job_id) as events:
        reader = asyncio.create_task(read(events))
        await eventually(lambda: len(seen) == 1, "the present state arrives")
        durable_server.kill()
        durable_server.start()
        await queue.jobs.cancel(job_id)
        await asyncio.wait_for(reader, 60)
    assert [event.state for event in seen] == [State.QUEUED, State.CANCELED]
    await queue.close()


async def test_a_feed_may_start_before_its_redis(
    durable_server: Any, settings_for: Callable[..., Settings], make_submission: Make
) -> None:
    """An API that starts first gets the missed state."""
    queue = Queue.connect(settings_for(durable_server.url))
    (job_id,) = await put(queue, make_submission())
    durable_server.kill()
    async with EventFeed(queue) as feed:
        with pytest.raises(RedisUnavailable):
            async with feed.subscribe(job_id):
                pass
        durable_server.start()
        async with feed.subscribe(job_id) as events:
            await queue.jobs.cancel(job_id)
            seen = [event.state async for event in events]
    assert seen[-1] is State.CANCELED
    await queue.close()


async def test_a_consistent_queue_is_not_changed(queue: Queue, make_submission: Make) -> None:
    """Jobs in every state: queued, running, released, lost, ended."""
    ids = await put(queue, *[make_submission(tenant=f"t{at % 2}") for at in range(8)])
    claims = await claim(queue, 4)
    await end(queue, claims[0])
    await queue.claims.release("w1", {claims[1].job.id: 1})
    await queue.client.redis.zadd(queue.client.redis_keys.leases, {claims[2].job.id: 1})
    await queue.maintenance.reclaim()
    assert await queue.maintenance.reconcile() == 0
    assert await queue.maintenance.reconcile() == 0
    left = await claim_ids(queue, 1) + await claim_ids(queue, 8)
    assert sorted([*left, claims[3].job.id, claims[0].job.id]) == sorted(ids)


async def test_a_job_without_its_entry_is_queued_again(queue: Queue, make_submission: Make) -> None:
    """The hash says queued, but the stream has no entry."""
    gone, stays = await put(queue, make_submission(n=2), make_submission())
    entry = await queue.client.redis.hget(queue.client.redis_keys.job(gone), "entry")
    await queue.client.redis.xdel(
        queue.client.redis_keys.lane(make_submission().signature, "standard", "default"), entry
    )
    assert await queue.maintenance.reconcile() >= 1
    (depth,) = await queue.workers.queue_depths()
    assert (depth.queued_jobs, depth.queued_slots) == (2, 3)
    assert await queue.maintenance.reconcile() == 0
    assert await claim_ids(queue) == [gone, stays]


async def test_a_job_whose_lane_is_lost_is_queued_again(queue: Queue, make_submission: Make) -> None:
    """Stream, group and counters are lost: no job is lost, and limits count right."""
    ids = await put(queue, *[make_submission() for _ in range(3)])
    one = make_submission()
    keys = queue.client.redis_keys
    await queue.client.redis.delete(
        keys.lane(one.signature, "standard", "default"),
        keys.lanes(one.signature, "standard"),
        keys.signature(one.signature),
        keys.signatures,
        keys.ready("demo", "standard"),
        keys.queued_jobs,
    )
    assert await claim(queue) == []
    assert await queue.maintenance.reconcile() >= 3
    assert sorted(await claim_ids(queue)) == sorted(ids)
    assert await queue.workers.queue_depths() != []
    assert await queue.client.redis.exists(keys.queued_jobs) == 0


async def test_only_a_lane_can_be_lost(queue: Queue, make_submission: Make) -> None:
    """The stream is lost while its counters and index remain."""
    ids = await put(queue, *[make_submission() for _ in range(3)])
    await queue.client.redis.delete(queue.client.redis_keys.lane(make_submission().signature, "standard", "default"))
    assert await queue.maintenance.reconcile() >= 3
    assert await claim_ids(queue) == ids
    assert await queue.maintenance.reconcile() == 0


async def test_a_running_job_without_a_lease_gets_one(queue: Queue, make_submission: Make) -> None:
    """Its worker can renew it; otherwise it expires."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    await queue.client.redis.delete(queue.client.redis_keys.leases)
    assert await queue.maintenance.reclaim() == []
    assert await queue.maintenance.reconcile() == 1
    assert await queue.client.redis.zscore(queue.client.redis_keys.leases, job_id) is not None
    assert await end(queue, one)


async def test_a_paused_job_whose_sets_are_lost_stays_paused(queue: Queue, make_submission: Make) -> None:
    one = make_submission()
    (job_id,) = await put(queue, one)
    await queue.jobs.pause(job_id)
    keys = queue.client.redis_keys
    await queue.client.redis.delete(keys.paused, keys.paused_jobs(one.job.tenant))
    assert await queue.maintenance.reconcile() == 1
    assert await claim_ids(queue) == []
    assert await queue.client.redis.zscore(keys.paused, job_id) is not None
    await queue.jobs.resume(job_id)
    assert await claim_ids(queue) == [job_id]


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_a_paused_job_that_an_older_api_has_canceled_is_not_counted_for_ever(
    queue: Queue, make_submission: Make, is_deleted: bool
) -> None:
    """Older scripts leave it in the sets of the paused ones, and a deleted one has no record that names its tenant."""
    ended, stays = await put(queue, make_submission(), make_submission())
    keys, redis = queue.client.redis_keys, queue.client.redis
    for job_id in (ended, stays):
        await queue.jobs.pause(job_id)
    rows = await redis.zrange(keys.paused, 0, -1, withscores=True)
    await queue.jobs.cancel(ended)
    await redis.zadd(keys.paused, dict(rows))
    await redis.sadd(keys.paused_jobs("default"), ended)
    if is_deleted:
        assert await queue.jobs.forget(ended)
    assert await queue.maintenance.reconcile() == 1
    assert await redis.smembers(keys.paused_jobs("default")) == {stays}
    assert await redis.zrange(keys.paused, 0, -1) == [stays]
    assert (await queue.api_keys.queued_jobs(["default"])) == {"default": 1}
    assert await queue.maintenance.reconcile() == 0
    await queue.jobs.resume(stays)
    assert await claim_ids(queue) == [stays]


async def test_an_entry_without_its_job_is_dropped(queue: Queue, make_submission: Make) -> None:
    """It becomes a dead letter, and no slot is counted for it."""
    gone, stays = await put(queue, make_submission(), make_submission())
    await queue.client.redis.delete(queue.client.redis_keys.job(gone))
    assert await queue.maintenance.reconcile() >= 1
    assert [letter.id for letter in (await queue.dead_letters.page())[0]] == [gone]
    (depth,) = await queue.workers.queue_depths()
    assert depth.queued_jobs == 1
    assert await queue.client.redis.hgetall(queue.client.redis_keys.queued_jobs) == {"default": "1", "*": "1"}
    assert await claim_ids(queue) == [stays]


async def test_running_jobs_are_not_counted_as_queued(queue: Queue, make_submission: Make) -> None:
    """Their entries have left the lane."""
    ids = await put(queue, *[make_submission() for _ in range(3)])
    claims = await claim(queue, 2)
    redis, keys, signature = queue.client.redis, queue.client.redis_keys, make_submission().signature
    await redis.delete(keys.signature(signature), keys.queued_jobs)
    assert await queue.maintenance.reconcile() >= 1
    (depth,) = await queue.workers.queue_depths()
    assert (depth.queued_jobs, await redis.hgetall(keys.queued_jobs)) == (1, {"default": "1", "*": "1"})
    (last,) = await claim(queue)
    assert last.job.id == ids[2]
    for one in (*claims, last):
        assert await end(queue, one)
    assert not await redis.exists(keys.queued_jobs, keys.signature(signature))


async def test_wrong_counters_are_repaired(queue: Queue, make_submission: Make) -> None:
    """The counters equal the number of queued jobs."""
    await put(queue, *[make_submission(tenant=tenant) for tenant in "aab"])
    signature = make_submission().signature
    await queue.client.redis.hset(queue.client.redis_keys.signature(signature), mapping={"jobs:1": 99, "slots:1": 99})
    await queue.client.redis.hset(queue.client.redis_keys.queued_jobs, mapping={"a": 50, "ghost": 3})
    assert await queue.maintenance.reconcile() == 3
    (depth,) = await queue.workers.queue_depths()
    assert depth.queued_jobs == 3
    assert await queue.client.redis.hgetall(queue.client.redis_keys.queued_jobs) == {"a": "2", "b": "1", "*": "3"}


async def test_one_of_several_that_start_reconciles(queue: Queue, make_submission: Make) -> None:
    """The others return 0."""
    await put(queue, make_submission())
    await queue.client.redis.delete(queue.client.redis_keys.lanes(make_submission().signature, "standard"))
    repaired = await asyncio.gather(*[queue.maintenance.reconcile() for _ in range(4)])
    assert sorted(repaired)[:3] == [0, 0, 0]
    assert await queue.client.redis.exists(queue.client.redis_keys.reconciling) == 0
    assert await queue.claims.next_ready_ms(MODELS) == 0


@pytest.mark.parametrize("lost", [False, True], ids=["consistent", "counters lost"])
async def test_a_signature_with_many_tenants_is_counted_completely(
    queue: Queue, make_submission: Make, lost: bool
) -> None:
    """Each of 1,300 tenants has a job: none is stuck after a reconcile."""
    submissions = [make_submission(tenant=f"t{at}") for at in range(1300)]
    ids: list[str] = []
    for first in range(0, len(submissions), 500):
        ids += await put(queue, *submissions[first : first + 500])
    if lost:
        await queue.client.redis.delete(queue.client.redis_keys.signature(submissions[0].signature))
    assert (await queue.maintenance.reconcile() > 0) is lost
    (depth,) = await queue.workers.queue_depths()
    assert (depth.queued_jobs, depth.queued_slots) == (1300, 1300)
    claimed: list[str] = []
    while some := await claim_ids(queue, 64):
        claimed += some
    assert sorted(claimed) == sorted(ids)
    assert await queue.client.redis.exists(queue.client.redis_keys.queued_jobs) == 0


async def test_released_jobs_whose_counters_are_lost_start(queue: Queue, make_submission: Make) -> None:
    """A signature without its hash is found through its jobs."""
    ids = await put(queue, make_submission(), make_submission())
    claims = await claim(queue)
    await queue.claims.release("w1", {one.job.id: one.epoch for one in claims})
    keys = queue.client.redis_keys
    signature = make_submission().signature
    await queue.client.redis.delete(
        keys.signature(signature), keys.signatures, keys.ready("demo", "standard"), keys.queued_jobs
    )
    assert await queue.maintenance.reconcile() >= 1
    assert await claim_ids(queue) == ids


@pytest.mark.parametrize(("owner", "phase"), [(Repairs, "check_lanes"), (Reconciliation, "_recount_queued")])
@pytest.mark.parametrize("released", [False, True], ids=["in a lane", "released"])
async def test_a_job_that_ends_during_a_reconcile_leaves_others_of_its_signature_to_it(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch, owner: type, phase: str, released: bool
) -> None:
    """The last running job ends while the counters are lost: its signature stays, and the queued job starts."""
    ids = await put(queue, make_submission(), make_submission())
    claims = await claim(queue, 2 if released else 1)
    await queue.claims.release("w1", {one.job.id: one.epoch for one in claims[1:]})
    keys, signature = queue.client.redis_keys, make_submission().signature
    names = [keys.signature(signature), keys.signatures, keys.ready("demo", "standard"), keys.queued_jobs, keys.leases]
    await queue.client.redis.delete(*names, keys.lanes(signature, "standard"))
    run_phase = getattr(owner, phase)

    async def end_then_run(*args: Any) -> Any:
        if await state_of(queue, ids[0]) is State.RUNNING:
            assert await end(queue, claims[0])
        return await run_phase(*args)

    monkeypatch.setattr(owner, phase, end_then_run)
    assert await queue.maintenance.reconcile() >= 1
    assert await claim_ids(queue) == ids[1:]


async def test_many_released_jobs_are_counted_completely(queue: Queue, make_submission: Make) -> None:
    ids = await put(queue, *[make_submission() for _ in range(300)])
    claims: list[Claim] = []
    while some := await claim(queue, 64):
        claims += some
    assert await queue.claims.release("w1", {one.job.id: one.epoch for one in claims}) == 300
    assert await queue.maintenance.reconcile() == 0
    (depth,) = await queue.workers.queue_depths()
    assert depth.queued_jobs == 300
    claimed: list[str] = []
    while found := await claim_ids(queue, 64):
        claimed += found
    assert claimed == ids


async def test_every_entry_of_a_long_lane_is_checked(queue: Queue, make_submission: Make) -> None:
    """An entry without its job is found behind thousands of others."""
    for _ in range(5):
        ids = await put(queue, *[make_submission() for _ in range(500)])
    await queue.client.redis.delete(queue.client.redis_keys.job(ids[-1]))
    assert await queue.maintenance.reconcile() >= 1
    assert [letter.id for letter in (await queue.dead_letters.page())[0]] == [ids[-1]]
    assert await queue.maintenance.reconcile() == 0


async def test_wrong_running_slots_of_many_jobs_are_repaired(queue: Queue, make_submission: Make) -> None:
    """Beyond 5,000 running jobs as well; a tenant without running jobs has none left."""
    keys, redis = queue.client.redis_keys, queue.client.redis
    (job_id,) = await put(queue, make_submission(n=2, tenant="a"))
    await claim(queue)
    fields = await redis.hgetall(keys.job(job_id))
    del fields["size"]  # only their slots count
    async with redis.pipeline(transaction=False) as pipe:
        for at in range(5200):
            pipe.hset(keys.job(f"job_{at}"), mapping={**fields, "tenant": f"t{at % 3}", "slots": 1})
            pipe.zadd(keys.leases, {f"job_{at}": 2e12})
        await pipe.execute()
    await redis.hset(keys.running_slots, mapping={"a": 7, "ghost": 3})
    assert await queue.maintenance.reconcile() == 5
    assert await redis.hgetall(keys.running_slots) == {"a": "2", "t0": "1734", "t1": "1733", "t2": "1733"}
    assert await queue.maintenance.reconcile() == 0


async def test_a_recount_under_load_keeps_the_counters_right(queue: Queue, make_submission: Make) -> None:
    """Jobs that are submitted, claimed and ended meanwhile do not make counters wrong."""
    stop = asyncio.Event()

    async def load(worker: str) -> None:
        while not stop.is_set():
            await put(queue, *[make_submission(tenant=f"t{at}") for at in range(8)])
            for one in await claim(queue, 8, worker):
                await end(queue, one, worker)

    for first in range(0, 1000, 500):
        await put(queue, *[make_submission(tenant=f"t{first + at}") for at in range(500)])
    loads = [asyncio.create_task(load(f"w{at}")) for at in range(3)]
    repaired = [await queue.maintenance.reconcile() for _ in range(2)]
    await queue.client.redis.hincrby(queue.client.redis_keys.signature(make_submission().signature), "jobs:1", 100_000)
    repaired += [await queue.maintenance.reconcile()]
    stop.set()
    await asyncio.gather(*loads)
    assert repaired == [0, 0, 1]
    await queue.maintenance.reconcile()
    assert await queue.maintenance.reconcile() == 0
    left: list[str] = []
    while some := await claim_ids(queue, 64):
        left += some
    assert await queue.client.redis.exists(queue.client.redis_keys.queued_jobs) == 0


class Ticks:
    """Stands for `time`: each reading is 10 ms later, so that a run checks its time equally often on any machine."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 0.01
        return self.now_s


async def test_a_reconcile_continues_where_its_time_ended(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With far more records than one run reads, every phase runs in the end."""
    monkeypatch.setattr(reconcile, "time", Ticks())
    monkeypatch.setattr(reconcile, "_SCAN_COUNT", 20)
    await put(queue, *[make_submission() for _ in range(500)])
    await queue.client.redis.hset(queue.client.redis_keys.queued_jobs, mapping={"default": 7})
    runs = 1
    while await queue.maintenance.reconcile(budget_s=0.055) or await queue.maintenance.reconcile_unfinished():
        runs += 1
        assert runs < 2000
    assert runs > 3
    assert await queue.client.redis.hgetall(queue.client.redis_keys.queued_jobs) == {"default": "500", "*": "500"}
    assert await queue.maintenance.reconcile() == 0


async def test_a_returned_job_that_was_deleted_is_not_counted(queue: Queue, make_submission: Make) -> None:
    """Its signature is deleted when nothing else is queued."""
    ids = await put(queue, make_submission(), make_submission())
    claims = await claim(queue)
    await queue.claims.release("w1", {one.job.id: one.epoch for one in claims})
    await queue.client.redis.delete(queue.client.redis_keys.job(ids[0]))
    assert await queue.maintenance.reconcile() >= 1
    (depth,) = await queue.workers.queue_depths()
    assert depth.queued_jobs == 1
    assert await queue.client.redis.hgetall(queue.client.redis_keys.queued_jobs) == {"default": "1", "*": "1"}
    assert await claim_ids(queue) == [ids[1]]
    assert await queue.client.redis.zcard(queue.client.redis_keys.front(make_submission().signature)) == 0
