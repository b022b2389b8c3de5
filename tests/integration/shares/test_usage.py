"""The usage of tenants: counted once for each run, by the script that ends it, and read by day, tenant and model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest
from harness.queue import claim, end, lose, miss_deadline, put

from shared.errors import InvalidRequest
from shared.job import State
from shared.job_record import Artifact, BatchingStats, Outcome, Progress
from shared.queue import Queue, Submission
from shared.queue.maintenance.tenant_usage import UsageQuery, UsageRow, UsageSum

Make = Callable[..., Submission]
QueueWith = Callable[..., Queue]

DAY_MS = 86_400_000


def an_output(index: int, size: int, **fields: Any) -> Artifact:
    key = f"jobs/x/1/{index}"
    return Artifact(index=index, key=key, content_type="image/png", bytes=size, width=64, height=64, seed=1, **fields)


FULL = Outcome(
    state=State.SUCCEEDED,
    artifacts=(an_output(0, 100), an_output(1, 11, kind="video"), an_output(2, 7, location="s3://theirs/x.png")),
    batching=BatchingStats(skipped_steps=3),
    progress=Progress(step=16, total=16),
    device_seconds=1.5,
)
USED = UsageSum(device_us=1_500_000, steps=13, skipped_steps=3)


async def rows_of(queue: Queue, **query: Any) -> list[UsageRow]:
    today = await queue.usage.today()
    rows, cursor = await queue.usage.page(UsageQuery(**{"first": today, "last": today, **query}), None, 1000)
    assert cursor is None
    return rows


async def total(queue: Queue) -> UsageSum:
    rows = await rows_of(queue, groups=frozenset())
    return rows[0].sum if rows else UsageSum()


async def run(queue: Queue, submission: Submission, outcome: Outcome = FULL) -> None:
    await put(queue, submission)
    (one,) = await queue.claims.claim("w1", [submission.job.model], 1)
    assert await queue.claims.settle("w1", one.job.id, one.epoch, outcome)


async def test_a_settled_job_counts_once_for_its_tenant_and_model(queue: Queue, make_submission: Make) -> None:
    """Whatever is settled again, or with an epoch that is not current."""
    await put(queue, make_submission(tenant="acme"))
    (one,) = await claim(queue, 1)
    for worker, epoch, token in (("w1", one.epoch - 1, "a"), ("w2", one.epoch, "a")):
        assert not await queue.claims.settle(worker, one.job.id, epoch, FULL, token=token)
    assert await total(queue) == UsageSum()
    for token in ("a", "a", "b"):
        assert await queue.claims.settle("w1", one.job.id, one.epoch, FULL, token=token) == (token == "a")
        assert await queue.claims.count_run(one.job, "a", FULL) is False
    expected = replace(USED, succeeded=1, images=2, videos=1, output_bytes=118)
    day = (await queue.usage.today()).isoformat()
    assert await rows_of(queue) == [UsageRow(day, "acme", "demo", expected)]


async def test_runs_without_success_count_too(queue: Queue, make_submission: Make) -> None:
    """Failed and canceled in mid-run by the script that settles, released and lost ones by their worker afterwards."""
    failed = replace_state(FULL, State.FAILED)
    await run(queue, make_submission(), failed)
    (canceled,) = await put(queue, make_submission())
    (one,) = await claim(queue, 1)
    await queue.jobs.cancel(canceled)
    assert await queue.claims.settle("w1", one.job.id, one.epoch, FULL)
    assert await total(queue) == UsageSum(failed=1, canceled=1, device_us=3_000_000, steps=26, skipped_steps=6)

    await put(queue, make_submission())
    (one,) = await claim(queue, 1)
    assert await queue.claims.release("w1", {one.job.id: one.epoch}) == 1
    assert await queue.claims.count_run(one.job, "released", FULL)
    (again,) = await claim(queue, 1, worker="w2")
    await lose(queue, again.job.id)
    await queue.maintenance.reclaim()
    assert await queue.claims.count_run(again.job, "lost", FULL)
    (last,) = await claim(queue, 1, worker="w3")
    assert await end(queue, last, worker="w3", device_seconds=0.25)
    used = UsageSum(1, 1, 1, device_us=6_250_000, steps=52, skipped_steps=12)
    assert await total(queue) == used, "their outputs are not the client's"


def replace_state(outcome: Outcome, state: State) -> Outcome:
    return outcome.model_copy(update={"state": state, "artifacts": ()})


async def test_jobs_that_end_without_a_run_count_as_ended(queue: Queue, make_submission: Make) -> None:
    """Canceled in the queue, or past their deadline."""
    canceled, late = await put(queue, make_submission(), make_submission(time_limit_ms=60_000))
    await queue.jobs.cancel(canceled)
    await miss_deadline(queue, late)
    assert await queue.maintenance.expire() == 1
    assert await total(queue) == UsageSum(canceled=1, expired=1)


async def test_usage_is_divided_and_filtered(queue: Queue, make_submission: Make) -> None:
    """By any of day, tenant and model; a tenant whose name begins with another's is not that tenant."""
    for tenant, model, seconds in (("a", "demo", 1), ("a", "other", 2), ("a-b", "demo", 4), ("ab", "demo", 8)):
        outcome = Outcome(state=State.SUCCEEDED, device_seconds=seconds)
        await run(queue, make_submission(tenant=tenant, model=model), outcome)
    day = (await queue.usage.today()).isoformat()

    async def seconds_by(*groups: str, **query: Any) -> dict[tuple[str | None, ...], float]:
        rows = await rows_of(queue, groups=frozenset(groups), **query)
        return {(row.day, row.tenant, row.model): row.sum.device_seconds for row in rows}

    assert await seconds_by("day") == {(day, None, None): 15}
    assert await seconds_by("tenant") == {(None, "a", None): 3, (None, "a-b", None): 4, (None, "ab", None): 8}
    assert await seconds_by("model") == {(None, None, "demo"): 13, (None, None, "other"): 2}
    assert await seconds_by() == {(None, None, None): 15}
    assert await seconds_by("model", tenant="a") == {(None, None, "demo"): 1, (None, None, "other"): 2}
    assert await seconds_by("tenant", model="other") == {(None, "a", None): 2}
    today = await queue.usage.today()
    sums = await queue.usage.of_tenants(today - timedelta(days=3), today, ["a", "ab", "none"])
    assert {tenant: one.device_seconds for tenant, one in sums.items()} == {"a": 3, "ab": 8, "none": 0}
    for first in (today - timedelta(days=5), today + timedelta(days=1)):
        assert await seconds_by("day", first=first, last=first) == {}


