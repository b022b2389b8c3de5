"""A replica without the last second is promoted: claims that it lacks are given out again, with the same epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from harness.stub_engine import StubFleet

from shared.job import Job, State
from shared.queue import Queue

Eventually = Callable[..., Awaitable[None]]


async def snapshot(queue: Queue) -> dict[bytes, bytes]:
    """Return all keys of the namespace, as a replica has them."""
    redis = queue.client.redis
    names = [name async for name in redis.scan_iter(f"{queue.client.redis_keys.prefix}*")]
    return {name: await redis.dump(name) for name in names}


async def promote(queue: Queue, keys: dict[bytes, bytes]) -> None:
    redis = queue.client.redis
    async with redis.pipeline(transaction=True) as pipe:
        for name in [name async for name in redis.scan_iter(f"{queue.client.redis_keys.prefix}*")]:
            pipe.delete(name)
        for name, value in keys.items():
            pipe.restore(name, 0, value)
        await pipe.execute()


@pytest.mark.parametrize("first", ["renewal", "claim"])
async def test_a_job_that_is_claimed_again_by_its_worker_ends_with_its_image(
    queue: Queue,
    tmp_path: Path,
    make_job: Callable[..., Job],
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
) -> None:
    """Whether the worker claims it before its renewal finds the first claim lost, or after that."""
    fleet, job, renewals, renew = StubFleet(queue, tmp_path), make_job(), asyncio.Event(), queue.claims.renew

    async def renew_later(*args: Any) -> Any:
        await renewals.wait()
        return await renew(*args)

    async def state() -> State | None:
        record = await queue.jobs.get(job.id)
        return None if record is None else record.state

    async def runs() -> bool:
        return await state() is State.RUNNING

    await fleet.submit(job)
    replica = await snapshot(queue)
    if first == "claim":
        monkeypatch.setattr(queue.claims, "renew", renew_later)
    async with fleet.worker("demo") as (worker, engine):
        await eventually(lambda: bool(engine.requests), "the job runs")
        await promote(queue, replica)
        await eventually(runs, "the job is claimed again")
        renewals.set()
        async with asyncio.timeout(30):
            while await state() in (State.QUEUED, State.RUNNING):
                for claim_key in tuple(engine.requests):
                    engine.finish(claim_key)
                await asyncio.sleep(0.02)
        await eventually(lambda: not worker._tasks, "no run of the job is left")
    record = await queue.jobs.get(job.id)
    assert record is not None
    assert (record.state, len(record.artifacts)) == (State.SUCCEEDED, 1)
    await fleet.close()
