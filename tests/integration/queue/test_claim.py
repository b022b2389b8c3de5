"""Claiming: which signature, which jobs, how many, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import MODELS, a_moment, claim, claim_ids, end, lose, put, redis_ms, state_of

from shared.job import State
from shared.job_fields import Priority
from shared.queue import Claim, Queue, Submission
from shared.queue.maintenance.changes import JobUpdate

Make = Callable[..., Submission]
LONG_MS = 60_000


async def test_a_claim_has_all_that_a_worker_needs(queue: Queue, make_submission: Make) -> None:
    """Job, signature, epoch and attempt; and the record names the worker."""
    one = make_submission()
    await put(queue, one)
    (claimed,) = await claim(queue, worker="w7")
    assert claimed.job == one.job
    assert (claimed.signature, claimed.epoch, claimed.must_run_solo) == (one.signature, 1, False)
    assert claimed.queued_ms >= 0
    record = await queue.jobs.get(one.job.id)
    assert record is not None
    assert (record.state, record.worker, record.epoch, record.attempts) == (State.RUNNING, "w7", 1, 1)
    assert record.started_at_ms is not None


async def test_the_lease_starts_at_the_claim(queue: Queue, make_submission: Make) -> None:
    """A claim that its worker never starts expires like any other."""
    (job_id,) = await put(queue, make_submission())
    await claim(queue)
    left = await queue.client.redis.zscore(queue.client.redis_keys.leases, job_id) - await redis_ms(queue)
    assert queue.client.settings.lease_ms / 2 < left <= queue.client.settings.lease_ms


async def test_without_queued_jobs_nothing_is_claimed(queue: Queue, make_submission: Make) -> None:
    """No jobs, no slots, no models, or another model's jobs: no claim and no error."""
    assert await claim(queue) == []
    await put(queue, make_submission(model="other"))
    assert await claim(queue) == []
    assert await queue.claims.claim("w1", ["other"], 0) == []
    assert await queue.claims.claim("w1", [], 8) == []
    assert len(await queue.claims.claim("w1", ["demo", "other"], 8)) == 1


async def test_one_signature_a_batch(queue: Queue, make_submission: Make) -> None:
    """COUNT would be per stream: a claim over many lanes keeps to one signature and to its slots."""
    for width in (64, 128, 192):
        await put(queue, *[make_submission(width=width, tenant=f"t{at}") for at in range(5)])
    claimed = await claim(queue, 4)
    assert len(claimed) == 4
    assert len({one.signature for one in claimed}) == 1


async def test_a_batch_is_filled_by_priority(queue: Queue, make_submission: Make) -> None:
    """Interactive, then standard, then bulk, within one batch; bulk fills the remaining slots."""
    order = [Priority.BULK, Priority.STANDARD, Priority.INTERACTIVE]
    ids = {}
    for priority in order:
        ids[priority] = await put(queue, *[make_submission(priority=priority) for _ in range(2)])
    assert await claim_ids(queue, 5) == [*ids[Priority.INTERACTIVE], *ids[Priority.STANDARD], ids[Priority.BULK][0]]


async def test_the_most_urgent_signature_is_chosen(queue: Queue, make_submission: Make) -> None:
    """A signature with an interactive job goes before an older one of a lower priority."""
    await put(queue, make_submission(width=64, priority=Priority.STANDARD))
    await a_moment(3)
    (urgent,) = await put(queue, make_submission(width=128, priority=Priority.INTERACTIVE))
    assert await claim_ids(queue) == [urgent]


async def test_within_a_priority_the_earliest_ready_goes_first(queue: Queue, make_submission: Make) -> None:
    """Age decides between signatures of one priority."""
    ids = []
    for width in (256, 64, 128):
        ids += await put(queue, make_submission(width=width))
        await a_moment(3)
    assert [(await claim_ids(queue))[0] for _ in ids] == ids


async def test_lower_priorities_can_be_left_out(queue: Queue, make_submission: Make) -> None:
    """A full worker takes interactive jobs only."""
    await put(queue, make_submission(priority=Priority.STANDARD))
    assert await claim(queue, min_priority=Priority.INTERACTIVE) == []
    (urgent,) = await put(queue, make_submission(priority=Priority.INTERACTIVE))
    assert await claim_ids(queue, min_priority=Priority.INTERACTIVE) == [urgent]


async def test_a_solo_job_does_not_wait(queue: Queue, make_submission: Make) -> None:
    """However long the window: without an expected arrival there is no wait."""
    (job_id,) = await put(queue, make_submission(window_ms=LONG_MS))
    assert await queue.claims.next_ready_ms(MODELS) == 0
    assert await claim_ids(queue) == [job_id]


