"""Helpers of the queue tests."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.job import Outcome, State
from shared.queue import Claim, Queue, Submission

MODELS = ("demo",)


async def put(queue: Queue, *submissions: Submission) -> list[str]:
    """Submit jobs, all of which must be accepted, and return their ids."""
    outcomes = await queue.jobs.submit(submissions)
    ids = [getattr(outcome, "job_id", None) for outcome in outcomes]
    assert None not in ids, outcomes
    return [str(job_id) for job_id in ids]


async def claim(queue: Queue, slots: int = 8, worker: str = "w1", **options: Any) -> list[Claim]:
    return await queue.claims.claim(worker, MODELS, slots, **options)


async def claim_ids(queue: Queue, slots: int = 8, worker: str = "w1", **options: Any) -> list[str]:
    return [one.job.id for one in await claim(queue, slots, worker, **options)]


async def end(
    queue: Queue, one: Claim, worker: str = "w1", state: State = State.SUCCEEDED, gpu_seconds: float = 0.0
) -> bool:
    return await queue.claims.settle(worker, one.job.id, one.epoch, Outcome(state=state, gpu_seconds=gpu_seconds))


async def lose(queue: Queue, *job_ids: str) -> None:
    """Expire the leases of running jobs."""
    for job_id in job_ids:
        assert await queue.client.redis.zadd(queue.client.redis_keys.leases, {job_id: 1}, xx=True, ch=True) == 1


async def state_of(queue: Queue, job_id: str) -> State:
    record = await queue.jobs.get(job_id)
    assert record is not None
    return record.state


async def names_left(queue: Queue) -> set[str]:
    """Return the names of the namespace's keys, without the prefix."""
    prefix = queue.client.redis_keys.prefix
    pattern = prefix.replace("{", "\\{").replace("}", "\\}") + "*"
    return {name.removeprefix(prefix) async for name in queue.client.redis.scan_iter(match=pattern, count=1000)}


async def redis_ms(queue: Queue) -> float:
    """Return the time of Redis."""
    seconds, microseconds = await queue.client.redis.time()
    return 1000 * int(seconds) + int(microseconds) / 1000


async def a_moment(milliseconds: float) -> None:
    await asyncio.sleep(milliseconds / 1000)
