"""What can be asked: jobs, lists, places, depths, workers, curves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
from harness.queue import claim, claim_ids, end, lose, put
from redis.asyncio import Redis

from api.responses import QueuePositions
from shared.auth import TenantLimits
from shared.errors import InvalidRequest
from shared.job_fields import Priority
from shared.queue import Queue, QueuePosition, Submission, UnavailableModel, WorkerInfo, jobs
from shared.queue.workers import workers
from shared.runtime.clock import new_id

Make = Callable[..., Submission]


async def test_a_status_read_is_one_command(queue: Queue, make_submission: Make, redis_server: object) -> None:
    """Some clients poll ten times a second."""
    (job_id,) = await put(queue, make_submission())
    await queue.jobs.get(job_id)
    before = (await queue.client.redis.info("commandstats")).get("cmdstat_hgetall", {}).get("calls", 0)
    total = (await queue.client.redis.info("stats"))["total_commands_processed"]
    await queue.jobs.get(job_id)
    stats = await queue.client.redis.info("stats")
    after = (await queue.client.redis.info("commandstats"))["cmdstat_hgetall"]["calls"]
    assert after - before == 1
    assert stats["total_commands_processed"] - total == 2  # the first of these two INFO, and HGETALL


async def test_many_records_keep_their_order(queue: Queue, make_submission: Make) -> None:
    """One answer for each id asked, None for what is not there."""
    one, two = await put(queue, make_submission(), make_submission())
    records = await queue.jobs.get_many([two, "job_unknown", one])
    assert [record.job.id if record else None for record in records] == [two, None, one]
    assert await queue.jobs.get_many([]) == []


async def _listed(queue: Queue, make_submission: Make) -> list[str]:
    """Put ten jobs on record, created at 1000, 1010, ... ms; returns their ids, newest first."""
    ids = await put(queue, *[make_submission(created_at_ms=1000 + 10 * at) for at in range(10)])
    return ids[::-1]


async def test_a_list_comes_in_pages_newest_first(queue: Queue, make_submission: Make) -> None:
    """Each job once, none left out, and the last page says that it is."""
    ids = await _listed(queue, make_submission)
    seen: list[str] = []
    after = None
    for wanted in (4, 4, 2):
        records, after = await queue.jobs.page("default", after=after, limit=4)
        seen += [record.job.id for record in records]
        assert len(records) == wanted
    assert after is None
    assert seen == ids


async def test_a_full_last_page_is_the_last(queue: Queue, make_submission: Make) -> None:
    """No empty page follows."""
    await _listed(queue, make_submission)
    records, after = await queue.jobs.page("default", limit=10)
    assert (len(records), after) == (10, None)


async def test_a_list_can_be_cut_by_time(queue: Queue, make_submission: Make) -> None:
    """From the first bound, inclusive, to the second, exclusive."""
    ids = await _listed(queue, make_submission)
    records, after = await queue.jobs.page("default", created_ms=(1020, 1050), limit=10)
    assert [record.job.id for record in records] == ids[5:8]
    assert after is None
    first, after = await queue.jobs.page("default", created_ms=(1020, 1050), limit=2)
    rest, end_of_list = await queue.jobs.page("default", after=after, created_ms=(1020, math.inf), limit=2)
    assert [record.job.id for record in first + rest] == ids[5:8]
    assert end_of_list is None


async def test_a_batch_is_listed_by_itself(queue: Queue, make_submission: Make) -> None:
    """And a tenant sees its own only."""
    (one,) = await put(queue, make_submission(batch_id="b"))
    await put(queue, make_submission(), make_submission(batch_id="b", tenant="other"))
    records, _ = await queue.jobs.page("default", batch_id="b")
    assert [record.job.id for record in records] == [one]


async def test_a_list_leaves_out_what_is_gone(queue: Queue, make_submission: Make) -> None:
    """Records that expired leave no holes; the next page is still found."""
    ids = await _listed(queue, make_submission)
    await queue.client.redis.delete(*[queue.client.redis_keys.job(job_id) for job_id in ids[1:7]])
    records, _ = await queue.jobs.page("default", limit=3)
    assert [record.job.id for record in records] == [ids[0], ids[7], ids[8]]


@pytest.mark.parametrize("expired_rows", [200, 10])
async def test_a_list_goes_on_past_jobs_that_have_expired(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch, expired_rows: int
) -> None:
    """Their rows in the index are removed later; a page of a few reads can be empty, and names the next one."""
    monkeypatch.setattr(jobs, "EXPIRED_ROWS", expired_rows)
    *gone, last = await put(queue, *(make_submission() for _ in range(101)))
    await queue.client.redis.delete(*map(queue.client.redis_keys.job, gone))
    seen, after, pages = [], None, 0
    while not pages or after is not None:
        records, after = await queue.jobs.page("default", after=after, limit=1, newest_first=False)
        seen += [record.job.id for record in records]
        pages += 1
    assert seen == [last]
    assert pages == (1 if expired_rows == 200 else 3)


async def test_a_list_goes_on_after_a_job_that_was_deleted(queue: Queue, make_submission: Make) -> None:
    """Who deletes each page as it comes still sees all jobs once, those of one millisecond too."""
    made = sorted((1000 + at // 3, new_id("job", 1000 + at // 3)) for at in range(10))
    await put(queue, *[make_submission(id=job_id, created_at_ms=at_ms) for at_ms, job_id in made])
    seen: list[str] = []
    after: str | None = None
    while len(seen) < 10:
        records, after = await queue.jobs.page("default", after=after, limit=2)
        seen += [one.job.id for one in records]
        for one in records:
            await queue.jobs.cancel(one.job.id)
            assert await queue.jobs.forget(one.job.id)
    assert seen == [job_id for _, job_id in reversed(made)]


async def test_an_unknown_cursor_is_the_callers_fault(queue: Queue, make_submission: Make) -> None:
    """A page after nothing would silently begin at the start again."""
    await put(queue, make_submission())
    with pytest.raises(InvalidRequest) as caught:
        await queue.jobs.page("default", after="job_unknown")
    assert caught.value.param == "after"


async def test_places_in_one_lane(queue: Queue, make_submission: Make) -> None:
    """0 is next; no estimate where no job has ended yet."""
    ids = await put(queue, *[make_submission() for _ in range(4)])
    assert [await queue.jobs.position(job_id) for job_id in ids] == [QueuePosition(at, None) for at in range(4)]
    await claim(queue, 1)
    await queue.jobs.cancel(ids[1])
    assert [await queue.jobs.position(job_id) for job_id in ids] == [
        None,
        None,
        QueuePosition(0, None),
        QueuePosition(1, None),
    ]
    assert await queue.jobs.position("job_unknown") is None


async def test_places_follow_priority_and_turns(queue: Queue, make_submission: Make) -> None:
    """More urgent jobs go first, and other tenants take turns."""
    flood = await put(queue, *[make_submission(tenant="flood") for _ in range(50)])
    (single,) = await put(queue, make_submission(tenant="single"))
    (bulk,) = await put(queue, make_submission(priority=Priority.BULK))
    place = await queue.jobs.position(single)
    assert place is not None
    assert place.position <= 1
    assert await queue.jobs.position(bulk) == QueuePosition(51, None)
    assert await queue.jobs.position(flood[10]) == QueuePosition(11, None)
    await put(queue, make_submission(priority=Priority.INTERACTIVE))
    assert await queue.jobs.position(bulk) == QueuePosition(52, None)


async def test_places_of_jobs_that_came_back(queue: Queue, make_submission: Make) -> None:
    """They stand before their lane."""
    ids = await put(queue, *[make_submission() for _ in range(4)])
    claims = await claim(queue, 2)
    await queue.claims.release("w1", {claims[0].job.id: 1})
    await lose(queue, ids[1])
    await queue.maintenance.reclaim()
    places = [await queue.jobs.position(job_id) for job_id in ids]
    assert places == [QueuePosition(1, None), QueuePosition(0, None), QueuePosition(2, None), QueuePosition(3, None)]


async def test_jobs_of_others_that_came_back_have_the_turns_of_their_tenant(
    queue: Queue, make_submission: Make
) -> None:
    """A tenant whose worker stops with many jobs does not pass those of others."""
    await put(queue, *[make_submission(tenant="many") for _ in range(6)])
    await queue.claims.release("w1", {one.job.id: 1 for one in await claim(queue, 5)})
    first, second = await put(queue, *[make_submission(tenant="few") for _ in range(2)])
    assert [await queue.jobs.position(job_id) for job_id in (first, second)] == [
        QueuePosition(1, None),
        QueuePosition(3, None),
    ]
    claimed = [(await claim(queue, 1))[0].job.id for _ in range(4)]
    # What is left of charges by rounding can give the other tenant its turn first.
    assert first in claimed[:2]
    assert second in claimed


async def test_a_place_far_behind_is_known(queue: Queue, make_submission: Make) -> None:
    """Its cost does not grow with the queue; jobs that were canceled before it can count."""
    ids: list[str] = []
    for _ in range(3):
        ids += await put(queue, *[make_submission() for _ in range(400)])
    assert [await queue.jobs.position(ids[at]) for at in (100, 450, 1199)] == [
        QueuePosition(at, None) for at in (100, 450, 1199)
    ]
    claimed = len(await claim(queue, 8))
    for job_id in ids[500:510]:
        await queue.jobs.cancel(job_id)
    assert await queue.jobs.position(ids[600]) == QueuePosition(600 - claimed, None)
    assert await queue.jobs.position(ids[-1]) == QueuePosition(1199 - claimed - 10, None)
    assert await queue.jobs.position(ids[40]) == QueuePosition(40 - claimed, None)


async def test_an_estimate_follows_the_pace_of_late(queue: Queue, make_submission: Make) -> None:
    """After the first completions, a queued job has an estimate."""
    ids = await put(queue, *[make_submission() for _ in range(6)])
    for one in await claim(queue, 3):
        await end(queue, one)
    places = [await queue.jobs.position(job_id) for job_id in ids[3:]]
    estimates = [place.eta_s for place in places if place is not None]
    assert None not in estimates
    assert estimates == sorted(estimates)  # type: ignore[type-var]
    assert (await queue.workers.queue_depths())[0].eta_s is not None


async def test_depths_by_signature(queue: Queue, make_submission: Make) -> None:
    """Jobs and slots by priority, what runs, and the age of the oldest; the longest line first."""
    await put(queue, make_submission(width=128, n=2))
    await put(queue, *[make_submission() for _ in range(3)], make_submission(priority=Priority.BULK, n=4))
    await claim(queue, 1)
    first, second = await queue.workers.queue_depths()
    assert (first.model, first.signature) == ("demo", make_submission().signature)
    assert first.queued_jobs + second.queued_jobs + first.running_jobs + second.running_jobs == 5
    assert first.jobs[Priority.BULK] == 1
    assert first.slots[Priority.BULK] == 4
    assert first.jobs[Priority.INTERACTIVE] == 0
    assert first.oldest_age_ms is not None
    assert 0 <= first.oldest_age_ms < 60_000
    assert first.queued_slots > second.queued_slots


async def test_running_jobs_have_no_age(queue: Queue, make_submission: Make) -> None:
    """Depth counts what waits."""
    await put(queue, make_submission())
    await claim(queue)
    (depth,) = await queue.workers.queue_depths()
    assert (depth.queued_jobs, depth.running_jobs, depth.oldest_age_ms) == (0, 1, None)


async def test_workers_are_listed_while_alive(queue: Queue) -> None:
    """A worker is forgotten after its last heartbeat; its info is returned unchanged."""
    unavailable = {"lost": UnavailableModel("the hub cannot be reached", permanent=False, retry_in_s=2.5)}
    info = WorkerInfo("w1", ("demo", "lost"), "draining", slots=8, loaded=("demo",), unavailable=unavailable)
    await queue.workers.heartbeat(info)
    (seen,) = await queue.workers.all()
    assert seen.beat_at_ms > 0
    assert WorkerInfo(**{**seen.__dict__, "beat_at_ms": 0}) == info
    await queue.client.redis.delete(queue.client.redis_keys.worker("w1"))
    assert await queue.workers.all() == []
    await queue.client.redis.zadd(queue.client.redis_keys.workers, {"w1": 1})
    await queue.workers.heartbeat(WorkerInfo(id="w2", models=()))
    assert await queue.client.redis.zrange(queue.client.redis_keys.workers, 0, -1) == ["w2"]


async def test_curves_are_learned(queue: Queue) -> None:
    """A moving mean by rows, by device, model and shape."""
    await queue.workers.learn_cost("cuda", "demo", "64x64", 8, 1.0)
    await queue.workers.learn_cost("cuda", "demo", "64x64", 8, 2.0)
    await queue.workers.learn_cost("cuda", "demo", "64x64", 16, 1.5)
    await queue.workers.learn_cost("cpu", "demo", "64x64", 8, 9.0)
    assert await queue.workers.cost_curve("cuda", "demo", "64x64") == {8: pytest.approx(1.2), 16: pytest.approx(1.5)}
    assert await queue.workers.cost_curve("cuda", "other", "64x64") == {}


async def test_the_curves_of_a_model_are_listed_those_measured_last_first(queue: Queue) -> None:
    names = queue.client.redis_keys.cost_shapes("demo")
    for number in range(workers.MAX_CURVES):
        await queue.workers.learn_cost("cuda", "demo", f"{64 + 8 * number}x64", 1, 1.0)
    await queue.client.redis.zadd(names, {"cuda|64x64": 1, "cuda|72x64": 2})
    await queue.workers.learn_cost("cuda", "other", "64x64", 1, 1.0)
    await queue.workers.learn_cost("cpu", "demo", "96x64", 4, 2.0)
    curves = await queue.workers.cost_curves("demo")
    assert len(curves) == workers.MAX_CURVES
    assert (curves[-1].device, curves[-1].shape, curves[-1].measured_at_ms) == ("cuda", "72x64", 2)
    assert ("cpu", "96x64", {4: 2.0}) in [(curve.device, curve.shape, curve.seconds) for curve in curves]


async def test_asking_changes_nothing(queue: Queue, make_submission: Make, redis_server: object) -> None:
    """Reading takes no job out of line."""
    ids = await put(queue, *[make_submission() for _ in range(3)])
    watcher = Redis.from_url(queue.client.settings.redis_url)
    dirty = (await watcher.info("persistence"))["rdb_changes_since_last_save"]
    await queue.workers.queue_depths()
    await queue.jobs.position(ids[2])
    await queue.jobs.get_many(ids)
    await queue.jobs.page("default")
    await queue.claims.next_ready_ms(["demo"])
    assert (await watcher.info("persistence"))["rdb_changes_since_last_save"] == dirty
    await watcher.aclose()
    assert await claim_ids(queue) == ids


async def test_load_counts_every_signature_and_knows_the_oldest_job(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of signatures that are not among those listed: the short queues."""
    monkeypatch.setattr(workers, "MAX_SIGNATURES", 2)
    await put(queue, make_submission(width=64, height=1024))
    await asyncio.sleep(0.05)
    await put(queue, *[make_submission(width=64 * side, n=2) for side in range(1, 12) for _ in range(2)])
    await put(queue, make_submission(priority=Priority.BULK, n=4))
    load = await queue.workers.load()
    (total,) = load.models
    assert (total.model, total.signatures, sum(total.jobs.values()), total.queued_slots) == ("demo", 12, 24, 49)
    assert (total.jobs[Priority.BULK], total.slots[Priority.BULK], total.running_jobs) == (1, 4, 0)
    assert len(load.depths) < 12
    assert max(depth.oldest_age_ms or 0 for depth in load.depths) >= 50
    claims = await claim(queue, 1)
    (total,) = (await queue.workers.load()).models
    assert (total.running_jobs, sum(total.jobs.values())) == (len(claims), 24 - len(claims))