async def test_jobs_of_one_request_predict_no_more_arrivals(queue: Queue, make_submission: Make) -> None:
    """Three jobs sent together arrive once: they do not wait for a fourth."""
    await put(queue, *[make_submission(window_ms=LONG_MS) for _ in range(3)])
    assert len(await claim(queue)) == 3


async def test_jobs_wait_for_likely_batch_mates(queue: Queue, make_submission: Make) -> None:
    """Arrivals close to each other: the next one stays queued until its slots are full."""
    await put(queue, make_submission(window_ms=LONG_MS, max_batch=3))
    assert len(await claim(queue)) == 1
    await put(queue, make_submission(window_ms=LONG_MS, max_batch=3))
    assert await claim(queue) == []
    ready_in_ms = await queue.claims.next_ready_ms(MODELS)
    assert ready_in_ms is not None
    assert LONG_MS / 2 < ready_in_ms <= LONG_MS
    await put(queue, make_submission(window_ms=LONG_MS, max_batch=3))
    assert await claim(queue) == []
    await put(queue, make_submission(window_ms=LONG_MS, max_batch=3))
    assert await queue.claims.next_ready_ms(MODELS) == 0
    assert len(await claim(queue)) == 3


async def test_the_window_counts_from_the_arrival(queue: Queue, make_submission: Make) -> None:
    """A job waits for batch mates for its window and no longer, however late a worker asks."""
    await put(queue, make_submission(window_ms=LONG_MS))
    assert len(await claim(queue)) == 1
    earliest_ms = int(await redis_ms(queue))
    await put(queue, make_submission(window_ms=LONG_MS))
    latest_ms = await redis_ms(queue)
    await a_moment(50)
    before_ms = await redis_ms(queue)
    ready_in_ms = await queue.claims.next_ready_ms(MODELS)
    after_ms = await redis_ms(queue)
    assert ready_in_ms is not None
    assert earliest_ms + LONG_MS - after_ms - 1 <= ready_in_ms <= latest_ms + LONG_MS - before_ms + 1


async def test_the_window_makes_all_queued_jobs_ready(queue: Queue, make_submission: Make) -> None:
    """Readiness belongs to the signature: all its queued jobs are claimed."""
    first = make_submission(window_ms=LONG_MS, max_batch=8)
    await put(queue, first)
    await put(queue, *[make_submission(window_ms=LONG_MS) for _ in range(2)])
    assert len(await claim(queue)) == 3  # the first was ready at its arrival, without a worker


async def test_learned_efficient_rows_decide_readiness(queue: Queue, make_submission: Make) -> None:
    """The efficient rows can be fewer than the model's largest batch."""
    one = make_submission(window_ms=LONG_MS, max_batch=64)
    await queue.claims.learn_efficient_rows(one.signature, 2)
    await put(queue, one)
    await claim(queue)
    await put(queue, make_submission(window_ms=LONG_MS, max_batch=64))
    assert await claim(queue) == []
    await put(queue, make_submission(window_ms=LONG_MS, max_batch=64))
    assert len(await claim(queue)) == 2


async def test_a_job_can_need_several_slots(queue: Queue, make_submission: Make) -> None:
    """Slots are counted, not jobs."""
    ids = await put(queue, make_submission(n=3), make_submission(n=2), make_submission(n=1))
    assert await claim_ids(queue, 6) == ids
    depth = (await queue.workers.queue_depths())[0]
    assert (depth.queued_slots, depth.running_jobs) == (0, 3)


async def test_what_is_not_claimed_stays_in_its_lane(queue: Queue, make_submission: Make) -> None:
    """A claim reads no more than it can claim."""
    await put(queue, *[make_submission(n=2) for _ in range(10)])
    assert len(await claim(queue, 4)) == 2
    lane = queue.client.redis_keys.lane(make_submission().signature, "standard", "default")
    assert await queue.client.redis.xlen(lane) == 8
    assert await queue.client.redis.exists(queue.client.redis_keys.front(make_submission().signature)) == 0


async def test_a_job_that_does_not_fit_leads_the_next_batch(queue: Queue, make_submission: Make) -> None:
    """Smaller jobs behind a large one fill the slots; the large one is first as soon as it fits."""
    small, large, other = await put(queue, make_submission(), make_submission(n=4), make_submission())
    assert await claim_ids(queue, 3) == [small, other]
    later = await put(queue, make_submission(), make_submission())
    assert await claim_ids(queue, 5) == [large, later[0]]


