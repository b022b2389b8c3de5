"""Deadlines order the jobs of a tenant and priority by slack, and do not starve jobs without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import MODELS, a_moment, claim, claim_ids, end, lose, put, redis_ms, state_of

from shared.job import State
from shared.job_fields import OnDeadline, Priority
from shared.job_record import DeviceTimes, Outcome, Progress, Timings
from shared.queue import Queue, Submission
from shared.queue.maintenance.changes import JobUpdate
from shared.queue.records import RANKS

Make = Callable[..., Submission]
HOUR_MS = 3_600_000
STEP_MS = 1000.0
MOST_OVERTAKEN = 3


def device_times(step_s: float, rest_s: float = 0.0, steps: int = 8) -> DeviceTimes:
    """Return the times of a solo job."""
    return DeviceTimes(
        step_s=step_s, rest_s=rest_s, run_s=rest_s + steps * step_s, least_step_s=step_s, least_rest_s=rest_s
    )


async def learn(queue: Queue, submission: Submission, step_ms: float = STEP_MS, age_ms: float = 0) -> None:
    """Let the queue know the time of a signature's solo jobs, the last of which ended `age_ms` ago."""
    name = queue.client.redis_keys.slot_cost(submission.signature)
    times = {"device_step_ms": step_ms, "device_rest_ms": 0, "device_run_ms": 8 * step_ms, "least_step_ms": step_ms}
    at = int(await redis_ms(queue)) - age_ms
    await queue.client.redis.hset(name, mapping=times | {"device_jobs": 4, "device_at": at, "least_since": at})
    await queue.client.redis.pexpire(name, HOUR_MS)


async def run_one(queue: Queue, submission: Submission, times: DeviceTimes, wall_s: float) -> None:
    """Run a job that was in the engine for `wall_s`, in which the device worked for it as long as `times` say."""
    (job_id,) = await put(queue, submission)
    (one,) = await claim(queue, 1)
    assert one.job.id == job_id
    outcome = Outcome(
        state=State.SUCCEEDED,
        device_seconds=times.run_s,
        device_times=times,
        progress=Progress(step=submission.job.steps, total=submission.job.steps),
        timings=Timings(queue_ms=0, inference_ms=round(1000 * wall_s)),
    )
    assert await queue.claims.settle("w1", job_id, one.epoch, outcome)


async def one_by_one(queue: Queue, count: int) -> list[str]:
    """Return the jobs of `count` claims of one slot each, which end at once."""
    ids = []
    for _ in range(count):
        (one,) = await claim(queue, 1)
        ids.append(one.job.id)
        assert await end(queue, one)
    return ids


@pytest.mark.parametrize("widths", [(64, 64, 64), (64, 128, 192)], ids=["one signature", "signatures"])
async def test_the_least_slack_goes_first(queue: Queue, make_submission: Make, widths: tuple[int, ...]) -> None:
    """Jobs without a deadline go last, whenever they came."""
    without, later, sooner = await put(
        queue,
        *(
            make_submission(width=width, time_limit_ms=limit)
            for width, limit in zip(widths, (None, 3 * HOUR_MS, HOUR_MS), strict=True)
        ),
    )
    assert await one_by_one(queue, 3) == [sooner, later, without]
    assert await queue.maintenance.reconcile() == 0


async def test_slack_is_the_time_left_without_the_learned_time(queue: Queue, make_submission: Make) -> None:
    """A long job with a later deadline has less of it than a short one."""
    await learn(queue, make_submission())
    short, long = await put(
        queue,
        make_submission(steps=10, time_limit_ms=HOUR_MS),
        make_submission(steps=2000, time_limit_ms=HOUR_MS + 1_000_000),
    )
    assert await one_by_one(queue, 2) == [long, short]


