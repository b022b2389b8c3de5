"""Of a job that has a checkpoint only what is left counts: in deadlines, charges, positions and wanted workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.queue import claim, end, lose, put, redis_ms, state_of

from shared.job import Phase, State
from shared.job_fields import Priority
from shared.job_record import Progress
from shared.queue import Claim, Queue, Submission
from shared.queue.checkpoints import JobCheckpoint, StoredImage, checkpoint_key
from shared.queue.records import ProgressReport

Make = Callable[..., Submission]
QueueWith = Callable[..., Queue]
STEPS = 8  # of a job by default
STEP_MS = 1000.0
BYTES = 100


def at_step(one: Claim, *steps: int, size: int = BYTES) -> JobCheckpoint:
    """Return a checkpoint in which an image has done each of `steps`."""
    keys = [checkpoint_key(one.job.id, one.epoch, 1, index) for index in range(len(steps))]
    of_each = zip(keys, steps, strict=True)
    return JobCheckpoint(
        images=tuple(StoredImage(key=key, bytes=size, sha256="", step=step, total=STEPS) for key, step in of_each)
    )


async def keep(queue: Queue, one: Claim, *steps: int) -> None:
    assert await queue.claims.keep_checkpoint("w1", one, at_step(one, *steps)) == "kept"


async def learn(queue: Queue, submission: Submission) -> None:
    """Let the queue know how long jobs of a signature take: `STEP_MS` a step, a slot 8 s, one job ends every 10 s."""
    redis, keys, at = queue.client.redis, queue.client.redis_keys, int(await redis_ms(queue))
    times = {"device_step_ms": STEP_MS, "device_rest_ms": 0, "device_run_ms": STEPS * STEP_MS, "least_step_ms": STEP_MS}
    known = {"device_jobs": 4, "device_at": at, "least_since": at, "slot_s": STEPS * STEP_MS / 1000, "rows": 1}
    await redis.hset(keys.slot_cost(submission.signature), mapping=times | known)
    await redis.pexpire(keys.slot_cost(submission.signature), 60_000)
    await redis.hset(keys.arrivals(submission.signature), "done_gap", 10_000)
    await redis.pexpire(keys.arrivals(submission.signature), 60_000)


async def released(queue: Queue, submission: Submission, *steps: int) -> str:
    """Queue a job that was released with a checkpoint after `steps` of its images, none without steps."""
    (job_id,) = await put(queue, submission)
    (one,) = await claim(queue)
    assert one.job.id == job_id
    if steps:
        await keep(queue, one, *steps)
    assert await queue.claims.release("w1", {job_id: one.epoch}) == 1
    return job_id


@pytest.mark.parametrize(("steps", "left"), [((), 8), ((2,), 6), ((6,), 2), ((8,), 1), ((7, 4), 4)])
async def test_the_latest_start_counts_the_steps_that_are_left(
    queue: Queue, make_submission: Make, steps: tuple[int, ...], left: int
) -> None:
    """Of several images those of the one with most."""
    submission = make_submission(time_limit_ms=60_000, n=max(1, len(steps)))
    await learn(queue, submission)
    job_id = await released(queue, submission, *steps)
    deadline, start_by = await queue.client.redis.hmget(queue.client.redis_keys.job(job_id), "deadline", "start_by")
    assert int(deadline) - int(start_by) == pytest.approx(left * STEP_MS, abs=1)


@pytest.mark.parametrize(("steps", "state"), [((), State.EXPIRED), ((7,), State.RUNNING)])
async def test_a_job_that_can_meet_its_deadline_from_its_checkpoint_does_not_expire(
    queue: Queue, make_submission: Make, steps: tuple[int, ...], state: State
) -> None:
    submission = make_submission(time_limit_ms=3_000)
    job_id = await released(queue, submission, *steps)
    await learn(queue, submission)
    await claim(queue)
    await queue.maintenance.reclaim()
    assert await state_of(queue, job_id) is state


async def test_a_dropped_checkpoint_counts_no_more(queue: Queue, make_submission: Make) -> None:
    submission = make_submission(time_limit_ms=60_000)
    await learn(queue, submission)
    (job_id,) = await put(queue, submission)
    for losses in range(2):
        (one,) = await claim(queue)
        if not losses:
            await keep(queue, one, 6)
        await lose(queue, job_id)
        await queue.maintenance.reclaim()
    deadline, start_by, left = await queue.client.redis.hmget(
        queue.client.redis_keys.job(job_id), "deadline", "start_by", "left"
    )
    assert (int(deadline) - int(start_by), left) == (STEPS * STEP_MS, None)


@pytest.mark.parametrize(("steps", "charged"), [((), 8.0), ((6,), 2.0)])
async def test_a_claim_is_charged_what_is_left(
    queue: Queue, make_submission: Make, steps: tuple[int, ...], charged: float
) -> None:
    submission = make_submission()
    await learn(queue, submission)
    job_id = await released(queue, submission, *steps)
    (one,) = await claim(queue)
    assert float(await queue.client.redis.hget(queue.client.redis_keys.job(job_id), "charged")) == charged
    assert await end(queue, one, device_seconds=charged)


async def test_positions_and_the_backlog_count_what_is_left(queue: Queue, make_submission: Make) -> None:
    """A released job goes before the one that came later; a lost one before both."""
    submissions = [make_submission() for _ in range(3)]
    await learn(queue, submissions[0])
    lost, first, later = await put(queue, *submissions)
    claims = {one.job.id: one for one in await claim(queue, 2)}
    for job_id, step in ((lost, 4), (first, 6)):
        await keep(queue, claims[job_id], step)
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    await queue.claims.release("w1", {first: claims[first].epoch})
    positions = [await queue.jobs.position(job_id) for job_id in (lost, first, later)]
    assert [(one.position, one.eta_s) for one in positions if one] == [(0, 5.0), (1, 7.5), (2, 17.5)]
    (depth,) = await queue.workers.queue_depths()
    assert (depth.queued_jobs, depth.eta_s) == (3, 17.5)
    (load,) = (await queue.workers.backlog(await queue.workers.load(), {})).loads
    assert (load.queued_slots, load.work_slots, load.bulk_work_slots) == (3, 1.75, 0)


@pytest.mark.parametrize(("steps", "slots"), [((), 1.0), ((6,), 0.25)])
async def test_bulk_slots_with_a_deadline_count_as_far_as_they_are_left(
    queue: Queue, make_submission: Make, steps: tuple[int, ...], slots: float
) -> None:
    await released(queue, make_submission(priority=Priority.BULK, time_limit_ms=60_000), *steps)
    (row,) = (await queue.workers.backlog(await queue.workers.load(), {})).dated
    assert row.queued == slots


async def test_checkpoints_of_all_tenants_are_bounded(queue_with: QueueWith, make_submission: Make) -> None:
    """What is replaced or ends makes room, and nothing fails where there is none."""
    queue = queue_with(max_checkpoint_bytes=2 * BYTES)
    await put(queue, *[make_submission(tenant=tenant) for tenant in ("a", "b", "c")])
    one, two, three = await claim(queue)
    for claimed in (one, two):
        await keep(queue, claimed, 4)
    assert await queue.claims.keep_checkpoint("w1", three, at_step(three, 4)) == "full"
    assert await queue.claims.keep_checkpoint("w1", two, at_step(two, 5, size=BYTES + 1)) == "full"
    await keep(queue, two, 6)
    assert await queue.maintenance.reconcile() == 0
    assert await end(queue, one)
    await keep(queue, three, 5)
    footprint, redis = queue.client.redis_keys.footprint, queue.client.redis
    await redis.hset(footprint, "*|checkpoint_bytes", 7)
    assert await queue.maintenance.reconcile() == 1
    assert int(await redis.hget(footprint, "*|checkpoint_bytes")) == 2 * BYTES
    assert await end(queue, two)
    assert await end(queue, three)
    assert await redis.hget(footprint, "*|checkpoint_bytes") is None


async def lost_at(queue: Queue, one: Claim, step: int) -> Claim:
    """Lose the worker of a job at a step, and claim the job again."""
    report = ProgressReport(one.job.id, one.epoch, Phase.DENOISING, Progress(step=step, total=STEPS))
    assert await queue.claims.report_progress(report) == 1
    await lose(queue, one.job.id)
    await queue.maintenance.reclaim()
    (again,) = await claim(queue)
    return again


@pytest.mark.parametrize(
    ("lost", "steps", "solo"),
    [(4, (3,), True), (4, (4,), True), (4, (5,), False), (8, (4, 4), True), (8, (5, 3), True), (8, (5, 4), False)],
)
async def test_a_lost_job_runs_solo_until_a_checkpoint_is_beyond_the_step_of_the_loss(
    queue: Queue, make_submission: Make, lost: int, steps: tuple[int, ...], solo: bool
) -> None:
    """Of several images both are sums."""
    await put(queue, make_submission(n=len(steps)))
    (one,) = await claim(queue)
    again = await lost_at(queue, one, lost)
    assert again.must_run_solo
    await keep(queue, again, *steps)
    assert await queue.claims.release("w1", {again.job.id: again.epoch}) == 1
    (after,) = await claim(queue)
    assert after.must_run_solo is solo


async def test_a_job_that_is_at_fault_ends_although_its_checkpoints_go_on(
    queue_with: QueueWith, make_submission: Make
) -> None:
    """Progress is known a second late: checkpoints can seem to be beyond the step that is at fault."""
    queue = queue_with(max_attempts=1)
    (job_id,) = await put(queue, make_submission())
    losses = 0
    while await state_of(queue, job_id) is State.QUEUED:
        (one,) = await claim(queue)
        report = ProgressReport(job_id, one.epoch, Phase.DENOISING, Progress(step=2, total=STEPS))
        await queue.claims.report_progress(report)
        await keep(queue, one, 3)
        await lose(queue, job_id)
        await queue.maintenance.reclaim()
        losses += 1
        assert losses < 8
    assert await state_of(queue, job_id) is State.FAILED