async def test_the_wanted_workers_count_every_signature(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not listed count at the mean cost of their model."""
    monkeypatch.setattr(workers, "MAX_SIGNATURES", 1)
    await put(queue, *[make_submission(width=64 * side) for side in range(1, 13) for _ in range(3)])
    loads = (await queue.workers.backlog(await queue.workers.load(), {})).loads
    assert len(loads) < 12
    assert sum(one.queued_slots for one in loads) == 36
    for one in await claim(queue, 3):
        await end(queue, one, device_seconds=0.5)
    loads = (await queue.workers.backlog(await queue.workers.load(), {})).loads
    assert sum(one.queued_slots for one in loads) == 33
    assert [one.slot_s for one in loads] == [pytest.approx(0.5)] * len(loads)


async def reason_of(queue: Queue, job_id: str) -> str | None:
    """Return why a job waits, as a new API process responds."""
    place = await QueuePositions(queue).of(job_id, "demo")
    return None if place is None or place.reason is None else place.reason.value


async def test_why_a_job_waits_follows_workers_limits_and_other_jobs(queue: Queue, make_submission: Make) -> None:
    """From its submit without a worker to its claim; no other tenant's jobs are named."""
    await queue.api_keys.set_limits("default", TenantLimits(running_slots=2))
    first, second, third = await put(queue, *[make_submission(n=2, window_ms=0) for _ in range(3)])
    assert await reason_of(queue, first) == "no_worker"
    await queue.workers.heartbeat(WorkerInfo("w1", ("demo",), state="starting"))
    assert await reason_of(queue, first) == "worker_starting"
    await queue.workers.heartbeat(WorkerInfo("w1", ("demo",)))
    assert await reason_of(queue, first) == "model_loading"
    await queue.workers.heartbeat(WorkerInfo("w1", ("demo",), loaded=("demo",)))
    assert [await reason_of(queue, one) for one in (first, second)] == ["next", "jobs_ahead"]
    (one,) = await claim(queue, 8)
    assert [await reason_of(queue, job_id) for job_id in (first, second)] == [None, "tenant_limit"]
    assert await end(queue, one)
    assert [await reason_of(queue, job_id) for job_id in (second, third)] == ["next", "jobs_ahead"]


async def test_a_job_waits_for_batch_mates_or_an_idle_worker(queue: Queue, make_submission: Make) -> None:
    await queue.workers.heartbeat(WorkerInfo("w1", ("demo",), loaded=("demo",)))
    (lost,) = await put(queue, make_submission(window_ms=60_000))
    (young,) = await put(queue, make_submission(window_ms=60_000))
    assert await claim_ids(queue, 1) == [lost]
    assert await reason_of(queue, young) == "batch_mates", "arrivals are frequent"
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    assert await reason_of(queue, lost) == "idle_worker"


async def test_there_is_no_estimate_without_a_worker_that_serves_the_model(queue: Queue, make_submission: Make) -> None:
    """The pace of earlier workers says nothing then."""
    ids = await put(queue, *[make_submission() for _ in range(4)])
    for one in await claim(queue, 2):
        await end(queue, one)
    for worker, known in ((None, False), (WorkerInfo("w1", ("other",)), False), (WorkerInfo("w2", ("demo",)), True)):
        if worker is not None:
            await queue.workers.heartbeat(worker)
        place = await QueuePositions(queue).of(ids[3], "demo")
        assert place is not None
        assert (place.eta_s is not None) == known, worker
