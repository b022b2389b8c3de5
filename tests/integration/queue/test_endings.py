"""Canceling, deadlines, deletion, dead letters and retention."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from harness.queue import claim, claim_ids, end, end_retention, lose, names_left, put, retention_of, state_of

from shared.job import InputRef, State
from shared.job_record import Artifact, Outcome
from shared.queue import Queue, Submission, scripts
from shared.runtime.clock import now_ms

Make = Callable[..., Submission]


async def test_a_queued_job_is_canceled_at_once(queue: Queue, make_submission: Make) -> None:
    """Its entry is deleted; though XDEL of an unread entry makes a group's lag nil, the depth is right."""
    first, second, third = await put(queue, *[make_submission(n=2) for _ in range(3)])
    record = await queue.jobs.cancel(second)
    assert record is not None
    assert (record.state, record.cancel_requested) == (State.CANCELED, True)
    assert record.finished_at_ms is not None
    depth = (await queue.workers.queue_depths())[0]
    assert (depth.queued_jobs, depth.queued_slots) == (2, 4)
    assert await claim_ids(queue) == [first, third]


async def test_canceling_the_last_queued_job_deletes_its_lane(queue: Queue, make_submission: Make) -> None:
    """Lane, group and signature are deleted."""
    ids = await put(queue, make_submission(), make_submission())
    for job_id in ids:
        await queue.jobs.cancel(job_id)
    assert await queue.workers.queue_depths() == []
    assert not {
        name for name in await names_left(queue) if name.startswith(("lane", "signature", "ready", "queued_jobs"))
    }


async def test_canceling_the_oldest_job_changes_the_age(queue: Queue, make_submission: Make) -> None:
    """Then the next job is the oldest."""
    old, young = await put(queue, make_submission()), await put(queue, make_submission())
    lanes = queue.client.redis_keys.lanes(make_submission().signature, "standard")
    await queue.jobs.cancel(old[0])
    arrived = await queue.client.redis.hget(queue.client.redis_keys.job(young[0]), "arrived")
    assert await queue.client.redis.zscore(lanes, "default") == int(float(arrived))


async def test_a_running_job_is_marked(queue: Queue, make_submission: Make) -> None:
    """Its worker learns of it when it renews the lease, and settles the job."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    record = await queue.jobs.cancel(job_id)
    assert record is not None
    assert (record.state, record.cancel_requested) == (State.RUNNING, True)
    renewal = await queue.claims.renew("w1", {job_id: one.epoch})
    assert not renewal.lost
    assert renewal.cancel == {job_id}
    assert await end(queue, one, state=State.CANCELED)
    assert await state_of(queue, job_id) is State.CANCELED


@pytest.mark.parametrize("way", ["lost", "released"])
async def test_a_canceled_job_of_a_lost_worker_does_not_run_again(
    queue: Queue, make_submission: Make, way: str
) -> None:
    """Lost or released, it stays canceled."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    await queue.jobs.cancel(job_id)
    if way == "lost":
        await lose(queue, job_id)
        await queue.maintenance.reclaim()
    else:
        await queue.claims.release("w1", {job_id: one.epoch})
    assert await state_of(queue, job_id) is State.CANCELED
    assert await claim(queue) == []


async def test_a_job_that_has_ended_stays_as_it_is(queue: Queue, make_submission: Make) -> None:
    """A late cancel returns the record; for an unknown job it returns None."""
    (job_id,) = await put(queue, make_submission())
    await end(queue, (await claim(queue))[0])
    record = await queue.jobs.cancel(job_id)
    assert record is not None
    assert (record.state, record.cancel_requested) == (State.SUCCEEDED, False)
    assert await queue.jobs.cancel("job_unknown") is None


@pytest.mark.parametrize("where", ["front", "solo"])
async def test_a_requeued_job_can_be_canceled(queue: Queue, make_submission: Make, where: str) -> None:
    """Lost and released jobs are canceled like others."""
    (job_id,) = await put(queue, make_submission())
    (one,) = await claim(queue)
    if where == "solo":
        await lose(queue, job_id)
        await queue.maintenance.reclaim()
    else:
        await queue.claims.release("w1", {job_id: one.epoch})
    await queue.jobs.cancel(job_id)
    assert await state_of(queue, job_id) is State.CANCELED
    assert await queue.workers.queue_depths() == []


