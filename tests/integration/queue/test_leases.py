"""Holding a job, and losing it: who may write what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.queue import MODELS, claim, claim_ids, end, lose, put, state_of

from shared.job import Phase, State
from shared.job_fields import Priority
from shared.job_record import Artifact, BatchingStats, Failure, Outcome, Progress, Timings
from shared.queue import ProgressReport, Queue, Submission

Make = Callable[..., Submission]


async def test_a_settled_job_has_its_result(queue: Queue, make_submission: Make) -> None:
    """Result, state, event and times in one script; the lease and the entry are gone, the record has a TTL."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    await queue.claims.report_progress(ProgressReport(job_id, one.epoch, Phase.UPLOADING, Progress(step=8, total=8)))
    outcome = Outcome(
        state=State.SUCCEEDED,
        artifacts=(Artifact(index=0, key="k", content_type="image/png", bytes=3, width=64, height=64, seed=7),),
        batching=BatchingStats(forwards=8, max_jobs=3, mean_rows=2.5),
        timings=Timings(queue_ms=1),
        device_seconds=0.5,
    )
    assert await queue.claims.settle("w1", job_id, one.epoch, outcome)
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert (record.state, record.phase, record.artifacts) == (State.SUCCEEDED, None, outcome.artifacts)
    assert (record.batching, record.timings, record.error) == (outcome.batching, outcome.timings, None)
    assert record.finished_at_ms is not None
    assert record.expires_at_ms == record.finished_at_ms + queue.client.settings.retention_s * 1000
    assert (
        0
        < await queue.client.redis.pttl(queue.client.redis_keys.job(job_id))
        <= queue.client.settings.retention_s * 1000
    )
    assert await queue.client.redis.exists(queue.client.redis_keys.leases, queue.client.redis_keys.claimed_jobs) == 0
    events = await queue.client.redis.xrange(queue.client.redis_keys.events)
    assert [fields["state"] for _, fields in events] == ["queued", "running", "succeeded"]
    assert events[-1][0] == record.event_id


async def test_a_failure_keeps_its_reason(queue: Queue, make_submission: Make) -> None:
    """The client gets the reason."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    failure = Failure(code="out_of_memory", message="even one row does not fit", retryable=True)
    assert await queue.claims.settle("w1", job_id, one.epoch, Outcome(state=State.FAILED, error=failure))
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert (record.state, record.error) == (State.FAILED, failure)


async def test_a_job_is_settled_once(queue: Queue, make_submission: Make) -> None:
    """Terminal states are final."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    assert await end(queue, one)
    assert not await end(queue, one, state=State.FAILED)
    assert await state_of(queue, job_id) is State.SUCCEEDED


async def test_a_settle_sent_twice_answers_the_same(queue: Queue, make_submission: Make) -> None:
    """redis-py may re-send the very same call: its worker must not take that for a lost lease."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    args: Any = (
        "w1",
        job_id,
        one.epoch,
        "token",
        "succeeded",
        "[]",
        None,
        "{}",
        "{}",
        1.0,
        4,
        4,
        0,
        0,
        "",
        "0,4,0,1,0,9",
        None,
        "",
        0,
    )
    assert [await queue.client.scripts.settle(*args) for _ in range(2)] == [True, True]
    assert await queue.client.redis.xlen(queue.client.redis_keys.events) == 3


async def test_a_settle_repeated_by_its_caller_answers_the_same(queue: Queue, make_submission: Make) -> None:
    """Redis may go away between the write and the answer: with the same token the worker learns that it has settled."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    done = Outcome(state=State.SUCCEEDED)
    assert await queue.claims.settle("w1", job_id, one.epoch, done, token="t")
    assert await queue.claims.settle("w1", job_id, one.epoch, done, token="t")
    assert not await queue.claims.settle("w1", job_id, one.epoch, done)