@pytest.mark.parametrize(
    ("steps", "rest_s", "wall_s", "expected_ms"),
    [(1, 0.0146, 0.031, 835), (8, 0.4, 300.0, 1220)],
    ids=["a constant part", "preempted or among others"],
)
async def test_jobs_teach_the_device_time_of_their_signature(
    queue: Queue, make_submission: Make, steps: int, rest_s: float, wall_s: float, expected_ms: float
) -> None:
    """Of a step and of the rest, whatever the engine did between their forwards."""
    for _ in range(10):
        await run_one(queue, make_submission(steps=steps), device_times(0.01641, rest_s, steps), wall_s)
    await put(queue, make_submission(steps=50, time_limit_ms=HOUR_MS))
    (one,) = await claim(queue)
    assert one.time_left_ms is not None
    assert one.slack_ms is not None
    assert one.time_left_ms - one.slack_ms == pytest.approx(expected_ms, abs=3)


async def test_jobs_that_waited_in_the_engine_let_none_expire(queue: Queue, make_submission: Make) -> None:
    """Some that were preempted for five minutes, and a mix in which each waits for the forwards of others."""
    quick = device_times(0.15, 0.3)
    for _ in range(4):
        await run_one(queue, make_submission(), quick, 301.5)
    for _ in range(8):
        await run_one(queue, make_submission(), quick, 90.0)
        await run_one(queue, make_submission(time_limit_ms=30_000), quick, 5.0)
        assert await queue.maintenance.expire() == 0


async def test_the_least_time_counts_and_a_faster_device_lowers_it(queue: Queue, make_submission: Make) -> None:
    """A job that is late by the mean is not ended: it goes last, and starts on an idle worker."""
    for _ in range(4):
        await run_one(queue, make_submission(), device_times(2.0), 16.0)
    (hopeless,) = await put(queue, make_submission(time_limit_ms=6000))
    assert await queue.maintenance.expire() == 1
    assert await state_of(queue, hopeless) is State.EXPIRED
    await run_one(queue, make_submission(), device_times(0.2), 1.6)
    (late,), (without,) = await put(queue, make_submission(time_limit_ms=6000)), await put(queue, make_submission())
    assert await queue.maintenance.expire() == 0
    assert await one_by_one(queue, 2) == [late, without]


