"""Passes over the batches of several tenants: slow ones delay no others, and every step commits what it has done."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fuzz import batch_files as fuzz_batch_files
from harness.http_server import hosting, png
from integration.batches.batch_steps import create, error_lines, line, validated

from api.jobs import job_builder, request_images
from api.jobs.input_store import InputStore
from api.protocols.openai.batches import batch_files, batch_pass, batch_runner
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_pass import BatchPass
from api.protocols.openai.batches.batch_runner import BatchRunner
from shared.auth import TenantLimits
from shared.batch import BatchStatus
from shared.errors import StorageUnavailable
from shared.job import Job
from shared.queue.batches import Batches
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.runtime.clock import SyncedClock, now_ms
from shared.storage import Storage


@pytest.fixture
async def image_host() -> AsyncIterator[str]:
    """A server that sends an image at /fast, and nothing at any other path."""
    async with hosting() as url:
        yield url


async def test_a_step_commits_the_lines_that_it_had_time_for(
    context: BatchContext, image_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its URLs are fetched concurrently; a slow one fails only its line, with the reason, and the rest follows."""
    monkeypatch.setattr(batch_runner, "STEP_S", 0.2)
    settings = context.settings.model_copy(update={"fetch_timeout_s": 1.0})
    context = BatchContext(settings, context.catalog, context.queue, context.storage, context.clock)
    slow = [line(number, image=f"{image_host}/{'fast' if number == 3 else 'slow'}") for number in range(1, 26)]
    batch = await validated(context, "greedy", slow)
    assert await BatchRunner(context, batch).advance()
    batch = await context.queue.batches.get("greedy", batch.id)
    assert 1 <= batch.read < 25  # with time for it, the first eight lines
    errors = await error_lines(context, batch)
    assert [row["custom_id"] for row in errors] == [f"line-{at}" for at in range(1, batch.read + 1) if at != 3]
    assert {(row["error"]["code"], row["error"]["message"]) for row in errors} == {
        ("url_not_fetched", "image: no complete response within 1 s")
    }
    while batch.read < 25:
        assert await BatchRunner(context, batch).advance()
        batch = await context.queue.batches.get("greedy", batch.id)
    assert (batch.accepted, batch.failed) == (1, 24)


