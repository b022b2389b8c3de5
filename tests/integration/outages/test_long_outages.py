"""An outage of Redis longer than a lease: living workers keep their jobs, a dead worker loses its jobs soon after."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from harness.queue import MODELS, claim, end, lose, put
from harness.stub_engine import StubFleet

from shared.config.settings import Settings
from shared.job import Job, State
from shared.job_record import JobRecord, Outcome
from shared.queue import Queue, Submission

Eventually = Callable[..., Awaitable[None]]
Make = Callable[..., Submission]
LEASE_MS = 1500
JOBS = 48  # of each worker
DEAD_JOBS = 2


async def records(queue: Queue, jobs: list[Job]) -> list[JobRecord]:
    found = [record for record in await queue.jobs.get_many([job.id for job in jobs]) if record is not None]
    assert len(found) == len(jobs)
    return found


@pytest.mark.parametrize("outage", ["frozen", "killed"])
async def test_living_workers_keep_their_jobs_over_an_outage_of_two_leases(
    durable_server: Any,
    settings_for: Callable[..., Settings],
    make_job: Callable[..., Job],
    tmp_path: Path,
    eventually: Eventually,
    outage: str,
) -> None:
    """All are renewed, report progress, upload and settle; those of a worker that died are queued again."""
    queue = Queue.connect(settings_for(durable_server.url, lease_ms=LEASE_MS))
    fleet = StubFleet(queue, tmp_path)
    fleet.max_batch = JOBS
    jobs = [make_job(model="demo") for _ in range(2 * JOBS)]
    other = Queue.connect(queue.client.settings)
    async with fleet.worker("demo") as (first, engine), fleet.worker("demo", queue=other) as (second, other_engine):
        await fleet.submit(*jobs)
        await eventually(lambda: first.slots_in_use == second.slots_in_use == JOBS, "both workers are full")
        dead = [make_job(model="other") for _ in range(DEAD_JOBS)]
        await fleet.submit(*dead)
        assert len(await queue.claims.claim("dead", ["other"], DEAD_JOBS)) == DEAD_JOBS

        reclaims = queue.client.redis_keys.reclaims

        async def expired_leases_are_sought() -> bool:
            return bool(await queue.client.redis.exists(reclaims))

        await eventually(expired_leases_are_sought, "the workers look for expired leases")
        durable_server.pause() if outage == "frozen" else durable_server.kill()
        for at, key in enumerate([*engine.requests, *other_engine.requests]):
            (engine if key in engine.requests else other_engine).step(key, 1 + at % 4, 8)
        for key in [*engine.requests][:4]:
            engine.finish(key)  # uploaded and settled during the outage
        await asyncio.sleep(2 * LEASE_MS / 1000)
        durable_server.resume() if outage == "frozen" else durable_server.start()

        async def dead_jobs_are_queued() -> bool:
            return all(one.state is State.QUEUED for one in await records(queue, dead))

        await eventually(dead_jobs_are_queued, "the dead worker's jobs are queued again")
        for one in (engine, other_engine):
            for key in [*one.requests]:
                one.finish(key)

        async def all_ended() -> bool:
            return all(one.state.terminal for one in await records(queue, jobs))

        await eventually(all_ended, "all jobs ended")
    ended = await records(queue, jobs)
    assert [(one.state, one.attempts) for one in ended] == [(State.SUCCEEDED, 1)] * len(jobs)
    assert all(one.progress.step for one in ended), "progress of the outage was sent again"
    await queue.close()
    await other.close()


async def test_an_expired_lease_that_was_not_reclaimed_is_renewed_and_settled(
    queue: Queue, make_submission: Make
) -> None:
    """The end of a lease changes nothing: the claim is the worker's until another has the job."""
    one, two = await put(queue, make_submission(), make_submission())
    claims = {row.job.id: row for row in await claim(queue)}
    await lose(queue, one, two)
    assert not (await queue.claims.renew("w1", {one: claims[one].epoch})).lost
    assert await queue.claims.settle("w1", two, claims[two].epoch, Outcome(state=State.SUCCEEDED))
    assert await queue.maintenance.reclaim() == []
    assert await end(queue, claims[one])
    assert await queue.claims.next_ready_ms(MODELS) is None


async def test_an_outage_within_a_reclaim_gives_holders_time_to_renew(
    queue: Queue, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ends between the read of a reclaim and its script, which runs after the outage."""
    (kept,) = await put(queue, make_submission())
    await claim(queue)
    redis, settings = queue.client.redis, queue.client.settings
    assert await queue.maintenance.reclaim() == []
    reclaim = queue.client.scripts.reclaim

    async def after_an_outage(limit: int, decided: int, before: int, *gaps: int) -> list[str]:
        await redis.hincrby(queue.client.redis_keys.reclaims, "last", -settings.lease_ms)
        await lose(queue, kept)
        return await reclaim(limit, decided - settings.lease_ms, before, *gaps)

    with monkeypatch.context() as patched:
        patched.setattr(queue.client.scripts, "reclaim", after_an_outage)
        assert await queue.maintenance.reclaim() == []
    assert await queue.maintenance.reclaim() == []


async def test_a_gap_between_reclaims_gives_holders_time_to_renew(queue: Queue, make_submission: Make) -> None:
    """Whatever caused it: the reclaim that ends the gap takes nothing, and those after the grace do."""
    kept, left = await put(queue, make_submission(), make_submission())
    claims = {row.job.id: row for row in await claim(queue)}
    redis, reclaims = queue.client.redis, queue.client.redis_keys.reclaims
    assert await queue.maintenance.reclaim() == []
    await lose(queue, kept, left)
    await redis.hincrby(reclaims, "last", -queue.client.settings.lease_ms)
    for _ in range(2):
        assert await queue.maintenance.reclaim() == []
    assert not (await queue.claims.renew("w1", {kept: claims[kept].epoch})).lost
    await redis.hincrby(reclaims, "gap", -queue.client.settings.lease_ms)  # as if the grace had passed
    assert await queue.maintenance.reclaim() == [left]


async def test_chores_alone_reclaim_short_leases(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """The time between two calls of theirs is longer than half a lease; no worker calls."""
    queue = queue_with(lease_ms=10_000)
    (left,) = await put(queue, make_submission())
    await claim(queue)
    assert await queue.maintenance.reclaim() == []
    await lose(queue, left)
    reclaimed = []
    for _ in range(3):
        await queue.client.redis.hincrby(queue.client.redis_keys.reclaims, "last", -10_000)
        reclaimed.append(await queue.maintenance.reclaim())
    assert reclaimed == [[], [], [left]]


async def test_holders_get_time_to_renew_after_the_second_of_two_outages(queue: Queue, make_submission: Make) -> None:
    """Redis is back for a moment, in which no holder renews, and away for longer than a grace."""
    (kept,) = await put(queue, make_submission())
    (claimed,) = await claim(queue)
    redis, reclaims, lease_ms = queue.client.redis, queue.client.redis_keys.reclaims, queue.client.settings.lease_ms
    assert await queue.maintenance.reclaim() == []
    await lose(queue, kept)
    for _ in ("first", "second"):
        await redis.hincrby(reclaims, "last", -2 * lease_ms)
        await redis.hincrby(reclaims, "gap", -2 * lease_ms)
        assert await queue.maintenance.reclaim() == []
    assert not (await queue.claims.renew("w1", {kept: claimed.epoch})).lost