async def test_a_listed_job_ends_by_what_is_known_then(queue: Queue, make_submission: Make) -> None:
    """The least time can have fallen since it was listed, and an older version lists jobs by another time."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    await learn(queue, make_submission())
    late, dated = await put(queue, make_submission(time_limit_ms=7000), make_submission(time_limit_ms=HOUR_MS))
    assert await redis.zrange(keys.late, 0, -1) == [late]
    await redis.zadd(keys.late, {late: 1})
    await redis.zadd(keys.deadlines, {dated: 1})
    assert await queue.maintenance.expire() == 0
    assert await redis.zrange(keys.late, 0, -1) == [late, dated]
    await redis.delete(keys.late)
    assert await queue.maintenance.reconcile() == 2
    assert await queue.maintenance.reconcile() == 0
    assert await one_by_one(queue, 1) == [late]
    await queue.jobs.cancel(dated)
    assert not await redis.exists(keys.late, keys.deadlines)


async def test_a_job_without_enough_time_left_expires_early(queue: Queue, make_submission: Make) -> None:
    """Its error says what is missing; without a learned time it may try until its deadline."""
    await learn(queue, make_submission())
    hopeless, late, unknown = await put(
        queue,
        make_submission(steps=60, time_limit_ms=29_000),
        make_submission(steps=60, time_limit_ms=50_000),
        make_submission(width=128, steps=60, time_limit_ms=29_000),
    )
    assert await queue.maintenance.expire() == 1
    assert [await state_of(queue, one) for one in (hopeless, late, unknown)] == [
        State.EXPIRED,
        State.QUEUED,
        State.QUEUED,
    ]
    record = await queue.jobs.get(hopeless)
    assert record is not None
    assert record.error is not None
    assert record.error.code == "deadline_exceeded"
    assert "take at least 30 s" in record.error.message


@pytest.mark.parametrize(("step_ms", "known_for_s"), [(1000.0, 600), (100_000.0, 3200)], ids=["short", "long"])
async def test_a_learned_time_counts_while_jobs_end(
    queue: Queue, make_submission: Make, step_ms: float, known_for_s: float
) -> None:
    """A wrong one would let all jobs of a signature expire, and no job that ends would correct it."""
    for age_s, states in ((known_for_s - 60, State.EXPIRED), (known_for_s + 60, State.QUEUED)):
        await learn(queue, make_submission(), step_ms, 1000 * age_s)
        (hopeless,) = await put(queue, make_submission(steps=60, time_limit_ms=29_000))
        await queue.maintenance.expire()
        assert await state_of(queue, hopeless) is states, age_s


async def test_a_claim_does_not_start_a_job_that_cannot_meet_its_deadline(queue: Queue, make_submission: Make) -> None:
    await learn(queue, make_submission())
    hopeless, other = await put(
        queue, make_submission(steps=60, time_limit_ms=29_000), make_submission(steps=60, time_limit_ms=HOUR_MS)
    )
    assert await claim_ids(queue) == [other]
    assert await state_of(queue, hopeless) is State.EXPIRED


async def test_a_late_job_that_runs_on_goes_after_those_that_can_be_met(queue: Queue, make_submission: Make) -> None:
    """It loses its place by slack, not its turn among jobs without a deadline."""
    await learn(queue, make_submission())
    run = {"on_deadline": OnDeadline.RUN}
    late, dated = await put(
        queue, make_submission(time_limit_ms=8030, **run), make_submission(steps=60, time_limit_ms=HOUR_MS, **run)
    )
    (without,) = await put(queue, make_submission())
    (too_late,) = await put(queue, make_submission(time_limit_ms=1, **run))
    await a_moment(40)
    assert await queue.maintenance.expire() == 0
    assert await queue.client.redis.zrange(queue.client.redis_keys.deadlines, 0, -1) == [dated]
    assert await queue.maintenance.reconcile() == 0
    assert await one_by_one(queue, 4) == [dated, without, too_late, late]


async def pass_latest_start(queue: Queue, *job_ids: str) -> None:
    """Let the latest starts of dated jobs pass, of the last one last."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    for job_id, past_ms in zip(job_ids, range(len(job_ids), 0, -1), strict=True):
        start_by, signature, rank = await redis.hmget(keys.job(job_id), "start_by", "sig", "rank")
        earlier = int(await redis_ms(queue)) - past_ms - int(start_by)
        lane = (signature, RANKS[int(rank)].value, "default")
        await redis.hset(keys.job(job_id), "start_by", int(start_by) + earlier)
        for name in (keys.deadlines, keys.dated(signature), keys.returned(*lane)):
            await redis.zincrby(name, earlier, job_id)
        await redis.zincrby(keys.tenant_signatures("default", "demo", lane[1]), earlier, signature)


@pytest.mark.parametrize("late_width", [64, 128], ids=["same signature", "another signature"])
async def test_a_claim_meets_late_jobs_before_the_chore_does(
    queue: Queue, make_submission: Make, late_width: int
) -> None:
    """They do not go before those that can be met, also when more are late than a claim reads at once."""
    late = await put(queue, *[make_submission(width=late_width, time_limit_ms=HOUR_MS) for _ in range(20)])
    await pass_latest_start(queue, *late)
    (without,) = await put(queue, make_submission(width=late_width))
    dated = await put(queue, *[make_submission(time_limit_ms=HOUR_MS + at) for at in range(2)])
    assert (await one_by_one(queue, 3))[:2] == dated
    assert await queue.maintenance.reconcile() == 0
    rest = [one for one in (*late, without) if await state_of(queue, one) is State.QUEUED]
    assert len(rest) == 20
    assert sorted(await one_by_one(queue, 20)) == sorted(rest)


async def test_late_signatures_do_not_hide_one_that_can_be_met(queue: Queue, make_submission: Make) -> None:
    widths = range(128, 640, 64)
    late = await put(queue, *[make_submission(width=width, time_limit_ms=HOUR_MS) for width in widths])
    for job_id in late:
        await pass_latest_start(queue, job_id)
    (dated,) = await put(queue, make_submission(time_limit_ms=HOUR_MS))
    assert await one_by_one(queue, 1) == [dated]


