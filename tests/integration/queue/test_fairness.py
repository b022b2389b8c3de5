"""Tenants share a batch; the least served one is first."""

from __future__ import annotations

from collections.abc import Callable

from harness.queue import claim, end, put

from shared.queue import Queue, Submission

Make = Callable[..., Submission]


async def served(queue: Queue, slots: int) -> list[str]:
    """Return the tenants of one claim, in order."""
    return [one.job.tenant for one in await claim(queue, slots)]


async def charge(queue: Queue, make_submission: Make, tenant: str, gpu_seconds: float) -> None:
    """Let a tenant have used the GPU for that long, just now."""
    await put(queue, make_submission(tenant=tenant))
    for one in await claim(queue):
        assert await end(queue, one, gpu_seconds=gpu_seconds)


async def test_a_flood_does_not_drown_a_single_job(queue: Queue, make_submission: Make) -> None:
    """One job of another tenant is in the next batch, however many came before it."""
    await put(queue, *[make_submission(tenant="flood") for _ in range(100)])
    await put(queue, make_submission(tenant="single"))
    assert sorted(await served(queue, 4)) == ["flood", "flood", "flood", "single"]


async def test_the_least_served_leads(queue: Queue, make_submission: Make) -> None:
    """GPU-seconds count, not jobs and not arrival."""
    await charge(queue, make_submission, "a", 30.0)
    await charge(queue, make_submission, "b", 10.0)
    for tenant in "abc":
        await put(queue, *[make_submission(tenant=tenant) for _ in range(3)])
    assert await served(queue, 1) == ["c"]
    assert await served(queue, 5) == ["c", "b", "a", "c", "b"]  # slots are shared, the rest goes to who leads


async def test_charges_add_up(queue: Queue, make_submission: Make) -> None:
    """Many small jobs weigh as much as a large one."""
    for _ in range(6):
        await charge(queue, make_submission, "many", 5.0)
    await charge(queue, make_submission, "one", 20.0)
    await put(queue, make_submission(tenant="many"), make_submission(tenant="one"))
    assert await served(queue, 2) == ["one", "many"]
    scores = await queue.client.redis.zmscore(queue.client.redis_keys.gpu_usage, ["many", "one"])
    assert abs((scores[0] - scores[1]) - 0.585) < 0.05  # log2(30 / 20)


async def test_what_was_used_long_ago_is_forgotten(queue: Queue, make_submission: Make) -> None:
    """Service decays: rows that weigh nothing any more are pruned at the next charge."""
    await charge(queue, make_submission, "old", 1000.0)
    await queue.client.redis.zincrby(
        queue.client.redis_keys.gpu_usage, -60, "old"
    )  # as if sixty half-lives had gone by
    await charge(queue, make_submission, "new", 1.0)
    assert await queue.client.redis.zscore(queue.client.redis_keys.gpu_usage, "old") is None


async def test_what_costs_nothing_is_not_charged(queue: Queue, make_submission: Make) -> None:
    """A job that failed before it reached the GPU leaves its tenant's standing as it was."""
    await charge(queue, make_submission, "free", 0.0)
    assert await queue.client.redis.exists(queue.client.redis_keys.gpu_usage) == 0


async def test_many_tenants_are_all_served(queue: Queue, make_submission: Make) -> None:
    """More tenants than a claim looks at: those that wait longest are looked at first, and none is left out."""
    await put(queue, *[make_submission(tenant=f"t{at}") for at in range(150)])
    seen: list[str] = []
    while batch := await served(queue, 32):
        seen += batch
    assert sorted(seen) == sorted(f"t{at}" for at in range(150))
