"""Batches whose steps fail: an outage changes nothing; what fails again and again ends its batch with the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from harness.queue import claim, end
from integration.batches.batch_steps import create, error_lines, line, validated

from api.jobs import job_builder
from api.protocols.openai import stored_files
from api.protocols.openai.batch_routes import batch_object
from api.protocols.openai.batches import batch_failures, batch_files, batch_lines, batch_runner
from api.protocols.openai.batches.batch_failures import LASTING_TRIES
from api.protocols.openai.batches.batch_files import NEXT_LINE_FAILURES, TRIES, BatchContext
from api.protocols.openai.batches.batch_pass import BatchPass
from api.protocols.openai.batches.batch_runner import BatchRunner
from api.protocols.openai.batches.batch_steps import line_job_id
from shared.batch import Batch, BatchStatus, file_prefix
from shared.errors import NotFound, StorageRefused, StorageUnavailable
from shared.job import Job, State
from shared.queue.jobs import Jobs
from shared.storage import Storage
from shared.storage.folder import FolderStorage

BAD_RANGE = StorageUnavailable("bucket 'private': the checksum is another", public="storage: returned a damaged object")
REFUSED = StorageRefused("bucket 'private' refused it", public="storage: refuses the request with 413")


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_failures, "_FIRST_RETRY_MS", 0)


async def passed(context: BatchContext, batch: Batch) -> Batch:
    """Run steps until none is due, and return the batch."""
    with structlog.testing.capture_logs():  # rendering the tracebacks takes a second each
        while await BatchPass(context).run():
            pass
    return await context.queue.batches.get(batch.tenant, batch.id)


async def end_jobs(context: BatchContext, batch: Batch) -> None:
    """All jobs of a batch succeed."""
    while claims := await claim(context.queue):
        for one in claims:
            assert await end(context.queue, one)


async def output_ids(context: BatchContext, batch: Batch) -> list[str]:
    parts = await context.queue.files.parts(batch.tenant, batch.output_file_id)
    chunks = stored_files.content(context.storage, batch.tenant, batch.output_file_id, parts)
    rows = b"".join([chunk async for chunk in chunks]).splitlines()
    return [row.partition(b'"custom_id":"')[2].partition(b'"')[0].decode() for row in rows]


def fail_ranges(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[int]:
    """Let reads of input files beyond their start fail; returns where they began."""
    stream, starts = FolderStorage.stream, []

    async def failing(storage: FolderStorage, key: str, start: int = 0, end: int | None = None) -> AsyncIterator[bytes]:
        if start and "/file_" in key:
            starts.append(start)
            raise error
        async for chunk in stream(storage, key, start, end):
            yield chunk

    monkeypatch.setattr(FolderStorage, "stream", failing)
    return starts


@pytest.mark.parametrize(
    ("error", "tries", "code"),
    [
        (BAD_RANGE, TRIES, "storage_unavailable"),
        (REFUSED, LASTING_TRIES, "storage_unavailable"),
        (NotFound("no such object in storage"), TRIES, "input_file_lost"),
        (OverflowError("odd"), TRIES, "internal_error"),
    ],
)
async def test_a_batch_whose_lines_cannot_be_read_ends_with_those_that_could(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch, error: Exception, tries: int, code: str
) -> None:
    """Their jobs end, their results are kept, and the reason says nothing of the service's insides."""
    monkeypatch.setattr(batch_runner, "CHUNK_LINES", 2)
    starts = fail_ranges(monkeypatch, error)
    batch = await validated(context, "default", [line(number) for number in range(1, 6)])
    batch = await passed(context, batch)
    assert (batch.status, batch.read, batch.accepted) == (BatchStatus.IN_PROGRESS, 2, 2)
    assert ([one.code for one in batch.errors], len(starts)) == ([code], tries)
    assert "private" not in batch.errors[0].message
    await end_jobs(context, batch)
    batch = await passed(context, batch)
    assert batch.status is BatchStatus.FAILED
    assert (batch.completed, batch.failed, len(starts)) == (2, 3, tries)
    assert await output_ids(context, batch) == ["line-1", "line-2"]
    await context.queue.files.forget(batch.tenant, batch.input_file_id)  # no batch reads it any more


