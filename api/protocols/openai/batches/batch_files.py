"""Files of a batch: reads the input in chunks, writes results to the output and error files."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from api.protocols.openai import stored_files
from api.protocols.openai.batches import batch_lines
from api.protocols.openai.batches.batch_lines import BatchLine
from api.protocols.openai.batches.batch_steps import GRACE_MS, line_job_id
from api.protocols.openai.stored_files import FileLine
from shared.auth import Signer
from shared.batch import CHUNK_LINES, Batch, BatchError, BatchStatus, File, Part, file_prefix
from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.errors import NotFound, StorageUnavailable, Unavailable
from shared.job import State
from shared.job_record import JobRecord
from shared.queue import Queue
from shared.queue.batches import BatchUpdate
from shared.runtime.clock import SyncedClock
from shared.storage import Storage

log = structlog.get_logger()

WAIT_MS = 2_000
ENDS_MS = 10_000
"""Time until a batch that waits for its last jobs is looked at again: the end of the last one makes it due."""

STEP_S = 8.0
"""A step processes no further line after this time."""

GROUP_LINES = 25
"""Lines with results that are written between checks of the limits of a step."""

TRIES = 20
"""Equal failures without progress, over 18 minutes, after which a batch is given up, or its line fails."""

NEXT_LINE_FAILURES = TRIES - 3
"""Failures that count for the lines after one that has failed so often: not each of them takes 18 minutes."""

_CHUNK_BYTES = 16 * 1024 * 1024

INPUT_LOST = BatchError(
    code="input_file_lost", message="the input file is no longer in storage; upload it again for a new batch"
)

LineAt = tuple[BatchLine, int]
"""A line and the input file's offset after it."""


@dataclass(frozen=True)
class BatchContext:
    """Services for the work on batches; `clock` continues the time of Redis, which made the times of batches."""

    settings: Settings
    catalog: Catalog
    queue: Queue
    storage: Storage
    clock: SyncedClock


async def input_lines(context: BatchContext, batch: Batch, offset: int) -> AsyncGenerator[FileLine]:
    """Yield the lines of a batch's input file from `offset`."""
    parts = await context.queue.files.parts(batch.tenant, batch.input_file_id)
    chunks = stored_files.content(context.storage, batch.tenant, batch.input_file_id, parts, offset)
    async with (
        aclosing(chunks),
        aclosing(stored_files.read_lines(chunks, offset, context.settings.max_body_bytes)) as lines,
    ):
        async for line in lines:
            yield line


async def read_chunk(context: BatchContext, batch: Batch, offset: int, before: int, max_lines: int) -> list[LineAt]:
    """Return up to `max_lines` non-blank lines from `offset`, bounded in bytes; `before` lines precede them."""
    chunk: list[LineAt] = []
    size = 0
    async with aclosing(input_lines(context, batch, offset)) as lines:
        async for line in lines:
            if line.raw:
                chunk.append((batch_lines.parse_line(before + len(chunk) + 1, line.raw), line.end))
                size += len(line.raw)
            if len(chunk) >= max_lines or size > _CHUNK_BYTES:
                break
    return chunk


async def usable(storage: Storage) -> bool:
    """Return whether the storage can be used: then it is not an outage that fails a step or a line."""
    try:
        await storage.check()
    except StorageUnavailable:
        return False
    return True


async def fails_line(context: BatchContext, batch: Batch, error: Unavailable) -> bool:
    """Return whether a line fails whose image the storage cannot read or store: if it refuses it for good, or the step
    has failed so often that its batch would be given up. Of one that is given up, it fails at once."""
    if not isinstance(error, StorageUnavailable):
        return False
    if not error.retryable:
        return True
    last = batch.step_failures >= TRIES - 1 and batch.step_failure == error.public
    return (last or bool(batch.errors)) and await usable(context.storage)


async def store_part(context: BatchContext, batch: Batch, file_id: str, lines: list[bytes]) -> list[tuple[str, Part]]:
    """Store lines as the next part of a file; the part counts once it is committed."""
    if not lines:
        return []
    data = b"".join(lines)
    part = Part(f"{batch.rev:06d}-{secrets.token_hex(4)}.jsonl", len(data))
    await context.storage.put(file_prefix(batch.tenant, file_id) + part.name, data, stored_files.CONTENT_TYPE)
    return [(file_id, part)]


