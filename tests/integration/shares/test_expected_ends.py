"""Estimates of jobs that are for later or wait for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.queue import claim, put, redis_ms

from api.responses import QueuePositions
from shared.job import Phase, State
from shared.job_record import DeviceTimes, Outcome, Progress
from shared.queue import Claim, Queue, Submission
from shared.queue.order.position import QueueReason
from shared.queue.records import ProgressReport, WorkerInfo

Make = Callable[..., Submission]
RUN_S = 5.0


async def settle(queue: Queue, one: Claim) -> None:
    """End a job that has taken `RUN_S`."""
    times = DeviceTimes(step_s=1.0, rest_s=1.0, run_s=RUN_S)
    outcome = Outcome(state=State.SUCCEEDED, device_seconds=RUN_S, device_times=times)
    assert await queue.claims.settle("w1", one.job.id, one.epoch, outcome)


async def learn(queue: Queue, submission: Submission) -> None:
    """Let the queue learn how long the jobs of a signature take."""
    (job_id,) = await put(queue, submission)
    (one,) = await queue.claims.claim("w1", [submission.job.model], 1)
    assert one.job.id == job_id
    await settle(queue, one)


async def eta_of(queue: Queue, job_id: str) -> float | None:
    place = await queue.jobs.position(job_id)
    assert place is not None
    assert (place.position is None) == (place.reason is QueueReason.WAITING)
    return place.eta_s


async def chain(queue: Queue, make: Make, length: int) -> list[str]:
    ids = await put(queue, make())
    while len(ids) < length:
        ids += await put(queue, make(after=(ids[-1],)))
    return ids


async def test_a_job_ends_after_those_that_it_waits_for(queue: Queue, make_submission: Make) -> None:
    ids = await chain(queue, make_submission, 3)
    assert [await eta_of(queue, job_id) for job_id in ids] == [None, None, None], "no job has ended"
    (one,) = await claim(queue)
    await settle(queue, one)
    (first, second) = ids[1:]
    queued_s = await eta_of(queue, first)
    assert queued_s is not None
    assert await eta_of(queue, second) == pytest.approx(queued_s + RUN_S)
    (one,) = await claim(queue)
    report = ProgressReport(one.job.id, one.epoch, Phase.DENOISING, Progress(step=3, total=4))
    await queue.claims.report_progress(report)
    assert await eta_of(queue, second) == pytest.approx(RUN_S / 4 + RUN_S)
    assert await queue.jobs.position(first) is None, "it runs"
    await settle(queue, one)
    place = await queue.jobs.position(second)
    assert place is not None
    assert place.position == 0


async def test_a_job_for_later_ends_after_its_time(queue: Queue, make_submission: Make) -> None:
    await learn(queue, make_submission())
    due_ms = int(await redis_ms(queue)) + 60_000
    (job_id,) = await put(queue, make_submission(not_before_ms=due_ms, group="nightly"))
    (child,) = await put(queue, make_submission(after=(job_id,)))
    before_s = (due_ms - await redis_ms(queue)) / 1000
    eta_s, child_s = await eta_of(queue, job_id), await eta_of(queue, child)
    after_s = (due_ms - await redis_ms(queue)) / 1000
    assert eta_s is not None
    assert child_s is not None
    rounding_s = 0.001
    assert after_s - rounding_s <= eta_s - RUN_S <= before_s + rounding_s
    assert after_s - rounding_s <= child_s - 2 * RUN_S <= before_s + rounding_s
    group = await queue.groups.get("default", "nightly")
    assert group.eta_s is not None
    assert group.eta_s <= eta_s


async def test_a_paused_job_and_those_that_wait_for_it_have_no_estimate(queue: Queue, make_submission: Make) -> None:
    await learn(queue, make_submission())
    first, second, third = await chain(queue, make_submission, 3)
    await queue.jobs.pause(second)
    assert await eta_of(queue, first) is not None
    assert await queue.jobs.position(second) is None
    assert await eta_of(queue, third) is None
    await queue.jobs.resume(second)
    assert await eta_of(queue, third) is not None


async def test_the_estimate_of_many_children_of_one_parent_grows_with_those_before(
    queue: Queue, make_submission: Make
) -> None:
    """The last one of a group is that of the group."""
    await learn(queue, make_submission())
    (parent,) = await put(queue, make_submission())
    children = await put(queue, *(make_submission(after=(parent,), group="fan") for _ in range(50)))
    etas = [await eta_of(queue, job_id) for job_id in children]
    assert etas == sorted(etas, key=lambda eta_s: eta_s or 0)
    assert len(set(etas)) == len(children)
    assert (await queue.groups.get("default", "fan")).eta_s == etas[-1]


async def test_a_bounded_number_of_jobs_is_read_for_an_estimate(queue: Queue, make_submission: Make) -> None:
    await learn(queue, make_submission())
    ids = await chain(queue, make_submission, 66)
    assert await eta_of(queue, ids[64]) is not None
    assert await eta_of(queue, ids[65]) is None


async def test_there_is_no_estimate_without_workers_for_the_job_and_all_that_it_waits_for(
    queue: Queue, make_submission: Make
) -> None:
    for model in ("demo", "other"):
        await learn(queue, make_submission(model=model))
    (first,) = await put(queue, make_submission(model="other"))
    (second,) = await put(queue, make_submission(after=(first,)))
    (third,) = await put(queue, make_submission(after=(second,)))
    for worker, known in ((None, False), (WorkerInfo("w1", ("demo",)), False), (WorkerInfo("w2", ("other",)), True)):
        if worker is not None:
            await queue.workers.heartbeat(worker)
        place = await QueuePositions(queue).of(third, "demo")
        assert place is not None
        assert (place.eta_s is not None, place.reason) == (known, QueueReason.WAITING), worker