async def test_results_that_cannot_be_written_end_their_batch_with_those_that_were(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output file can be refused for good; it lacks these lines then."""
    monkeypatch.setattr(batch_files, "CHUNK_LINES", 2)
    batch = await passed(context, await validated(context, "default", [line(number) for number in range(1, 4)]))
    await end_jobs(context, batch)
    put, puts = FolderStorage.put, []

    async def failing(storage: FolderStorage, key: str, data: bytes, content_type: str) -> None:
        puts.append(key)
        if len(puts) > 1:
            raise REFUSED
        await put(storage, key, data, content_type)

    monkeypatch.setattr(FolderStorage, "put", failing)
    batch = await passed(context, batch)
    assert (batch.status, batch.written, len(puts)) == (BatchStatus.FAILED, 2, 1 + 2 * LASTING_TRIES)
    assert [one.message for one in batch.errors] == [REFUSED.public]
    assert await output_ids(context, batch) == ["line-1", "line-2"]


@pytest.mark.parametrize("error", [REFUSED, BAD_RANGE])
async def test_an_image_that_cannot_be_read_fails_its_line_only(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch, error: StorageUnavailable
) -> None:
    """At once if the storage refuses it, else after as many tries as a batch has; the next such line takes fewer."""
    result_line, tries = batch_lines.result_line, {2: 0, 3: 0}
    monkeypatch.setattr(batch_files, "CHUNK_LINES", 1)

    async def failing(batch: Batch, one: Any, *more: Any) -> bytes:
        if one.ordinal in tries:
            tries[one.ordinal] += 1
            raise error
        return await result_line(batch, one, *more)

    monkeypatch.setattr(batch_lines, "result_line", failing)
    batch = await passed(context, await validated(context, "default", [line(number) for number in range(1, 5)]))
    await end_jobs(context, batch)
    batch = await passed(context, batch)
    assert (batch.status, batch.errors) == (BatchStatus.COMPLETED, ())
    assert tries == ({2: TRIES, 3: TRIES - NEXT_LINE_FAILURES} if error.retryable else {2: 1, 3: 1})
    assert await output_ids(context, batch) == ["line-1", "line-4"]
    rows = await error_lines(context, batch)
    assert [row["custom_id"] for row in rows] == ["line-2", "line-3"]
    assert rows[0]["error"]["message"] == f"an image of this line cannot be read: {error.public}"


@pytest.mark.parametrize(("error", "most"), [(REFUSED, 1), (BAD_RANGE, TRIES + 1)])
async def test_an_input_that_storage_refuses_fails_its_line_only(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch, error: StorageUnavailable, most: int
) -> None:
    """At once if it refuses it for good, else after as many tries as a batch has, and one with the line before."""
    build_job, tries = job_builder.build_job, 0

    async def build(resolved: Job, *more: Any, **options: Any) -> Job:
        nonlocal tries
        if resolved.prompt.endswith("number 2"):
            tries += 1
            raise error
        return await build_job(resolved, *more, **options)

    monkeypatch.setattr(job_builder, "build_job", build)
    batch = await passed(context, await validated(context, "default", [line(number) for number in range(1, 4)]))
    assert (batch.read, batch.accepted, batch.failed, batch.errors) == (3, 2, 1, ())
    (row,) = await error_lines(context, batch)
    assert (row["custom_id"], row["error"]["message"], tries) == ("line-2", error.public, most)


async def test_a_step_that_cannot_be_committed_leaves_no_jobs(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines were submitted, and its part of the error file is refused: the jobs of the lines are canceled, also if
    the process that gives the batch up is killed meanwhile. An error file without lines is not published."""
    put, cancel, kills = FolderStorage.put, Jobs.cancel, [RuntimeError("killed")]

    async def failing(storage: FolderStorage, key: str, *more: Any) -> None:
        if key.startswith("files/"):
            raise REFUSED
        await put(storage, key, *more)

    batch = await validated(context, "default", [line(1), line(2, steps=-1), line(3)])

    async def killed_once(jobs: Jobs, job_id: str) -> Any:
        if kills:
            raise kills.pop()
        return await cancel(jobs, job_id)

    monkeypatch.setattr(FolderStorage, "put", failing)
    monkeypatch.setattr(Jobs, "cancel", killed_once)
    batch = await passed(context, batch)
    assert (batch.status, batch.read, kills) == (BatchStatus.FAILED, 0, [])
    assert batch_object(batch)["error_file_id"] is None
    with pytest.raises(NotFound):
        await context.queue.files.get(batch.tenant, batch.error_file_id)
    records = await context.queue.jobs.get_many([line_job_id(batch, ordinal) for ordinal in (1, 3)])
    assert [record.state for record in records if record is not None] == [State.CANCELED] * 2


async def test_a_file_that_cannot_be_read_at_all_ends_its_batch(
    context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a batch reads it."""
    batch_id = await create(context, "default", [line(1)])
    batch = await context.queue.batches.get("default", batch_id)
    await context.storage.delete_prefix(file_prefix("default", batch.input_file_id))
    batch = await passed(context, batch)
    assert (batch.status, [one.code for one in batch.errors]) == (BatchStatus.FAILED, ["input_file_lost"])


async def test_an_outage_of_the_storage_ends_no_batch(context: BatchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it lasts: its failures are not counted. Later ones are counted from one after any progress."""
    monkeypatch.setattr(batch_runner, "CHUNK_LINES", 2)
    batch = await validated(context, "default", [line(number) for number in range(1, 6)])
    await BatchRunner(context, batch).advance()
    starts = fail_ranges(monkeypatch, BAD_RANGE)

    async def fails(storage: Storage, *, writes: bool = True) -> None:
        raise StorageUnavailable("down")

    async def current() -> Batch:
        return await context.queue.batches.get("default", batch.id)

    with monkeypatch.context() as down:
        down.setattr(FolderStorage, "check", fails)
        for _ in range(TRIES + 1):
            await batch_failures.record_failure(context, await current(), BAD_RANGE)
        assert (await current()).step_failures == 0
    for error in (BAD_RANGE, BAD_RANGE, REFUSED):
        await batch_failures.record_failure(context, await current(), error)
    assert (await current()).step_failures == 1, "another failure is counted from one"
    monkeypatch.undo()
    assert starts == []
    await BatchRunner(context, await current()).advance()
    assert (await current()).step_failures == 0