class BatchWriter:
    """Writes the results of the next lines; publishes the files after the last line."""

    def __init__(self, context: BatchContext, batch: Batch) -> None:
        self._context = context
        self._queue = context.queue
        self._batch = batch
        self._until_s = time.monotonic() + STEP_S
        self._results: list[bytes] = []
        self._errors: list[bytes] = []
        self._lines = 0
        self._size = 0
        self._waiting = False
        self._last_try = False
        self._offset = batch.written_offset
        self._signer: Signer | None = None

    async def write(self) -> bool:
        """Write one chunk, and return whether another one can follow at once."""
        batch, context = self._batch, self._context
        if batch.written >= batch.last_line:
            return await self.finish()
        max_lines = min(CHUNK_LINES, batch.last_line - batch.written)
        chunk = await read_chunk(context, batch, batch.written_offset, batch.written, max_lines)
        if not chunk:
            return await self.finish(INPUT_LOST)
        for first in range(0, len(chunk), GROUP_LINES):
            await self._write_group(chunk[first : first + GROUP_LINES])
            if self._waiting or self._full():
                break
        parts = await store_part(context, batch, batch.output_file_id, self._results)
        parts += await store_part(context, batch, batch.error_file_id, self._errors)
        counts = {"written": self._lines, "succeeded": len(self._results)}
        again_ms = WAIT_MS if self._waiting else 0
        failures = {"step_failures": NEXT_LINE_FAILURES} if self._last_try else {}
        update = BatchUpdate({"written_offset": self._offset, **failures}, counts, parts=parts)
        return await self._queue.batches.commit(batch, update, again_ms) and not self._waiting

    async def _write_group(self, group: Sequence[LineAt]) -> None:
        """Write lines until one whose job has not ended, or until the chunk is full."""
        batch = self._batch
        accepted = await self._queue.batches.accepted_lines(batch, group[0][0].ordinal, len(group))
        records = await self._queue.jobs.get_many([line_job_id(batch, line.ordinal) for line, _ in group])
        grace_over = self._context.clock.now_ms() >= batch.expires_at_ms + GRACE_MS
        for (line, end), is_job, record in zip(group, accepted, records, strict=True):
            self._waiting = is_job and record is not None and not record.state.terminal and not grace_over
            if self._waiting or (self._lines and self._full()):  # at least one line: a slow read can take all of a step
                return
            try:
                await self._write_line(line, is_job, record)
            except Unavailable as error:
                if not await fails_line(self._context, batch, error):
                    raise
                self._last_try = self._last_try or error.retryable
                self._add_error(line, error.code, f"an image of this line cannot be read: {error.public}")
            except Exception:  # one line must not keep its batch from its end
                log.exception("batch_result_failed", batch_id=batch.id, line=line.ordinal)
                path = f"/v1/jobs/{line_job_id(batch, line.ordinal)}"
                self._add_error(
                    line, "internal_error", f"the result of this line could not be written; read it at {path}"
                )
            self._lines += 1
            self._size += len(self._results[-1]) if self._results else 0
            self._offset = end

    def _full(self) -> bool:
        return self._size > _CHUNK_BYTES or time.monotonic() > self._until_s

    async def _write_line(self, line: BatchLine, is_job: bool, record: JobRecord | None) -> None:
        batch = self._batch
        if line.ordinal > batch.read and batch.status is BatchStatus.CANCELLING:
            self._add_error(line, "batch_cancelled", "the batch was canceled before this line was submitted")
        elif line.ordinal > batch.read:
            self._add_error(line, "batch_expired", "the batch expired before this line was submitted")
        elif not is_job:
            return  # rejected when it was submitted: already in the error file
        elif record is None:
            self._add_error(line, "job_deleted", "the job was deleted before the batch ended")
        elif not record.state.terminal:
            await self._queue.jobs.cancel(record.job.id)
            self._add_error(line, "batch_expired", "the job did not end before the batch expired")
        elif record.state is not State.SUCCEEDED:
            self._errors.append(batch_lines.failed_line(batch, line, record))
        else:
            try:
                sign = await self._sign()
                self._results.append(await batch_lines.result_line(batch, line, record, self._context.storage, sign))
            except NotFound:
                self._add_error(line, "job_deleted", "the job's images were deleted")

    async def _sign(self) -> batch_lines.Sign:
        """Return the function that signs the URLs of the batch's images, until the images expire."""
        if not self._batch.signs_urls:
            return lambda record, index: ""
        if self._signer is None:
            self._signer = Signer(await self._queue.api_keys.url_secret(), self._context.settings.presign_expires_s)
        signer, kept_ms = self._signer, self._queue.client.policy("retention_s") * 1000
        now = self._context.clock.now_ms()
        return lambda record, index: signer.query_until(
            record.job.id, index, (record.expires_at_ms or now + kept_ms) // 1000
        )

    def _add_error(self, line: BatchLine, code: str, message: str) -> None:
        self._errors.append(batch_lines.error_line(self._batch, line, code, message))

    async def finish(self, error: BatchError | None = None) -> bool:
        """Publish the files and end the batch; with an `error`, they lack lines."""
        batch, now = self._batch, self._context.clock.now_ms()
        if batch.has_output:
            await self._publish(batch.output_file_id, "output", now)
        lacks_errors = batch.has_errors and not await self._publish(batch.error_file_id, "error", now)
        final = BatchStatus.CANCELLED if batch.status is BatchStatus.CANCELLING else batch.final_status
        fields: dict[str, str | int] = {"completed": batch.succeeded, "failed": batch.total - batch.succeeded}
        if lacks_errors:
            fields["lacks_error_file"] = 1
        errors = batch.errors if error is None or error in batch.errors else (*batch.errors, error)
        if error is not None or (errors and final is not BatchStatus.CANCELLED):
            final = BatchStatus.FAILED
            fields["errors"] = json.dumps([one.model_dump() for one in errors])
        update = BatchUpdate({"status": final.value, f"{final.value}_at": now, **fields})
        await self._queue.batches.commit(batch, update, None)
        return False

    async def _publish(self, file_id: str, kind: str, now: int) -> bool:
        """Publish a file, and return whether there is one: it has parts."""
        batch = self._batch
        parts = await self._queue.files.parts(batch.tenant, file_id)
        if not parts:
            return False
        file = File(
            id=file_id,
            tenant=batch.tenant,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
            bytes=sum(part.bytes for part in parts),
            created_at_ms=now,
            expires_at_ms=now + (batch.output_expires_after_s or self._context.settings.file_retention_s) * 1000,
        )
        await self._queue.files.put(file)
        return True