async def test_queued_jobs_expire(queue: Queue, make_submission: Make) -> None:
    """After its deadline a queued job ends; jobs without or with a later one stay queued; a running one continues."""
    running, *_ = await put(queue, make_submission(time_limit_ms=0))
    await queue.client.redis.hdel(queue.client.redis_keys.job(running), "deadline", "start_by")
    await claim(queue)
    late, later, never = await put(
        queue,
        make_submission(time_limit_ms=-1),
        make_submission(time_limit_ms=60_000),
        make_submission(),
    )
    assert await queue.maintenance.expire() == 1
    assert await queue.maintenance.expire() == 0
    assert await state_of(queue, late) is State.EXPIRED
    assert await claim_ids(queue) == [later, never]
    assert await state_of(queue, running) is State.RUNNING


async def test_only_queued_jobs_have_deadlines(queue: Queue, make_submission: Make) -> None:
    """Claimed or ended, a job has no row among the deadlines."""
    soon = 60_000
    _, waiting = await put(queue, make_submission(time_limit_ms=soon), make_submission(time_limit_ms=soon))
    await claim(queue, 1)
    assert await queue.client.redis.zrange(queue.client.redis_keys.deadlines, 0, -1) == [waiting]
    await queue.jobs.cancel(waiting)
    assert await queue.client.redis.exists(queue.client.redis_keys.deadlines) == 0


async def test_a_job_released_after_its_deadline_expires(queue: Queue, make_submission: Make) -> None:
    """A released job has a deadline again."""
    (job_id,) = await put(queue, make_submission(time_limit_ms=60_000))
    (one,) = await claim(queue)
    await queue.client.redis.hset(queue.client.redis_keys.job(job_id), mapping={"deadline": 1, "start_by": 1})
    await queue.claims.release("w1", {job_id: one.epoch})
    assert await queue.maintenance.expire() == 1
    assert await state_of(queue, job_id) is State.EXPIRED


async def test_only_ended_jobs_can_be_deleted(queue: Queue, make_submission: Make) -> None:
    """Record and indexes are deleted at once; storage is checked again when no upload can be in progress."""
    (job_id,) = await put(queue, make_submission(batch_id="b"))
    assert not await queue.jobs.forget(job_id)
    (one,) = await claim(queue)
    assert not await queue.jobs.forget(job_id)
    await end(queue, one)
    assert await queue.jobs.forget(job_id)
    assert not await queue.jobs.forget(job_id)
    assert await queue.jobs.get(job_id) is None
    for batch_id in (None, "b"):
        assert await queue.jobs.page("default", batch_id=batch_id) == ([], None)
    ((row, due),) = await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1, withscores=True)
    assert due > now_ms() + queue.client.settings.lease_ms
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})
    (doomed,) = await queue.maintenance.expired_items()
    assert (doomed.kind, doomed.id, doomed.prefix) == ("job", job_id, f"jobs/{job_id}/")
    await queue.maintenance.forget_item(doomed)
    assert await queue.maintenance.expired_items() == []


async def test_a_deleted_job_that_is_submitted_again_keeps_its_new_record(queue: Queue, make_submission: Make) -> None:
    """The line of a batch has the same job id each time it is submitted."""
    submission = make_submission()
    (job_id,) = await put(queue, submission)
    (one,) = await claim(queue)
    assert await end(queue, one)
    assert await queue.jobs.forget(job_id)
    await put(queue, submission)
    await end_retention(queue, job_id)
    assert await state_of(queue, job_id) is State.QUEUED
    (one,) = await claim(queue)
    assert await end(queue, one)
    await end_retention(queue, job_id)
    assert await queue.jobs.get(job_id) is None


async def test_items_expire_after_their_retention(queue: Queue, make_submission: Make) -> None:
    """Storage first, then the row: an interrupted sweep finds it again."""
    (job_id,) = await put(queue, make_submission())
    await end(queue, (await claim(queue))[0])
    assert await queue.maintenance.expired_items() == []
    (row,) = await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1)
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})
    assert await queue.maintenance.expired_items() == await queue.maintenance.expired_items()
    (doomed,) = await queue.maintenance.expired_items()
    await queue.maintenance.forget_item(doomed)
    await queue.maintenance.forget_item(doomed)
    assert await queue.jobs.get(job_id) is None
    assert await queue.jobs.page("default") == ([], None)