async def store(queue: Queue, day: date, *names: str) -> None:
    """Write rows of a day as the scripts do."""
    redis, keys, number = queue.client.redis, queue.client.redis_keys, str((day - date(1970, 1, 1)).days)
    await redis.hset(keys.usage(number), mapping=dict.fromkeys(names, "1,0,0,0,5,0,0,0,0,0"))
    await redis.zadd(keys.usage_rows(number), dict.fromkeys(names, 0))
    for key in (keys.usage(number), keys.usage_rows(number)):
        await redis.expire(key, 60)


@pytest.mark.parametrize("groups", ["day tenant model", "tenant model", "tenant", "day tenant", "day model", "day", ""])
async def test_pages_have_each_row_once_and_in_order(queue: Queue, groups: str) -> None:
    """Whatever the size of a page; names in which the separator's neighbours occur are in order too."""
    last = await queue.usage.today()
    names = [f"{tenant}|{model}" for tenant in ("a", "a-b", "ab", "a_b", "z9") for model in ("demo", "org/x", "X.y")]
    for back in (0, 1, 40):
        await store(queue, last - timedelta(days=back), *names)
    query = UsageQuery(last - timedelta(days=60), last, groups=frozenset(groups.split()))  # type: ignore[arg-type]
    whole, cursor = await queue.usage.page(query, None, 1000)
    assert cursor is None
    assert sum(row.sum.succeeded for row in whole) == 3 * len(names)
    keys = [(row.day, row.tenant, row.model) for row in whole]
    assert len(set(keys)) == len(keys)
    for limit in (1, 4):
        found: list[UsageRow] = []
        while True:
            rows, cursor = await queue.usage.page(query, cursor, limit)
            found += rows
            assert len(rows) <= limit
            if cursor is None:
                break
        assert found == whole


async def test_no_cursor_leads_to_the_rows_of_another_tenant(queue: Queue) -> None:
    """A cursor comes from the client."""
    today = await queue.usage.today()
    await store(queue, today, "alice|demo", "bob|demo", "carol|demo")
    query = UsageQuery(today, today, tenant="bob")
    for after in ("|a|", "|alice", "|alice|demo", "|", "|bob", "|["):
        rows, cursor = await queue.usage.page(query, f"{today}{after}", 10)
        assert ([row.tenant for row in rows], cursor) == (["bob"], None)
    assert await queue.usage.page(query, f"{today}|bob|demo", 10) == ([], None)
    with pytest.raises(InvalidRequest, match="not a cursor"):
        await queue.usage.page(query, "yesterday|bob", 10)


async def test_usage_expires_after_its_retention(queue_with: QueueWith, make_submission: Make) -> None:
    """Counted from the end of its day."""
    queue = queue_with(usage_retention_days=3)
    await run(queue, make_submission())
    now_ms = await queue.now_ms()
    day = now_ms // DAY_MS
    for key in (queue.client.redis_keys.usage(str(day)), queue.client.redis_keys.usage_rows(str(day))):
        assert await queue.client.redis.pttl(key) == pytest.approx((day + 4) * DAY_MS - now_ms, abs=5_000)


async def test_rows_of_a_day_are_bounded_and_no_usage_is_lost(queue: Queue, make_submission: Make) -> None:
    """Above 20,000 rows, those of further tenants and models are counted as one row."""
    today = await queue.usage.today()
    for start in range(0, 20_000, 1_000):
        await store(queue, today, *[f"t{number}|demo" for number in range(start, start + 1_000)])
    for tenant in ("late", "later", "t5"):
        await run(queue, make_submission(tenant=tenant), Outcome(state=State.SUCCEEDED, device_seconds=1))
    size = await queue.client.redis.hlen(queue.client.redis_keys.usage(str((today - date(1970, 1, 1)).days)))
    assert size == 20_001
    (others,) = await rows_of(queue, tenant="*")
    assert (others.model, others.sum.succeeded, others.sum.device_seconds) == ("*", 2, 2)
    (known,) = await rows_of(queue, tenant="t5")
    assert known.sum.succeeded == 2
    sums = await total(queue)
    assert (sums.succeeded, sums.device_us) == (20_003, 3_000_000 + 5 * 20_000)


async def test_concurrent_ends_are_all_counted(queue: Queue, make_submission: Make) -> None:
    await put(queue, *[make_submission() for _ in range(40)])
    claims = [one for _ in range(5) for one in await claim(queue, 40)]
    assert len(claims) == 40
    await asyncio.gather(*(end(queue, one, device_seconds=0.001) for one in claims))
    sums = await total(queue)
    assert (sums.succeeded, sums.device_us) == (40, 40_000)