async def test_a_late_job_has_no_slack_in_the_engine(queue: Queue, make_submission: Make) -> None:
    """Also one that was released, which keeps its place in the queue."""
    (job_id,) = await put(queue, make_submission(time_limit_ms=HOUR_MS))
    (one,) = await claim(queue)
    await queue.claims.release("w1", {job_id: one.epoch})
    await queue.client.redis.hset(queue.client.redis_keys.job(job_id), "start_by", 1)
    (again,) = await claim(queue)
    assert (again.slack_ms, again.time_left_ms is None) == (None, False)


async def test_many_late_jobs_do_not_keep_one_that_is_missed_from_its_end(queue: Queue, make_submission: Make) -> None:
    late = [make_submission(time_limit_ms=8000 + n, on_deadline=OnDeadline.RUN) for n in range(1, 6)]
    await put(queue, *late)
    (missed,) = await put(queue, make_submission(time_limit_ms=8010))
    await learn(queue, make_submission(), step_ms=20_000)
    keys = queue.client.redis_keys
    for place, job_id in enumerate(await queue.client.redis.zrange(keys.deadlines, 0, -1)):
        await queue.client.redis.zadd(keys.deadlines, {job_id: 9 if job_id == missed else place})
    assert await queue.maintenance.expire(2) == 1
    assert await state_of(queue, missed) is State.EXPIRED


async def test_a_late_job_that_runs_on_is_queued_again_when_it_is_released(queue: Queue, make_submission: Make) -> None:
    (job_id,) = await put(queue, make_submission(time_limit_ms=20, on_deadline=OnDeadline.RUN))
    (one,) = await claim(queue)
    await a_moment(25)
    await queue.claims.release("w1", {job_id: one.epoch})
    assert await queue.maintenance.expire() == 0
    assert await claim_ids(queue) == [job_id]


@pytest.mark.parametrize("width", [64, 128], ids=["same signature", "another signature"])
async def test_an_aged_job_is_overtaken_a_few_times_only(
    queue_with: Callable[..., Queue], make_submission: Make, width: int
) -> None:
    """Jobs with deadlines arrive all the time; each job without one has its turn after three of them."""
    queue = queue_with(aging_ms=1)
    first, second = await put(queue, *[make_submission(width=width) for _ in range(2)])
    await a_moment(3)
    started: list[str] = []
    for _ in range(2 * (MOST_OVERTAKEN + 1)):
        await put(queue, *[make_submission(time_limit_ms=HOUR_MS) for _ in range(2)])
        started += await one_by_one(queue, 1)
    assert [started.index(first), started.index(second)] == [MOST_OVERTAKEN, 2 * MOST_OVERTAKEN + 1]
    assert await queue.maintenance.reconcile() == 0


async def test_a_window_ends_early_for_a_deadline(queue: Queue, make_submission: Make) -> None:
    """Other jobs wait for batch mates; one that would miss its deadline starts without them."""
    await put(queue, make_submission(window_ms=60_000))
    assert await claim_ids(queue)
    await put(queue, make_submission(window_ms=60_000))
    assert await claim_ids(queue) == []
    (relaxed,) = await put(queue, make_submission(window_ms=60_000, time_limit_ms=HOUR_MS))
    assert await claim_ids(queue) == []
    (urgent,) = await put(queue, make_submission(window_ms=60_000, time_limit_ms=900))
    assert (await claim_ids(queue))[:2] == [urgent, relaxed]


@pytest.mark.parametrize(
    ("limit_ms", "late", "joins"),
    [(7500, False, False), (HOUR_MS, False, True), (HOUR_MS, True, True)],
    ids=["urgent", "with slack", "late"],
)
async def test_a_batch_admits_none_while_another_signature_has_an_urgent_job(
    queue: Queue, make_submission: Make, limit_ms: int, late: bool, joins: bool
) -> None:
    """A job that joins now would end after the latest start of the other one."""
    await learn(queue, make_submission())
    await put(queue, make_submission())
    assert await claim_ids(queue)
    (mate,) = await put(queue, make_submission())
    other = await put(queue, make_submission(width=128, time_limit_ms=limit_ms))
    if late:
        await pass_latest_start(queue, *other)
    joined = await queue.claims.join("w1", make_submission().signature, 4, models=MODELS)
    assert [one.job.id for one in joined] == [mate] * joins