async def test_an_item_that_is_stored_again_is_kept(queue: Queue, make_submission: Make) -> None:
    """A slow sweep finds the row's new expiry, and leaves it."""
    (job_id,) = await put(queue, make_submission())
    await end(queue, (await claim(queue))[0])
    (row,) = await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1)
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})
    (doomed,) = await queue.maintenance.expired_items()
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: now_ms() + 60_000})
    await queue.maintenance.forget_item(doomed)
    assert await queue.jobs.get(job_id) is not None
    assert await queue.client.redis.zcard(queue.client.redis_keys.retention) == 1


async def _die(queue: Queue, job_id: str) -> None:
    for _ in range(queue.client.settings.max_attempts + 1):
        assert [one.job.id for one in await claim(queue)] == [job_id]
        await lose(queue, job_id)
        await queue.maintenance.reclaim()


async def test_a_dead_letter_can_be_read_and_redriven(queue: Queue, make_submission: Make) -> None:
    """Its record has the error; redriven, it runs again, solo, with a new count of losses."""
    (job_id,) = await put(queue, make_submission(time_limit_ms=60_000))
    await _die(queue, job_id)
    (letter,), _ = await queue.dead_letters.page()
    assert (letter.id, letter.reason) == (job_id, "worker_lost")
    assert letter.record is not None
    assert letter.record.state is State.FAILED
    assert letter.at_ms > 0
    assert await queue.dead_letters.redrive(job_id)
    assert not await queue.dead_letters.redrive(job_id)
    assert await queue.dead_letters.page() == ([], None)
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert (record.state, record.losses, record.attempts, record.error) == (State.QUEUED, 0, 0, None)
    assert record.expires_at_ms is None
    assert await queue.client.redis.pttl(queue.client.redis_keys.job(job_id)) == -1
    assert record.deadline_at_ms is None
    (one,) = await claim(queue)
    assert (one.must_run_solo, one.epoch) == (True, queue.client.settings.max_attempts + 2)
    assert one.time_left_ms is None, "the worker would stop it at its first renewal"
    assert await end(queue, one)
    assert len(await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1)) == 1


async def test_a_dead_letter_can_be_purged(queue: Queue, make_submission: Make) -> None:
    """The letter and its job's record are deleted; it stays counted."""
    assert await queue.dead_letters.added() == 0
    (job_id,) = await put(queue, make_submission())
    await _die(queue, job_id)
    assert await queue.dead_letters.purge(job_id)
    assert (await queue.dead_letters.count(), await queue.dead_letters.added()) == (0, 1)
    assert not await queue.dead_letters.purge(job_id)
    assert not await queue.dead_letters.redrive(job_id)
    assert await queue.jobs.get(job_id) is None
    assert await queue.dead_letters.page() == ([], None)