async def test_only_the_one_who_holds_it_may_write(queue: Queue, make_submission: Make) -> None:
    """Another worker, another epoch, or an unknown job: nothing is written."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    before = await queue.client.redis.hgetall(queue.client.redis_keys.job(job_id))
    assert not await end(queue, one, worker="w2")
    done = Outcome(state=State.SUCCEEDED)
    assert not await queue.claims.settle("w1", job_id, one.epoch + 1, done)
    assert not await queue.claims.settle("w1", "job_unknown", 1, done)
    assert not await queue.claims.report_progress(
        ProgressReport(job_id, one.epoch + 1, Phase.DENOISING, Progress(step=1, total=2))
    )
    assert await queue.claims.release("w2", {job_id: one.epoch}) == 0
    assert (await queue.claims.renew("w2", {job_id: one.epoch})).lost == {job_id}
    assert await queue.client.redis.hgetall(queue.client.redis_keys.job(job_id)) == before
    assert await queue.jobs.get("job_unknown") is None


async def test_a_worker_that_wakes_too_late_writes_nothing(queue: Queue, make_submission: Make) -> None:
    """Stopped, its job was given to another: whatever it sends then changes nothing, the other's entry least of all."""
    (job_id,) = await put(queue, make_submission())
    (stale,) = await claim(queue, worker="stopped")
    await lose(queue, job_id)
    await queue.maintenance.reclaim()
    (current,) = await claim(queue, worker="other")
    assert current.epoch == stale.epoch + 1
    before = await queue.client.redis.hgetall(queue.client.redis_keys.job(job_id))
    lease = await queue.client.redis.zscore(queue.client.redis_keys.leases, job_id)
    assert (await queue.claims.renew("stopped", {job_id: stale.epoch})).lost == {job_id}
    assert not await end(queue, stale, worker="stopped")
    assert not await queue.claims.report_progress(ProgressReport(job_id, stale.epoch, Phase.DECODING, Progress()))
    assert await queue.claims.release("stopped", {job_id: stale.epoch}) == 0
    assert await queue.client.redis.hgetall(queue.client.redis_keys.job(job_id)) == before
    assert await queue.client.redis.zscore(queue.client.redis_keys.leases, job_id) == lease
    assert await end(queue, current, worker="other")


async def test_the_same_worker_is_fenced_from_its_own_past(queue: Queue, make_submission: Make) -> None:
    """A job that came back to the same worker is another claim."""
    (job_id,) = await put(queue, make_submission())
    (first,) = await claim(queue)
    await lose(queue, job_id)
    await queue.maintenance.reclaim()
    (second,) = await claim(queue)
    assert (await queue.claims.renew("w1", {job_id: first.epoch})).lost == {job_id}
    assert await queue.claims.release("w1", {job_id: first.epoch}) == 0
    assert not await end(queue, first)
    assert not (await queue.claims.renew("w1", {job_id: second.epoch})).lost
    assert await end(queue, second)


