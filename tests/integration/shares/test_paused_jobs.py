"""Each way in which a paused job can end: it ends once, and leaves nothing in Redis when it is deleted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from harness.queue import a_moment, claim, end, end_retention, lasting_names, lose, put, state_of

from shared.job import InputRef, State, Webhook
from shared.job_fields import Priority
from shared.job_record import Outcome
from shared.queue import Queue, Submission
from shared.queue.checkpoints import JobCheckpoint, StoredImage, checkpoint_key
from shared.queue.maintenance.changes import JobUpdate
from shared.runtime.clock import now_ms

Make = Callable[..., Submission]
Step = Callable[[Queue, str], Awaitable[object]]
HOUR_MS = 3_600_000
IMAGE = InputRef(id="in_a", key="inputs/default/in_a/x", content_type="image/png", bytes=1, width=8, height=8)
ENDS = tuple(state for state in State if state.terminal)
HOOK = Webhook(url="https://job.invalid/", states=ENDS)


async def pause(queue: Queue, job_id: str) -> None:
    assert await queue.jobs.pause(job_id) is not None


async def run_and_pause(queue: Queue, job_id: str) -> None:
    """Claim the job, keep a checkpoint of it, and mark it."""
    (one,) = await claim(queue)
    image = StoredImage(key=checkpoint_key(job_id, one.epoch, 1, 0), bytes=9, sha256="0" * 64, step=2, total=8)
    assert await queue.claims.keep_checkpoint("w1", one, JobCheckpoint(images=(image,))) == "kept"
    await pause(queue, job_id)


async def hand_over(queue: Queue, job_id: str) -> None:
    await run_and_pause(queue, job_id)
    assert await queue.claims.release("w1", {job_id: await epoch_of(queue, job_id)}) == 1


async def run_and_lose(queue: Queue, job_id: str) -> None:
    await run_and_pause(queue, job_id)
    await lose(queue, job_id)
    assert await queue.maintenance.reclaim() == [job_id]


async def change(queue: Queue, job_id: str) -> None:
    """Give the paused job another priority and deadline."""
    await pause(queue, job_id)
    update = JobUpdate(Priority.INTERACTIVE, HOUR_MS // 2)
    assert await queue.changes.update([job_id], update) == [State.QUEUED]


async def epoch_of(queue: Queue, job_id: str) -> int:
    record = await queue.jobs.get(job_id)
    assert record is not None
    return record.epoch


async def cancel(queue: Queue, job_id: str) -> None:
    await queue.jobs.cancel(job_id)


async def cancel_many(queue: Queue, job_id: str) -> None:
    assert await queue.changes.cancel([job_id, job_id]) == [True, True]


async def pass_deadline(queue: Queue, job_id: str) -> None:
    redis, keys = queue.client.redis, queue.client.redis_keys
    await redis.hset(keys.job(job_id), "deadline", 1)
    for name in (keys.deadlines, keys.late):
        await redis.zadd(name, {job_id: 1}, xx=True)
    assert await queue.maintenance.expire() == 1


async def end_pause(queue: Queue, job_id: str) -> None:
    assert await queue.client.redis.zadd(queue.client.redis_keys.paused, {job_id: 1}, xx=True, ch=True) == 1
    assert await queue.maintenance.expire() == 1


async def resume_and_run(queue: Queue, job_id: str) -> None:
    await queue.jobs.resume(job_id)
    (one,) = await claim(queue)
    assert await end(queue, one)


async def resume_and_pause_again(queue: Queue, job_id: str) -> None:
    await queue.jobs.resume(job_id)
    await pause(queue, job_id)
    await cancel(queue, job_id)


async def end_before_release(queue: Queue, job_id: str) -> None:
    """The job ends at a step before its worker reads the mark."""
    outcome = Outcome(state=State.SUCCEEDED)
    assert await queue.claims.settle("w1", job_id, await epoch_of(queue, job_id), outcome)


async def cancel_and_release(queue: Queue, job_id: str) -> None:
    await cancel(queue, job_id)
    assert await queue.claims.release("w1", {job_id: await epoch_of(queue, job_id)}) == 1


async def cancel_and_lose(queue: Queue, job_id: str) -> None:
    await cancel(queue, job_id)
    await lose(queue, job_id)
    await queue.maintenance.reclaim()


async def resume_and_release(queue: Queue, job_id: str) -> None:
    await queue.jobs.resume(job_id)
    assert await queue.claims.release("w1", {job_id: await epoch_of(queue, job_id)}) == 1
    (one,) = await claim(queue)
    assert await end(queue, one)


WAITING: dict[str, Step] = {"queued": pause, "handed over": hand_over, "lost": run_and_lose, "changed": change}
WAITING_ENDS: dict[str, tuple[Step, State]] = {
    "canceled": (cancel, State.CANCELED),
    "canceled with others": (cancel_many, State.CANCELED),
    "past its deadline": (pass_deadline, State.EXPIRED),
    "paused too long": (end_pause, State.EXPIRED),
    "resumed": (resume_and_run, State.SUCCEEDED),
    "paused again": (resume_and_pause_again, State.CANCELED),
}
RUNNING_ENDS: dict[str, tuple[Step, State]] = {
    "ended": (end_before_release, State.SUCCEEDED),
    "canceled and released": (cancel_and_release, State.CANCELED),
    "canceled and lost": (cancel_and_lose, State.CANCELED),
    "resumed and released": (resume_and_release, State.SUCCEEDED),
}
CASES = [
    *((how, step, way, *how_it_ends) for how, step in WAITING.items() for way, how_it_ends in WAITING_ENDS.items()),
    *(("running", run_and_pause, way, *how_it_ends) for way, how_it_ends in RUNNING_ENDS.items()),
]


@pytest.mark.parametrize(
    ("pause_it", "end_it", "state"),
    [(step, last, state) for _, step, _, last, state in CASES],
    ids=[f"{how}, {way}" for how, _, way, *_ in CASES],
)
async def test_a_paused_job_ends_once_and_leaves_nothing(
    queue: Queue, make_submission: Make, pause_it: Step, end_it: Step, state: State
) -> None:
    redis, keys = queue.client.redis, queue.client.redis_keys
    await queue.inputs.put("default", IMAGE, 60)
    await redis.hset(keys.batch("default", "b"), mapping={"keep_until": now_ms() + 1, "accepted": 1, "status": "x"})
    before = await lasting_names(queue) | {"events", "webhook_outbox:default", "outbox_tenants", "reclaims"}
    footprint = await redis.hgetall(keys.footprint)
    fields = {"images": (IMAGE,), "webhook": HOOK, "batch_id": "b", "time_limit_ms": HOUR_MS}
    (job_id,) = await put(queue, make_submission(**fields))
    await pause_it(queue, job_id)
    await end_it(queue, job_id)
    assert await state_of(queue, job_id) is state
    assert await queue.maintenance.reconcile() == 0
    states = [fields["state"] for _, fields in await redis.xrange(keys.events) if fields["job"] == job_id]
    assert [one for one in states if State(one).terminal] == states[-1:] == [state]
    assert [fields["state"] for _, fields in await redis.xrange(keys.webhook_outbox("default"))] == [state]
    assert await redis.hget(keys.batch("default", "b"), "ended") == "1"
    assert await queue.api_keys.queued_jobs(["default"]) == {"default": 0}
    assert await queue.jobs.forget(job_id)
    await a_moment(5)
    await end_retention(queue, job_id)
    assert await lasting_names(queue) - before == set()
    assert await redis.hgetall(keys.footprint) == footprint