async def test_a_dead_letter_and_its_job_are_kept_equally_long(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Whatever made the letter: a redrive needs the record, its inputs and its place in the lists."""
    queue = queue_with(retention_s=60, input_retention_s=60, max_attempts=1)
    redis, keys = queue.client.redis, queue.client.redis_keys
    image = InputRef(id="in_a", key="inputs/default/in_a/x", content_type="image/png", bytes=1, width=8, height=8)
    await queue.inputs.put("default", image, 60)
    undecodable, lost = await put(queue, *(make_submission(images=(image,)) for _ in range(2)))
    wire = await redis.hget(keys.job(undecodable), "job")
    await redis.hset(keys.job(undecodable), "job", "{")
    await claim(queue, 1)
    await redis.hset(keys.job(undecodable), "job", wire)
    await _die(queue, lost)
    kept_ms = scripts.DEAD_LETTERS_MS - 60_000
    for job_id in (undecodable, lost):
        assert await redis.pttl(keys.dead_letter(job_id)) > kept_ms
        assert await redis.pttl(keys.job(job_id)) > kept_ms
        assert await retention_of(queue, f"job|default|{job_id}|") > now_ms() + kept_ms
        record = await queue.jobs.get(job_id)
        assert record is not None
        assert record.expires_at_ms is not None
        assert record.expires_at_ms > now_ms() + kept_ms
    assert await redis.pttl(keys.input("default", "in_a")) > kept_ms
    assert await retention_of(queue, "input|default|in_a|x|") > now_ms() + kept_ms


async def test_expired_dead_letters_are_not_counted(
    queue_with: Callable[..., Queue],
    make_submission: Make,
    eventually: Callable[..., Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The count, the page and the cap agree, also when nothing is buried any more."""
    monkeypatch.setattr(scripts, "DEAD_LETTERS_MS", 200)
    queue = queue_with(retention_s=60)
    for at in range(5):
        await queue.dead_letters.bury(f"letter{at}", "test", "made by a test")
    assert await queue.dead_letters.count() == 5

    async def expired() -> bool:
        return await queue.dead_letters.get("letter4") is None

    await eventually(expired, "the letters have expired")
    assert await queue.dead_letters.count() == 0
    assert await queue.dead_letters.page() == ([], None)


async def test_the_page_of_dead_letters_is_full_while_older_ones_expire(queue: Queue) -> None:
    for at in range(5):
        await queue.dead_letters.bury(f"letter{at}", "test", "made by a test")
    await queue.client.redis.delete(*(queue.client.redis_keys.dead_letter(f"letter{at}") for at in (0, 1)))
    letters, after = await queue.dead_letters.page(limit=3)
    assert [letter.id for letter in letters] == ["letter4", "letter3", "letter2"]
    assert after is None
    assert await queue.dead_letters.count() == 3


async def test_a_dead_letter_goes_with_its_job(queue: Queue, make_submission: Make) -> None:
    """A letter whose record is deleted could not be redriven."""
    (job_id,) = await put(queue, make_submission())
    await _die(queue, job_id)
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {f"job|default|{job_id}|": 1})
    (item,) = await queue.maintenance.expired_items()
    await queue.maintenance.forget_item(item)
    assert await queue.dead_letters.count() == 0
    assert await queue.dead_letters.get(job_id) is None


async def test_dead_letters_are_paged_and_capped(
    queue_with: Callable[..., Queue], make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newest first, never more than the cap."""
    monkeypatch.setattr(scripts, "DEAD_LETTERS_CAP", 4)
    queue = queue_with()
    for at in range(6):
        await queue.dead_letters.bury(f"letter{at}", "test", "made by a test")
    first, after = await queue.dead_letters.page(limit=3)
    second, end_of_list = await queue.dead_letters.page(after=after, limit=3)
    assert sorted([letter.id for letter in first + second], reverse=True) == [f"letter{at}" for at in (5, 4, 3, 2)]
    assert end_of_list is None
    assert len({name for name in await names_left(queue) if name.startswith("dead_letter:")}) == 4


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([("image", 64, 64)], (64, 64)),
        ([("image", 64, 64), ("image", 64, 64)], (64, 64)),
        ([("video", 96, 64)], (96, 64)),
        ([("latents", 9, 8)], (72, 64)),
        ([("image", 64, 64), ("image", 96, 64)], (72, 64)),
        ([], (72, 64)),
    ],
)
async def test_the_record_of_an_ended_job_has_the_size_that_was_made(
    queue: Queue, make_submission: Make, made: list[tuple[str, int, int]], expected: tuple[int, int]
) -> None:
    """Pipelines round sides, some without a word."""
    (job_id,) = await put(queue, make_submission(width=72, height=64, prompt="a fox"))
    (one,) = await claim(queue)
    artifacts = tuple(
        Artifact.model_validate(
            {"index": at, "kind": kind, "key": "k", "content_type": "image/png", "bytes": 1, "seed": 7}
            | {"width": width, "height": height}
        )
        for at, (kind, width, height) in enumerate(made)
    )
    assert await queue.claims.settle(
        "w1", job_id, one.epoch, Outcome(state=State.SUCCEEDED, artifacts=artifacts), job=one.job
    )
    record = await queue.jobs.get(job_id)
    assert record is not None
    assert (record.job.width, record.job.height) == expected
    assert record.job == one.job.model_copy(update={"width": expected[0], "height": expected[1]})