@pytest.mark.parametrize("paused", ["of its own signature", "of another rank", "of another model"])
async def test_an_urgent_job_is_seen_behind_many_paused_ones(queue: Queue, make_submission: Make, paused: str) -> None:
    """Those have less slack, and none of them starts."""
    await learn(queue, make_submission())
    await put(queue, make_submission())
    assert await claim_ids(queue)
    fields: dict[str, dict[str, Any]] = {
        "of its own signature": {"time_limit_ms": 15_000},
        "of another rank": {"time_limit_ms": 7000, "width": 192, "priority": Priority.BULK},
        "of another model": {"time_limit_ms": 7000, "model": "other"},
    }
    ids = await put(queue, *(make_submission(**fields[paused]) for _ in range(20)))
    for job_id in ids:
        await queue.jobs.pause(job_id)
    await put(queue, make_submission(), make_submission(width=128, time_limit_ms=7500))
    assert await queue.claims.join("w1", make_submission().signature, 4, models=["demo"]) == []


async def test_a_new_deadline_moves_a_job(queue: Queue, make_submission: Make) -> None:
    """Without one again, a job goes before its lane, as others that were moved."""
    first, *others, third = await put(
        queue, make_submission(time_limit_ms=HOUR_MS), make_submission(), make_submission(), make_submission()
    )
    await queue.changes.update([third], JobUpdate(time_limit_ms=60_000))
    assert await one_by_one(queue, 1) == [third]
    await queue.changes.update([first], JobUpdate(time_limit_ms=0))
    await queue.changes.update([others[1]], JobUpdate(time_limit_ms=60_000))
    assert await queue.maintenance.reconcile() == 0
    assert await one_by_one(queue, 3) == [first, others[1], others[0]]
    assert await queue.client.redis.exists(queue.client.redis_keys.deadlines) == 0


async def test_lost_sets_are_built_again(queue: Queue, make_submission: Make) -> None:
    """Deadlines and the order by them, after a failover."""
    later, sooner = await put(queue, make_submission(time_limit_ms=2 * HOUR_MS), make_submission(time_limit_ms=HOUR_MS))
    redis, keys = queue.client.redis, queue.client.redis_keys
    signature = make_submission().signature
    await redis.delete(keys.deadlines, keys.dated(signature), keys.returned(signature, "standard", "default"))
    assert await queue.maintenance.reconcile() >= 2
    assert await redis.zrange(keys.deadlines, 0, -1) == [sooner, later]
    assert await queue.maintenance.reconcile() == 0
    await redis.delete(keys.deadlines)
    assert await queue.maintenance.reconcile() == 2
    assert await one_by_one(queue, 2) == [sooner, later]


async def test_released_and_lost_jobs_keep_their_deadlines(queue: Queue, make_submission: Make) -> None:
    released, lost = await put(queue, *[make_submission(time_limit_ms=HOUR_MS) for _ in range(2)])
    claims = {one.job.id: one for one in await claim(queue)}
    await queue.claims.release("w1", {released: claims[released].epoch})
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    keys = queue.client.redis_keys
    assert set(await queue.client.redis.zrange(keys.deadlines, 0, -1)) == {released, lost}
    assert await queue.maintenance.reconcile() == 0
    (one,) = await claim(queue, worker="w2")
    assert one.slack_ms is not None


async def test_positions_follow_the_slack(queue: Queue, make_submission: Make) -> None:
    ids = await put(queue, make_submission(), *[make_submission(time_limit_ms=at * HOUR_MS) for at in (3, 1, 2)])
    positions = [await queue.jobs.position(job_id) for job_id in ids]
    assert [one.position for one in positions if one is not None] == [3, 2, 0, 1]
