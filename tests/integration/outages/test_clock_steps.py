"""The clock of Redis is set back by an hour: what was written before holds nothing up for that long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.queue import MODELS, claim_ids, put, redis_ms

from shared.queue import Queue, Submission, WorkerInfo

Make = Callable[..., Submission]
HOUR_MS = 3_600_000
TIMES = {"job": ("arrived", "started", "returned", "passed"), "arrivals": ("last", "done"), "reclaims": ("last", "gap")}
SORTED_BY_TIME = (
    "ready",
    "lanes",
    "leases",
    "deadlines",
    "active_batches",
    "batch_tenants",
    "workers",
    "model_holders",
)


async def set_back(queue: Queue) -> None:
    """Set the clock back, as far as the queue can see: all times that it has stored are an hour ahead."""
    redis, prefix = queue.client.redis, queue.client.redis_keys.prefix
    for name in [one async for one in redis.scan_iter(match=prefix.replace("{", "\\{") + "*", count=1000)]:
        kind = name.removeprefix(prefix).partition(":")[0]
        if kind in SORTED_BY_TIME:
            for member in await redis.zrange(name, 0, -1):
                await redis.zincrby(name, HOUR_MS, member)
        elif kind in TIMES:
            for field in TIMES[kind]:
                if (at := await redis.hget(name, field)) and float(at):
                    await redis.hset(name, field, f"{float(at) + HOUR_MS:.3f}".removesuffix(".000"))
        elif kind in ("request_rate", "woken_again"):
            await redis.set(name, float(await redis.get(name)) + HOUR_MS, px=60_000)
        elif kind == "lane":
            await _shift_lane(redis, name, prefix)


async def _shift_lane(redis: Any, name: str, prefix: str) -> None:
    """Store the entries of a lane with later ids."""
    entries = await redis.xrange(name)
    await redis.delete(name)
    for entry, fields in entries:
        at_ms, number = entry.split("-")
        later = await redis.xadd(name, fields, id=f"{int(at_ms) + HOUR_MS}-{number}")
        await redis.hset(f"{prefix}job:{fields['job']}", "entry", later)


async def test_queued_jobs_are_claimed(queue: Queue, make_submission: Make) -> None:
    """Those queued before, and those whose entries follow them in their lane."""
    ids = await put(queue, make_submission(window_ms=1000), make_submission(window_ms=1000))
    assert await queue.maintenance.reclaim() == []
    await set_back(queue)
    wait_ms = await queue.claims.next_ready_ms(MODELS)
    assert wait_ms is not None
    assert wait_ms > HOUR_MS / 2
    assert await queue.maintenance.reclaim() == []
    assert await queue.claims.next_ready_ms(MODELS) == 0
    ids += await put(queue, make_submission(window_ms=1000))
    assert await claim_ids(queue) == ids


async def test_the_jobs_of_a_dead_worker_are_reclaimed(
    queue_with: Callable[..., Queue], make_submission: Make, eventually: Callable[..., Any]
) -> None:
    """Not an hour later, but a lease later."""
    queue = queue_with(lease_ms=200)
    (job_id,) = await put(queue, make_submission())
    await claim_ids(queue)
    assert await queue.maintenance.reclaim() == []
    await set_back(queue)

    async def reclaimed() -> bool:
        return await queue.maintenance.reclaim() == [job_id]

    await eventually(reclaimed, "the job is queued again", 10)


async def test_requests_are_admitted(queue: Queue) -> None:
    """A tenant that had used up its limit has it again."""
    while (await queue.api_keys.admit("default", 5)).allowed:
        pass
    await set_back(queue)
    assert (await queue.api_keys.admit("default", 5)).allowed


async def test_a_dead_worker_is_forgotten(queue: Queue) -> None:
    """At the next heartbeat of another one."""
    for name in ("dead", "alive"):
        await queue.workers.heartbeat(WorkerInfo(id=name, models=MODELS), MODELS)
    await set_back(queue)
    await queue.workers.heartbeat(WorkerInfo(id="alive", models=MODELS), MODELS)
    assert [worker.id for worker in await queue.workers.all()] == ["alive"]


async def test_batches_are_advanced(queue: Queue) -> None:
    """An active batch is due again within a minute."""
    keys, redis = queue.client.redis_keys, queue.client.redis
    await redis.hset(keys.batch("default", "batch_1"), "status", "in_progress")
    await redis.zadd(keys.active_batches("default"), {"batch_1": await redis_ms(queue)})
    await redis.zadd(keys.batch_tenants, {"default": await redis_ms(queue)})
    await set_back(queue)
    assert await queue.batches.due(10, {}, 15_000) == [("default", "batch_1")]
    assert await queue.batches.due(10, {}, 15_000) == []
