"""Helpers of the queue tests."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.job import State
from shared.job_record import Outcome
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
    queue: Queue, one: Claim, worker: str = "w1", state: State = State.SUCCEEDED, device_seconds: float = 0.0
) -> bool:
    return await queue.claims.settle(worker, one.job.id, one.epoch, Outcome(state=state, device_seconds=device_seconds))


async def lose(queue: Queue, *job_ids: str) -> None:
    """Expire the leases of running jobs."""
    for job_id in job_ids:
        assert await queue.client.redis.zadd(queue.client.redis_keys.leases, {job_id: 1}, xx=True, ch=True) == 1


async def miss_deadline(queue: Queue, *job_ids: str) -> None:
    """Let the deadlines of queued jobs pass."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    for job_id in job_ids:
        await redis.hset(keys.job(job_id), mapping={"deadline": 1, "start_by": 1})
        assert await redis.zadd(keys.deadlines, {job_id: 1}, xx=True, ch=True) == 1


async def come_due(queue: Queue, *job_ids: str) -> None:
    """Let jobs for later be due now."""
    redis, keys, now = queue.client.redis, queue.client.redis_keys, int(await redis_ms(queue))
    for job_id in job_ids:
        await redis.hset(keys.job(job_id), "wait_until", str(now))
        if not await redis.hexists(keys.job(job_id), "parents"):
            await redis.zadd(keys.later, {job_id: now}, xx=True)


async def end_retention(queue: Queue, *job_ids: str) -> None:
    """Let the retention of jobs that have ended pass, and delete them as the chores do."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    rows = [row for row in await redis.zrange(keys.retention, 0, -1) if row.split("|")[2] in job_ids]
    if rows:
        await redis.zadd(keys.retention, dict.fromkeys(rows, 1), xx=True)
    while items := await queue.maintenance.expired_items():
        for item in items:
            await queue.maintenance.forget_item(item)


async def retention_of(queue: Queue, start: str) -> float:
    """Return when the row of the retention that begins with `start` is due."""
    rows = await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1, withscores=True)
    (due_ms,) = [due_ms for row, due_ms in rows if row.startswith(start)]
    return float(due_ms)


async def state_of(queue: Queue, job_id: str) -> State:
    record = await queue.jobs.get(job_id)
    assert record is not None
    return record.state


async def names_left(queue: Queue) -> set[str]:
    """Return the names of the namespace's keys, without the prefix."""
    prefix = queue.client.redis_keys.prefix
    pattern = "".join(f"\\{char}" if char in "*?[]{}\\" else char for char in prefix) + "*"
    return {name.removeprefix(prefix) async for name in queue.client.redis.scan_iter(match=pattern, count=1000)}


async def lasting_names(queue: Queue) -> set[str]:
    """Return the names of the namespace's keys without a TTL, without the prefix."""
    names = sorted(await names_left(queue))
    async with queue.client.redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.pttl(queue.client.redis_keys.prefix + name)
        ttls = await pipe.execute()
    return {name for name, ttl in zip(names, ttls, strict=True) if ttl == -1}


async def check_keys(queue: Queue) -> None:
    """Fail on a key without a TTL that `shared/queue/redis_keys.py` does not allow; then delete the namespace."""
    keys, lasting = queue.client.redis_keys, await lasting_names(queue)
    alive = {name for name in lasting if await _alive(queue, name)}
    unfinished = any(name.startswith("job:") for name in alive)
    faults = {name for name in lasting - alive if not keys.bounded(keys.prefix + name, unfinished_jobs=unfinished)}
    names = [keys.prefix + name for name in await names_left(queue)]
    if names:
        await queue.client.redis.delete(*names)
    assert not faults, f"keys without a TTL{' while jobs are unfinished' if unfinished else ''}: {faults}"


async def _alive(queue: Queue, name: str) -> bool:
    """Return whether the key belongs to a job that has not ended, to an input of one, or to its source."""
    kind, _, job_id = name.partition(":")
    redis, keys = queue.client.redis, queue.client.redis_keys
    if kind == "job":
        jobs = [job_id, *await redis.zrange(keys.dependents(job_id), 0, -1)]
        states = [await redis.hget(keys.job(one), "state") for one in jobs]
        return not {"queued", "running"}.isdisjoint(states)
    return kind == "input" and int(await redis.hget(keys.prefix + name, "live") or 0) > 0


async def redis_ms(queue: Queue) -> float:
    """Return the time of Redis."""
    seconds, microseconds = await queue.client.redis.time()
    return 1000 * int(seconds) + int(microseconds) / 1000


async def a_moment(milliseconds: float) -> None:
    await asyncio.sleep(milliseconds / 1000)