async def test_all_urls_of_a_line_have_one_deadline(
    context: BatchContext, image_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line with several slow images does not take the timeout of each."""
    monkeypatch.setattr(request_images, "URLS_S", 1.0)
    batch = await validated(context, "default", [line(1, image=f"{image_host}/a", mask=f"{image_host}/b")])
    assert await BatchRunner(context, batch).advance()
    (row,) = await error_lines(context, await context.queue.batches.get("default", batch.id))
    assert row["error"]["message"] == "image: the URLs of the request took too long together"


async def test_a_step_ends_although_a_line_hangs(context: BatchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines before it are committed, and the next step begins with it."""
    build_job, hangs = job_builder.build_job, True

    async def build(resolved: Job, *more: Any, **options: Any) -> Job:
        if hangs and resolved.prompt.endswith("number 3"):
            await asyncio.Event().wait()
        return await build_job(resolved, *more, **options)

    monkeypatch.setattr(batch_runner, "LINES_S", 1.0)
    monkeypatch.setattr(job_builder, "build_job", build)
    batch = await validated(context, "default", [line(number) for number in range(1, 26)])
    async with asyncio.timeout(30):
        assert await BatchRunner(context, batch).advance()
    batch = await context.queue.batches.get("default", batch.id)
    assert (batch.read, batch.accepted) == (2, 2)
    hangs = False
    assert await BatchRunner(context, batch).advance()
    assert (await context.queue.batches.get("default", batch.id)).accepted == 25


async def test_a_line_that_storage_cannot_store_is_not_refused(
    context: BatchContext, image_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines before it are committed; it is tried again in the next step."""
    put = type(context.storage).put
    failing = True

    async def fail_once_in_a_while(self: Storage, key: str, *args: Any) -> None:
        if failing and key.startswith("inputs/"):
            await asyncio.sleep(0.1)
            raise StorageUnavailable("no")
        await put(self, key, *args)

    batch = await validated(context, "default", [line(1), line(2, image=f"{image_host}/fast"), line(3)])
    monkeypatch.setattr(type(context.storage), "put", fail_once_in_a_while)
    assert await BatchRunner(context, batch).advance()
    batch = await context.queue.batches.get("default", batch.id)
    assert (batch.read, batch.accepted, batch.failed) == (1, 1, 0)
    with pytest.raises(StorageUnavailable):
        await BatchRunner(context, batch).advance()
    failing = False
    assert await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    batch = await context.queue.batches.get("default", batch.id)
    assert (batch.read, batch.accepted, batch.failed) == (3, 3, 0)


async def test_a_line_that_raises_an_unexpected_error_stops_no_other(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_job = job_builder.build_job

    async def build(resolved: Job, *args: Any, **options: Any) -> Job:
        if resolved.steps == 3:
            raise OverflowError("an odd line")
        return await build_job(resolved, *args, **options)

    monkeypatch.setattr(job_builder, "build_job", build)
    batch = await validated(context, "default", [line(1), line(2, steps=3), line(3)])
    assert await BatchRunner(context, batch).advance()
    batch = await context.queue.batches.get("default", batch.id)
    assert (batch.read, batch.accepted, batch.failed) == (3, 2, 1)
    (row,) = await error_lines(context, batch)
    assert (row["custom_id"], row["error"]["code"]) == ("line-2", "internal_error")


async def test_slow_batches_of_one_tenant_delay_no_others(
    context: BatchContext, image_host: str, eventually: Callable[..., Awaitable[None]]
) -> None:
    """Five batches with URLs that stall for 15 s; another tenant's batch of 600 lines is submitted meanwhile."""
    for _ in range(5):
        await create(context, "greedy", [line(number, image=f"{image_host}/slow") for number in range(25)])
    deliveries = BatchPass(context)
    running = asyncio.create_task(deliveries.run())

    async def two_submit() -> bool:
        page, _ = await context.queue.batches.page("greedy", None, 10)
        return sum(batch.status is BatchStatus.IN_PROGRESS for batch in page) == 5

    await eventually(two_submit, "all of them have been validated", 10)
    batch_id = await create(context, "other", [line(number) for number in range(600)])

    async def submitted() -> bool:
        return (await context.queue.batches.get("other", batch_id)).accepted == 600

    await eventually(submitted, "the other batch is submitted", 10)
    await cancel_and_wait((running, *deliveries._running))


async def test_lines_of_a_step_are_decoded_one_at_a_time(context: BatchContext) -> None:
    """A line of empty lists takes twenty times its size as objects: only its text is kept."""
    dense = {"metadata": [[]] * 900}
    batch = await validated(context, "default", [line(number, **dense) for number in range(200)])
    size = 200 * len(json.dumps(line(1, **dense)))
    tracemalloc.start()
    chunk = await batch_files.read_chunk(context, batch, 0, 0, 500)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(chunk) == 200
    assert kept < 2 * size
    assert peak < 4 * size
    assert await BatchRunner(context, batch).advance()
    assert {row["error"]["param"] for row in await error_lines(context, batch)} == {"metadata"}


@pytest.mark.parametrize(("quota", "more"), [("kept_jobs", 2), ("stored_bytes", 1)])
async def test_a_batch_waits_while_its_tenant_keeps_as_much_as_it_may(
    context: BatchContext, image_host: str, quota: str, more: int
) -> None:
    """Jobs and inputs of its lines are refused by a quota: no line fails, and the batch continues later."""
    lines = [line(1), line(2), line(3, image=f"{image_host}/fast")]
    batch = await validated(context, "default", lines)
    kept = getattr(await context.queue.api_keys.footprint("default"), quota)
    set_limits = context.queue.api_keys.set_limits
    await set_limits("default", TenantLimits(**{quota: kept + more}))

    async def step() -> tuple[int, int, int]:
        await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
        now = await context.queue.batches.get("default", batch.id)
        return now.read, now.accepted, now.failed

    assert [await step() for _ in range(2)] == [(2, 2, 0)] * 2
    await set_limits("default", TenantLimits())
    assert await step() == (3, 3, 0)


async def test_a_line_whose_input_is_deleted_while_it_is_submitted_is_refused(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same step as the other lines are submitted."""
    store = InputStore("default", context.queue, context.storage, context.settings)
    image, submit = await store.put(png()), context.queue.jobs.submit

    async def after_a_deletion(submissions: Any) -> Any:
        assert await context.queue.maintenance.forget_input("default", image.id) is not None
        return await submit(submissions)

    monkeypatch.setattr(context.queue.jobs, "submit", after_a_deletion)
    batch = await validated(context, "default", [line(1), line(2, image=image.id), line(3)])
    assert await BatchRunner(context, batch).advance()
    batch = await context.queue.batches.get("default", batch.id)
    assert (batch.read, batch.accepted, batch.failed) == (3, 2, 1)
    (row,) = await error_lines(context, batch)
    assert (row["custom_id"], row["error"]["param"]) == ("line-2", "image")


async def test_a_file_of_blank_lines_is_refused(context: BatchContext) -> None:
    """Blank lines are not counted as requests, but reading them takes time in each step."""
    batch_id = await create(context, "default", [line(1)], blank=200_000)
    assert not await BatchRunner(context, await context.queue.batches.get("default", batch_id)).advance()
    batch = await context.queue.batches.get("default", batch_id)
    assert (batch.status, [error.code for error in batch.errors]) == (BatchStatus.FAILED, ["too_many_lines"])


def test_hostile_files_end_with_a_result_for_each_line() -> None:
    """Short form of `make fuzz PARTS=batch_files`."""
    assert fuzz_batch_files.run(seed=7, seconds=5.0)["problems"] == []


async def test_tenants_take_turns(context: BatchContext) -> None:
    """A tenant with many due batches gets one at a time; one that holds as many places as are free gets none."""
    many = [await create(context, "greedy", [line(1)]) for _ in range(20)]
    due = context.queue.batches.due
    assert await due(4, {}, 15_000) == [("greedy", many[0])]
    await asyncio.sleep(0.005)
    await create(context, "other", [line(1)])
    await asyncio.sleep(0.005)
    claimed = [tenant for _ in range(3) for tenant, _ in await due(4, {}, 15_000)]
    assert claimed == ["greedy", "other", "greedy", "greedy"]
    assert await due(4, {"greedy": 2}, 15_000) == []
    for name in "abc":
        await create(context, name, [line(1)])
    assert sorted(tenant for tenant, _ in await due(4, {"greedy": 2}, 15_000)) == ["a", "b"]


async def test_a_batch_that_becomes_due_during_its_step_stays_due(context: BatchContext) -> None:
    """Its last job ended, or it was canceled: the step that decided to wait does not postpone it."""
    batch_id = await create(context, "default", [line(1)])
    batches = context.queue.batches
    assert await batches.due(4, {}, 15_000) == [("default", batch_id)]
    await batches.postpone("default", batch_id, 15_000)
    assert await batches.due(4, {}, 15_000) == []
    await batches.cancel("default", batch_id)
    await batches.postpone("default", batch_id, 15_000)
    assert await batches.due(4, {}, 15_000) == [("default", batch_id)]


async def test_batches_that_only_wait_for_their_jobs_are_seldom_looked_at(context: BatchContext) -> None:
    """The end of the last job makes a batch due; until then, one tenant's thousand batches cost little."""
    batch = await validated(context, "default", [line(1)])
    assert await BatchRunner(context, batch).advance()
    assert await context.queue.batches.due(4, {}, 15_000) == [("default", batch.id)]
    waiting = await context.queue.batches.get("default", batch.id)
    assert not await BatchRunner(context, waiting).advance()
    keys = context.queue.client.redis_keys
    due_ms = await context.queue.client.redis.zscore(keys.active_batches("default"), batch.id)
    assert due_ms - await context.queue.now_ms() > 8_000
    (job_id,) = (record.job.id for record in (await context.queue.jobs.page("default", batch_id=batch.id))[0])
    await context.queue.jobs.cancel(job_id)
    assert await context.queue.batches.due(4, {}, 15_000) == [("default", batch.id)]


async def test_each_step_reads_the_clock_of_redis(context: BatchContext) -> None:
    """The process lives for weeks: the clock of Redis can be corrected, or be another server's after a failover."""
    ahead = SyncedClock(now_ms() + 3_600_000)
    context = BatchContext(context.settings, context.catalog, context.queue, context.storage, ahead)
    batch_id = await create(context, "default", [line(1)])
    await BatchPass(context).run()
    assert (await context.queue.batches.get("default", batch_id)).status is BatchStatus.IN_PROGRESS


async def test_steps_follow_the_policies_that_apply(context: BatchContext) -> None:
    """A pass reads them before its first step: its own process may have another value."""
    await create(context, "default", [line(1)])
    client = context.queue.client
    await client.redis.hset(client.redis_keys.policies, "retention_s", "77")
    await BatchPass(context).run()
    assert client.policy("retention_s") == 77


async def test_a_batch_without_a_record_is_forgotten(context: BatchContext) -> None:
    """As after a failover that lost it."""
    batch_id = await create(context, "default", [line(1)])
    redis, keys = context.queue.client.redis, context.queue.client.redis_keys
    await redis.delete(keys.batch("default", batch_id))
    assert await context.queue.batches.due(4, {}, 15_000) == []
    assert not await redis.exists(keys.batch_tenants, keys.active_batches("default"))


async def test_a_pass_does_not_wait_for_its_slowest_step(
    context: BatchContext, image_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step continues, is claimed by no other process meanwhile, and its end is committed."""
    monkeypatch.setattr(batch_pass, "BUDGET_S", 0.5)
    monkeypatch.setattr(batch_pass, "STALE_MS", 600)
    monkeypatch.setattr(batch_pass, "_RENEW_S", 0.1)
    settings = context.settings.model_copy(update={"fetch_timeout_s": 2.0})
    context = BatchContext(settings, context.catalog, context.queue, context.storage, context.clock)
    batch = await validated(context, "default", [line(1, image=f"{image_host}/slow")])
    passes = BatchPass(context)
    assert await passes.run() == 1
    assert (await context.queue.batches.get("default", batch.id)).failed == 0
    assert await context.queue.batches.due(4, {}, 1000) == []
    await asyncio.sleep(0.3)
    assert await context.queue.batches.due(4, {}, 1000) == []
    await passes.drain()
    assert (await context.queue.batches.get("default", batch.id)).failed == 1


async def test_a_batch_is_renewed_no_more_after_its_step(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Awaitable[None]]
) -> None:
    """Even if the Redis client swallows a cancellation, as on Python 3.11: the batch was due no more."""
    swallowed = False

    async def postpone(*_: object) -> None:
        nonlocal swallowed
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if swallowed:
                raise
            swallowed = True

    monkeypatch.setattr(batch_pass, "_RENEW_S", 0)
    monkeypatch.setattr(batch_pass, "BUDGET_S", 0.1)
    monkeypatch.setattr(Batches, "postpone", postpone)
    await create(context, "default", [line(0)])
    others = asyncio.all_tasks()
    await BatchPass(context).run()
    assert swallowed
    await eventually(lambda: asyncio.all_tasks() <= others, "the step's tasks have ended", 5)
