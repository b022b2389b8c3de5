"""How batches end: whatever happens meanwhile, no job of theirs runs on, and each of them ends."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import Any

import pytest
from integration.batches.batch_steps import create, error_lines, line, validated

from api.jobs import job_builder
from api.protocols.openai.batch_routes import batch_object
from api.protocols.openai.batches import batch_failures, batch_files, batch_lines
from api.protocols.openai.batches.batch_failures import LASTING_TRIES, record_failure
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_lines import BatchLine
from api.protocols.openai.batches.batch_runner import BatchRunner
from api.protocols.openai.batches.batch_steps import GRACE_MS, line_job_id
from shared.batch import Batch, BatchStatus, file_prefix
from shared.errors import NotFound
from shared.job import Job, State
from shared.job_fields import OnDeadline
from shared.job_record import JobRecord
from shared.queue.batches import BatchUpdate
from shared.runtime.clock import SyncedClock, now_ms


async def current(context: BatchContext, batch: Batch) -> Batch:
    return await context.queue.batches.get(batch.tenant, batch.id)


async def advance(context: BatchContext, batch: Batch) -> Batch:
    """Run one step, and return the batch after it."""
    batch = await current(context, batch)
    try:
        await BatchRunner(context, batch).advance()
    except NotFound as error:
        await record_failure(context, batch, error)
    return await current(context, batch)


async def ended(context: BatchContext, batch: Batch) -> Batch:
    """Run steps until the batch ends; it takes fewer than ten."""
    for _ in range(10):
        batch = await advance(context, batch)
        if batch.status.terminal:
            return batch
    raise AssertionError(f"the batch has not ended: {batch}")


async def jobs_of(context: BatchContext, batch: Batch) -> list[State]:
    ids = [line_job_id(batch, ordinal) for ordinal in range(1, batch.total + 1)]
    return [record.state for record in await context.queue.jobs.get_many(ids) if record is not None]


async def test_no_job_is_left_of_a_batch_that_is_canceled_while_its_lines_are_submitted(
    context: BatchContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cancellation passes lines that become jobs later; the end of these jobs does not change the counts."""
    build_job, building, goes_on = job_builder.build_job, asyncio.Event(), asyncio.Event()

    async def build(*args: Any, **options: Any) -> Job:
        building.set()
        await goes_on.wait()
        return await build_job(*args, **options)

    monkeypatch.setattr(job_builder, "build_job", build)
    batch = await validated(context, "default", [line(number) for number in range(1, 6)])
    step = asyncio.create_task(BatchRunner(context, batch).advance())
    await building.wait()
    await context.queue.batches.cancel(batch.tenant, batch.id)
    batch = await ended(context, batch)
    assert batch.status is BatchStatus.CANCELLED
    goes_on.set()
    await step
    assert await jobs_of(context, batch) == [State.CANCELED] * 5
    assert await current(context, batch) == batch