async def test_a_lease_that_is_renewed_does_not_end(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """Renewed, it outlives its length; otherwise it expires."""
    queue = queue_with(lease_ms=100_000)
    kept, left = await put(queue, make_submission(), make_submission())
    epochs = {one.job.id: one.epoch for one in await claim(queue)}
    for _ in range(2):
        for job_id in (kept, left):  # as if sixty seconds had gone by
            await queue.client.redis.zincrby(queue.client.redis_keys.leases, -60_000, job_id)
        assert not (await queue.claims.renew("w1", {kept: epochs[kept]})).lost
    assert await queue.maintenance.reclaim() == [left]
    assert await queue.claims.renew("w1", {}) is not None


async def test_a_reclaim_takes_no_more_than_it_is_asked(queue: Queue, make_submission: Make) -> None:
    """One script never stalls Redis for all that a large worker held."""
    ids = await put(queue, *[make_submission() for _ in range(5)])
    await claim(queue)
    await lose(queue, *ids)
    assert [len(await queue.maintenance.reclaim(2)) for _ in range(4)] == [2, 2, 1, 0]


async def test_a_released_job_leads_its_line_and_counts_nothing(queue: Queue, make_submission: Make) -> None:
    """A draining worker releases jobs: ready at once, first, with batch mates, no loss counted."""
    ids = await put(queue, *[make_submission(window_ms=60_000) for _ in range(2)])
    claims = await claim(queue)
    later = await put(queue, make_submission(window_ms=60_000))
    assert await queue.claims.release("w1", {one.job.id: one.epoch for one in claims}) == 2
    assert await queue.claims.next_ready_ms(MODELS) == 0
    again = await claim(queue, worker="w2")
    assert [one.job.id for one in again] == [*ids, *later]
    assert not any(one.must_run_solo for one in again)
    record = await queue.jobs.get(ids[0])
    assert record is not None
    assert (record.losses, record.attempts, record.epoch) == (0, 1, 2)
    assert await queue.claims.release("w1", {}) == 0


async def test_a_released_job_keeps_to_its_priority(queue: Queue, make_submission: Make) -> None:
    """The front of its line is not the front of all lines."""
    (bulk,) = await put(queue, make_submission(priority=Priority.BULK))
    (one,) = await claim(queue)
    (standard,) = await put(queue, make_submission())
    await queue.claims.release("w1", {bulk: one.epoch})
    assert await claim_ids(queue) == [standard, bulk]


async def test_a_lost_job_goes_to_the_front_and_is_ready(queue: Queue, make_submission: Make) -> None:
    """It has waited long enough."""
    (lost,) = await put(queue, make_submission(window_ms=60_000))
    await claim(queue)
    await put(queue, make_submission(window_ms=60_000))
    assert await claim(queue) == []
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    assert await claim_ids(queue, worker="w2") == [lost]


async def test_batch_mates_of_a_killer_are_not_counted(queue: Queue, make_submission: Make) -> None:
    """With batch mates a loss counts for no job; solo, the job that kills its worker is found."""
    killer, friend = await put(queue, make_submission(), make_submission())
    assert len(await claim(queue)) == 2
    await lose(queue, killer, friend)
    await queue.maintenance.reclaim()
    for job_id in (killer, friend):
        record = await queue.jobs.get(job_id)
        assert record is not None
        assert record.losses == 0
    while claims := await claim(queue, worker="w2"):
        (one,) = claims
        assert one.must_run_solo
        if one.job.id == killer:
            await lose(queue, killer)
            await queue.maintenance.reclaim()
        else:
            assert await end(queue, one, worker="w2")
    assert await state_of(queue, friend) is State.SUCCEEDED
    record = await queue.jobs.get(killer)
    assert record is not None
    assert (record.state, record.losses) == (State.FAILED, queue.client.settings.max_attempts)
    assert record.error is not None
    assert record.error.code == "worker_lost"
    assert [letter.id for letter in (await queue.dead_letters.page())[0]] == [killer]


async def test_a_released_solo_job_stays_solo_and_counts_no_loss(queue: Queue, make_submission: Make) -> None:
    """A drain is no loss, and a suspect stays solo."""
    (job_id,) = await put(queue, make_submission())
    await claim(queue)
    await lose(queue, job_id)
    await queue.maintenance.reclaim()
    (solo,) = await claim(queue)
    await queue.claims.release("w1", {job_id: solo.epoch})
    (again,) = await claim(queue)
    assert again.must_run_solo
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert record.losses == 0


async def test_epochs_never_repeat(queue: Queue, make_submission: Make) -> None:
    """Whatever happens to a job, each claim's object keys are unique."""
    (job_id,) = await put(queue, make_submission())
    epochs = []
    for lost in (True, False, True):
        (one,) = await claim(queue)
        epochs.append(one.epoch)
        if lost:
            await lose(queue, job_id)
            await queue.maintenance.reclaim()
        else:
            await queue.claims.release("w1", {job_id: one.epoch})
    epochs.append((await claim(queue))[0].epoch)
    assert epochs == [1, 2, 3, 4]


async def test_progress_is_on_record(queue: Queue, make_submission: Make) -> None:
    """Phase and steps can be polled, and a released job has none."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    assert await queue.claims.report_progress(
        ProgressReport(job_id, one.epoch, Phase.DENOISING, Progress(step=3, total=8))
    )
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert (record.phase, record.progress) == (Phase.DENOISING, Progress(step=3, total=8))
    await queue.claims.release("w1", {job_id: one.epoch})
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert (record.phase, record.progress, record.worker) == (None, Progress(), None)


async def test_waking_up_after_a_release(queue: Queue, make_submission: Make) -> None:
    """A released job is claimed at once, not at the next poll."""
    await put(queue, make_submission())
    (one,) = await claim(queue)
    await queue.wakeups.list_as_waiting("w2", MODELS, wait_s=60)
    await queue.claims.release("w1", {one.job.id: one.epoch})
    assert await queue.wakeups.wait("w2", 2) is not None
    assert await claim_ids(queue) == [one.job.id]