async def test_a_large_job_at_the_head_of_an_empty_batch_is_taken(queue: Queue, make_submission: Make) -> None:
    """Exactly the slots it needs are enough."""
    large, _ = await put(queue, make_submission(n=4), make_submission())
    assert await claim_ids(queue, 4) == [large]


async def test_a_large_job_is_not_starved_by_small_ones(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Skipped for longer than overdue_ms, it keeps the free slots of one busy worker, for as long as it takes."""
    queue = queue_with(overdue_ms=LONG_MS)
    later = queue_with(namespace=queue.client.settings.namespace, overdue_ms=1)
    (small,) = await put(queue, make_submission())
    (running,) = await claim(queue, 4)
    assert running.job.id == small
    (large,) = await put(queue, make_submission(n=4))
    small_jobs = await put(queue, *[make_submission() for _ in range(6)])
    joined = await queue.claims.join("w1", running.signature, 1, models=MODELS)
    assert len(joined) == 1  # it does not fit; others may go, for now
    assert await claim_ids(queue, 1, "w2") == small_jobs[1:2]
    await a_moment(5)
    busy: dict[str, Any] = {"models": MODELS, "capacity": 4}
    for _ in range(2):
        assert await later.claims.join("w1", running.signature, 2, **busy) == []
        assert await claim(later, 2, capacity=4) == []
        # An hour ago it was skipped.
        await queue.client.redis.hset(queue.client.redis_keys.job(large), "passed", "1")
    beside = await later.claims.join("w2", running.signature, 1, **busy)
    assert [one.job.id for one in beside] == small_jobs[2:3], "one worker keeps its slots free"
    for one in (running, joined[0]):
        await end(queue, one)
    assert [one.job.id for one in await later.claims.join("w1", running.signature, 4, **busy)] == [large]


async def test_a_worker_too_small_for_a_job_serves_the_others(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """An idle worker claims others, until the large job is overdue: then it runs in parts, as no larger worker came."""
    queue = queue_with(overdue_ms=LONG_MS)
    later = queue_with(namespace=queue.client.settings.namespace, overdue_ms=1)
    large, *small = await put(queue, make_submission(n=4), make_submission(), make_submission(), make_submission())
    for one in small[:2]:
        assert await claim_ids(queue, 1, "small") == [one]
        await end(queue, (await _running(queue, one)), "small")
    await a_moment(5)
    assert await claim_ids(later, 1, "small") == [large]
    assert await claim_ids(later, 1, "other") == small[2:]


async def _running(queue: Queue, job_id: str) -> Claim:
    """Return the claim of a running job, from its record."""
    record = await queue.jobs.get(job_id)
    assert record is not None
    return Claim(record.job, "", record.epoch, False, 0)


async def test_a_signature_that_does_not_fit_does_not_hide_the_next(queue: Queue, make_submission: Make) -> None:
    """A worker with few free slots starts what fits."""
    await put(queue, make_submission(n=4, width=64))
    await a_moment(3)
    (other,) = await put(queue, make_submission(width=128))
    assert await claim_ids(queue, 2) == [other]


async def test_an_invalid_entry_becomes_a_dead_letter(queue: Queue, make_submission: Make) -> None:
    """An entry without a readable record is removed and becomes a dead letter; the others are claimed."""
    gone, good = await put(queue, make_submission(), make_submission())
    lane = queue.client.redis_keys.lane(make_submission().signature, "standard", "default")
    await queue.client.redis.delete(queue.client.redis_keys.job(gone))
    await queue.client.redis.xadd(lane, {"what": "is this"})
    assert await claim_ids(queue) == [good]
    letters, more = await queue.dead_letters.page()
    assert more is None
    assert {letter.reason for letter in letters} == {"no_record"}
    assert gone in {letter.id for letter in letters}
    assert len(letters) == 2
    await end(queue, await _running(queue, good))
    assert await queue.workers.queue_depths() == []


async def test_an_unreadable_job_fails_and_the_others_run(queue: Queue, make_submission: Make) -> None:
    """An invalid wire form becomes a dead letter, with an error for its client."""
    bad, good = await put(queue, make_submission(), make_submission())
    await queue.client.redis.hset(queue.client.redis_keys.job(bad), "job", '{"schema_version": 1}')
    assert await claim_ids(queue) == [good]
    assert await queue.client.redis.hget(queue.client.redis_keys.job(bad), "state") == "failed"
    letters, _ = await queue.dead_letters.page()
    assert [(letter.id, letter.reason) for letter in letters] == [(bad, "undecodable")]


async def test_invalid_text_does_not_stop_a_claim(queue: Queue, make_submission: Make) -> None:
    """A claim replies whatever a hash contains."""
    bad, good = await put(queue, make_submission(), make_submission())
    await queue.client.redis.hset(queue.client.redis_keys.job(bad), "job", b"\xff\xfe{")
    assert await claim_ids(queue) == [good]


async def test_a_passed_deadline_is_not_run(queue: Queue, make_submission: Make) -> None:
    """It expires instead, and the next job gets the slots."""
    late, good = await put(queue, make_submission(time_limit_ms=0), make_submission())
    assert await claim_ids(queue) == [good]
    assert await state_of(queue, late) is State.EXPIRED


async def test_a_deadline_that_is_changed_during_a_claim_counts(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was read as expired, and has a later deadline when the claim is recorded, keeps waiting."""
    (late,) = await put(queue, make_submission(time_limit_ms=0))
    take = queue.client.scripts.take

    async def change_and_take(*arguments: Any) -> Any:
        await queue.changes.update([late], JobUpdate(time_limit_ms=LONG_MS))
        return await take(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(queue.client.scripts, "take", change_and_take)
        await claim(queue)
    assert await state_of(queue, late) in (State.QUEUED, State.RUNNING)


async def test_a_job_that_is_lost_during_a_claim_is_not_claimed_with_others(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is queued as it was read, but another worker has run it meanwhile: it must run solo now."""
    lost, mate = await put(queue, make_submission(), make_submission())
    take = queue.client.scripts.take

    async def lose_and_take(*arguments: Any) -> Any:
        monkeypatch.setattr(queue.client.scripts, "take", take)
        assert await claim_ids(queue, 1, "w2") == [lost]
        await lose(queue, lost)
        assert await queue.maintenance.reclaim() == [lost]
        return await take(*arguments)

    monkeypatch.setattr(queue.client.scripts, "take", lose_and_take)
    assert await claim_ids(queue, worker="w1") == [mate]
    (solo,) = await claim(queue, worker="w3")
    assert (solo.job.id, solo.must_run_solo) == (lost, True)


async def test_a_job_that_is_canceled_during_a_claim_is_not_claimed(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claims are counted as they were read: only its state says that it has ended."""
    canceled, mate = await put(queue, make_submission(), make_submission())
    take = queue.client.scripts.take

    async def cancel_and_take(*arguments: Any) -> Any:
        monkeypatch.setattr(queue.client.scripts, "take", take)
        await queue.jobs.cancel(canceled)
        return await take(*arguments)

    monkeypatch.setattr(queue.client.scripts, "take", cancel_and_take)
    assert await claim_ids(queue) == [mate]
    assert await state_of(queue, canceled) is State.CANCELED


async def test_a_batch_starts_with_at_most_its_models_maximum(queue: Queue, make_submission: Make) -> None:
    """A worker of several models offers the slots of the largest; each signature gets what its model allows."""
    await put(queue, *[make_submission(max_batch=3) for _ in range(5)])
    assert len(await claim(queue, 8)) == 3


async def test_a_batch_starts_with_at_most_the_efficient_rows(queue: Queue, make_submission: Make) -> None:
    """Learned rows limit a start; a job of several images still gets the slots it needs."""
    many = [make_submission() for _ in range(5)]
    await put(queue, *many)
    await queue.claims.learn_efficient_rows(many[0].signature, 2)
    assert len(await claim(queue, 8)) == 2
    await claim(queue, 8)
    large = make_submission(n=4)
    await put(queue, large)
    await claim(queue, 8)
    assert await state_of(queue, large.job.id) is State.RUNNING


@pytest.mark.parametrize("lost", [False, True])
async def test_a_job_above_the_maximum_of_a_later_one_still_starts(
    queue: Queue, make_submission: Make, lost: bool
) -> None:
    """Sizes of one signature can have other maxima: that of the last submit is no limit for a job that is queued."""
    (large,) = await put(queue, make_submission(n=4, max_batch=8))
    if lost:
        await claim(queue)
        await lose(queue, large)
        await queue.maintenance.reclaim()
    (small,) = await put(queue, make_submission(max_batch=2))
    started = []
    for _ in range(2):
        (one,) = await claim(queue)
        started.append(one.job.id)
        assert await end(queue, one)
    assert sorted(started) == sorted([large, small])