async def test_a_batch_whose_input_file_is_lost_fails_with_the_reason(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of the bucket has deleted it, for example: the batch does not try for ever."""
    monkeypatch.setattr(batch_failures, "TRIES", 1)
    batch = await validated(context, "default", [line(1), line(2)])
    batch = await advance(context, batch)
    for ordinal in (1, 2):
        await context.queue.jobs.cancel(line_job_id(batch, ordinal))
    await context.storage.delete_prefix(file_prefix(batch.tenant, batch.input_file_id))
    batch = await ended(context, batch)
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors] == ["input_file_lost"]
    assert (batch.completed, batch.failed) == (0, 2)
    await context.queue.files.forget(batch.tenant, batch.input_file_id)  # no batch reads it any more


async def test_a_file_that_is_missing_for_a_while_ends_no_batch(context: BatchContext) -> None:
    """A folder that is mounted late, for example: its batches continue where they were."""
    batch = await validated(context, "default", [line(1), line(2)])
    folder = context.settings.storage_dir
    away = folder.rename(folder.with_name("not mounted"))
    for _ in range(LASTING_TRIES):
        batch = await advance(context, batch)
    assert (batch.status, batch.errors) == (BatchStatus.IN_PROGRESS, ())
    shutil.rmtree(folder)
    away.rename(folder)
    batch = await advance(context, batch)
    assert (batch.read, batch.step_failures) == (2, 0)
    for ordinal in (1, 2):
        await context.queue.jobs.cancel(line_job_id(batch, ordinal))
    batch = await advance(context, batch)
    assert batch.status is BatchStatus.FINALIZING
    away = folder.rename(folder.with_name("not mounted"))
    batch = await advance(context, batch)
    assert (batch.status, batch.errors) == (BatchStatus.FINALIZING, ())
    shutil.rmtree(folder)
    away.rename(folder)
    assert (await ended(context, batch)).status is BatchStatus.COMPLETED


async def test_a_failed_batch_names_the_files_that_it_has_written(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here for one line of two, before its input file was lost; one that is refused at once has none."""
    monkeypatch.setattr(batch_files, "CHUNK_LINES", 1)
    monkeypatch.setattr(batch_failures, "TRIES", 1)
    batch = await validated(context, "default", [line(1), line(2)])
    batch = await advance(context, batch)
    for ordinal in (1, 2):
        await context.queue.jobs.cancel(line_job_id(batch, ordinal))
    while batch.written < 1:
        batch = await advance(context, batch)
    await context.storage.delete_prefix(file_prefix(batch.tenant, batch.input_file_id))
    batch = await ended(context, batch)
    shown = batch_object(batch)
    assert (shown["status"], shown["output_file_id"], shown["error_file_id"]) == ("failed", None, batch.error_file_id)
    assert [row["custom_id"] for row in await error_lines(context, batch)] == ["line-1"]
    await context.queue.files.get(batch.tenant, batch.error_file_id)

    batch_id = await create(context, "default", [{"custom_id": "a"}])
    shown = batch_object(await ended(context, await context.queue.batches.get("default", batch_id)))
    assert (shown["status"], shown["output_file_id"], shown["error_file_id"]) == ("failed", None, None)


async def test_a_line_without_a_result_does_not_keep_its_batch_from_its_end(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault at one line is the line's error."""
    failed_line = batch_lines.failed_line

    def fail(batch: Batch, one: BatchLine, record: JobRecord) -> bytes:
        if one.ordinal == 2:
            raise OverflowError("an odd record")
        return failed_line(batch, one, record)

    monkeypatch.setattr(batch_lines, "failed_line", fail)
    batch = await validated(context, "default", [line(number) for number in (1, 2, 3)])
    batch = await advance(context, batch)
    for ordinal in (1, 2, 3):
        await context.queue.jobs.cancel(line_job_id(batch, ordinal))
    batch = await ended(context, batch)
    assert batch.status is BatchStatus.COMPLETED
    codes = {row["custom_id"]: row["error"]["code"] for row in await error_lines(context, batch)}
    assert codes == {"line-1": "job_canceled", "line-2": "internal_error", "line-3": "job_canceled"}


async def test_a_batch_ends_although_each_read_of_its_file_takes_all_of_a_step(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes at least one line."""
    monkeypatch.setattr(batch_files, "STEP_S", -1.0)
    batch = await validated(context, "default", [line(number) for number in (1, 2, 3)])
    batch = await advance(context, batch)
    for ordinal in (1, 2, 3):
        await context.queue.jobs.cancel(line_job_id(batch, ordinal))
    assert (await ended(context, batch)).written == 3


async def test_a_cancellation_ends_all_jobs_of_a_batch_that_is_given_up(context: BatchContext) -> None:
    """Before it, the batch has canceled those of lines that it has not read."""
    batch = await validated(context, "default", [line(number) for number in (1, 2, 3)])
    batch = await advance(context, batch)
    given_up = BatchUpdate({"errors": json.dumps([batch_files.INPUT_LOST.model_dump()]), "read": 2})
    assert await context.queue.batches.commit(batch, given_up, 0)
    batch = await advance(context, batch)
    assert await jobs_of(context, batch) == [State.QUEUED, State.QUEUED, State.CANCELED]
    await context.queue.batches.cancel(batch.tenant, batch.id)
    assert (await ended(context, batch)).status is BatchStatus.CANCELLED
    assert await jobs_of(context, batch) == [State.CANCELED] * 3


@pytest.mark.parametrize("deadline_s", [1, 100_000])
async def test_jobs_that_may_run_late_end_with_their_batch(context: BatchContext, deadline_s: int) -> None:
    """Late is after their own deadline, not after the window of the batch."""
    batch = await validated(context, "default", [line(1, deadline_s=deadline_s, on_deadline="run")])
    batch = await advance(context, batch)
    record = await context.queue.jobs.get(line_job_id(batch, 1))
    assert record is not None
    assert record.job.on_deadline is (OnDeadline.RUN if deadline_s == 1 else OnDeadline.EXPIRE)
    later = SyncedClock(now_ms() + 600_000 + GRACE_MS + 1000)
    context = BatchContext(context.settings, context.catalog, context.queue, context.storage, later)
    batch = await ended(context, batch)
    assert batch.status is BatchStatus.EXPIRED
    assert await jobs_of(context, batch) == [State.CANCELED]


@pytest.mark.parametrize("way", ["canceled", "expired"])
async def test_paused_jobs_end_with_their_batch(context: BatchContext, way: str) -> None:
    batch = await validated(context, "default", [line(1), line(2)])
    batch = await advance(context, batch)
    await context.queue.jobs.pause(line_job_id(batch, 1))
    if way == "canceled":
        await context.queue.batches.cancel(batch.tenant, batch.id)
    else:
        later = SyncedClock(now_ms() + 600_000 + GRACE_MS + 1000)
        context = BatchContext(context.settings, context.catalog, context.queue, context.storage, later)
    batch = await ended(context, batch)
    assert batch.status is (BatchStatus.CANCELLED if way == "canceled" else BatchStatus.EXPIRED)
    assert await jobs_of(context, batch) == [State.CANCELED] * 2
    assert await context.queue.api_keys.queued_jobs([batch.tenant]) == {batch.tenant: 0}
