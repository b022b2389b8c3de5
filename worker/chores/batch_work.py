"""The work on batches, in pieces: each goes on from what the one before committed, and counts whole or not at all."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from shared import job_builder
from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import FusequeueError, InvalidRequest, NotFound, QueueFull
from shared.job import JobRecord, Priority
from shared.jsonl import FileLine, read_lines
from shared.protocols.openai import batch_lines, files
from shared.protocols.openai.batch_lines import BatchLine, LineChecker
from shared.protocols.openai.batches import (
    AHEAD,
    GRACE_MS,
    MAX_LINES,
    PIECE_LINES,
    Batch,
    BatchError,
    BatchStatus,
    BatchStep,
    job_id,
    next_step,
)
from shared.protocols.openai.files import File, Part
from shared.queue import BatchUpdate, Queue, Submission
from shared.runtime.clock import now_ms
from shared.storage import Storage

LOOK_MS = 15_000
"""A batch is looked at again after this: long enough for a piece, and how late one is noticed that was killed."""

WAIT_MS = 2_000
PIECE_BYTES = 16 * 1024 * 1024
PIECE_S = 8.0
_AT_ONCE = 25
_PICTURES_AT_ONCE = 8


@dataclass(frozen=True)
class Desk:
    """What the work needs."""

    settings: Settings
    catalog: Catalog
    queue: Queue
    storage: Storage


class Work:
    """One piece of work on one batch."""

    def __init__(self, desk: Desk, batch: Batch) -> None:
        self._desk = desk
        self._queue = desk.queue
        self._batch = batch
        self._until_s = time.monotonic() + PIECE_S

    async def do(self) -> bool:
        """Do what is next, and return whether more can be done at once."""
        step = next_step(self._batch, now_ms())
        if step is BatchStep.VALIDATE:
            return await self._validate()
        if step is BatchStep.TAKE_UP:
            return await self._take_up()
        if step is BatchStep.STOP_JOBS:
            return await self._stop_jobs()
        if step is BatchStep.CLOSE:
            return await self._close()
        if step is BatchStep.WRITE:
            return await Writing(self._desk, self._batch).do()
        if step is BatchStep.WAIT:
            await self._queue.batches.postpone(self._batch, WAIT_MS)
        return False

    async def _validate(self) -> bool:
        batch, checker = self._batch, LineChecker(self._batch.endpoint)
        async with aclosing(read(self._desk, batch, 0)) as found:
            async for line in found:
                if line.blank:
                    continue
                checker.take(line.number, line.raw)
                if checker.total > MAX_LINES:
                    break
        errors = list(checker.errors)
        if checker.total > MAX_LINES:
            errors = [BatchError(code="too_many_lines", message=f"a batch has at most {MAX_LINES} lines")]
        elif not checker.total:
            errors = [BatchError(code="empty_file", message="the file has no lines")]
        if errors:
            told = json.dumps([error.model_dump() for error in errors])
            return await self._end(BatchStatus.FAILED, {"errors": told})
        life_ms = batch.expires_at_ms + GRACE_MS - now_ms() + self._desk.settings.file_retention_s * 1000
        for file_id in (batch.output_file_id, batch.error_file_id):
            await self._queue.files.begin(batch.tenant, file_id, life_ms)
        begun = {"in_progress_at": now_ms(), "total": checker.total}
        return await self._queue.batches.commit(
            batch, BatchUpdate({"status": BatchStatus.IN_PROGRESS.value, **begun}), LOOK_MS
        )

    async def _end(self, status: BatchStatus, told: dict[str, str | int] | None = None) -> bool:
        piece = BatchUpdate({**(told or {}), "status": status.value, f"{status.value}_at": now_ms()})
        await self._queue.batches.commit(self._batch, piece, None)
        return False

    async def _take_up(self) -> bool:
        """Put the next lines in line; those that cannot be go to the error file."""
        batch = self._batch
        found = await read_piece(self._desk, batch, batch.read_at, batch.read, min(PIECE_LINES, AHEAD - batch.open))
        known = await self._queue.batches.known_jobs([job_id(batch, line.ordinal) for line, _ in found])
        checked: list[Submission | FusequeueError | None] = []
        for first in range(0, len(found), _AT_ONCE):
            if checked and time.monotonic() > self._until_s:
                break
            some = slice(first, first + _AT_ONCE)
            checked += await self._check(list(zip(found[some], known[some], strict=True)))
        new = [item for item in checked if isinstance(item, Submission)]
        refused = await self._submit(new)
        taken, bad, end = [], [], batch.read_at
        for (line, line_end), item in zip(found, checked, strict=False):
            if isinstance(item, Submission) and item.job.id in refused:
                break
            end = line_end
            if isinstance(item, FusequeueError):
                bad.append(batch_lines.failed_line(batch, line, item))
            else:
                taken.append(line.ordinal)
        done: dict[str, str | int] = {"read_at": end}
        parts = await store(self._desk, batch, batch.error_file_id, bad)
        if bad:
            done["has_errors"] = 1
        counts = {"read": len(taken) + len(bad), "accepted": len(taken), "failed": len(bad)}
        again_ms = min(LOOK_MS, *(1000 * full.retry_after_s for full in refused.values())) if refused else LOOK_MS
        return (
            await self._queue.batches.commit(batch, BatchUpdate(done, counts, taken, parts), again_ms) and not refused
        )

    async def _check(
        self, some: Sequence[tuple[tuple[BatchLine, int], bool]]
    ) -> list[Submission | FusequeueError | None]:
        """Return for each line its job, or what is wrong with it, or None where it is a job already."""
        pictures = asyncio.Semaphore(_PICTURES_AT_ONCE)

        async def check(line: BatchLine, known: bool) -> Submission | FusequeueError | None:
            if known:
                return None
            async with pictures:
                try:
                    return await self._submission(line)
                except InvalidRequest as error:
                    return error

        return await asyncio.gather(*(check(line, known) for (line, _), known in some))

    async def _submission(self, line: BatchLine) -> Submission:
        desk, batch = self._desk, self._batch
        request = batch_lines.line_request(batch.endpoint, line.body, desk.catalog)
        job_builder.checked(request, desk)
        own = {"priority": Priority.BULK, "batch_id": batch.id}
        job = await job_builder.resolved(request.model_copy(update=own), batch.tenant, desk)
        times = {
            "created_at_ms": batch.created_at_ms,
            "deadline_at_ms": min(job.deadline_at_ms or batch.expires_at_ms, batch.expires_at_ms),
        }
        return job_builder.submission_of(
            job.model_copy(update={"id": job_id(batch, line.ordinal), **times}), desk.catalog
        )

    async def _submit(self, new: Sequence[Submission]) -> dict[str, QueueFull]:
        """Put jobs in line, and return those for which there is no room."""
        if not new:
            return {}
        outcomes = await self._queue.jobs.submit(new)
        refused = {}
        for item, outcome in zip(new, outcomes, strict=True):
            if isinstance(outcome, QueueFull):
                refused[item.job.id] = outcome
            elif isinstance(outcome, FusequeueError):
                raise outcome
        return refused

    async def _stop_jobs(self) -> bool:
        """Cancel the jobs of the next lines; one that has ended stays as it is."""
        batch = self._batch
        count = min(PIECE_LINES, batch.reach - batch.stopped)
        taken = await self._queue.batches.taken(batch, batch.stopped + 1, count)
        for ordinal, is_job in enumerate(taken, batch.stopped + 1):
            if is_job or ordinal > batch.read:
                await self._queue.jobs.cancel(job_id(batch, ordinal))
        return await self._queue.batches.commit(batch, BatchUpdate({"stopped": batch.stopped + count}), LOOK_MS)

    async def _close(self) -> bool:
        """Begin to write the results."""
        batch, now = self._batch, now_ms()
        if not batch.total:
            return await self._end(BatchStatus.EXPIRED)
        ends_as = BatchStatus.EXPIRED if now >= batch.expires_at_ms else BatchStatus.COMPLETED
        told: dict[str, str | int] = {
            "status": BatchStatus.FINALIZING.value,
            "finalizing_at": now,
            "ends_as": ends_as.value,
        }
        return await self._queue.batches.commit(batch, BatchUpdate(told), LOOK_MS)


class Writing:
    """Writes the results of the next lines, and at the end makes the files known."""

    def __init__(self, desk: Desk, batch: Batch) -> None:
        self._desk = desk
        self._queue = desk.queue
        self._batch = batch
        self._until_s = time.monotonic() + PIECE_S
        self._good: list[bytes] = []
        self._bad: list[bytes] = []
        self._lines = 0
        self._size = 0
        self._waits = False
        self._end = batch.written_at

    async def do(self) -> bool:
        """Write one piece, and return whether there is more to write at once."""
        batch = self._batch
        if batch.written >= batch.total or not batch.total:
            return await self._finish()
        found = await read_piece(self._desk, batch, batch.written_at, batch.written, PIECE_LINES)
        for first in range(0, len(found), _AT_ONCE):
            await self._write(found[first : first + _AT_ONCE])
            if self._waits or self._full():
                break
        parts = await store(self._desk, batch, batch.output_file_id, self._good)
        parts += await store(self._desk, batch, batch.error_file_id, self._bad)
        done: dict[str, str | int] = {"written_at": self._end}
        if self._good:
            done["has_output"] = 1
        if self._bad:
            done["has_errors"] = 1
        counts = {"written": self._lines, "succeeded": len(self._good)}
        piece = BatchUpdate(done, counts, parts=parts)
        again_ms = WAIT_MS if self._waits else LOOK_MS
        return await self._queue.batches.commit(batch, piece, again_ms) and not self._waits

    async def _write(self, found: Sequence[tuple[BatchLine, int]]) -> None:
        """Write some lines, up to one whose job has still not ended, or until the piece is full."""
        batch = self._batch
        first = found[0][0].ordinal
        taken = await self._queue.batches.taken(batch, first, len(found))
        records = await self._queue.jobs.get_many([job_id(batch, line.ordinal) for line, _ in found])
        for (line, end), is_job, record in zip(found, taken, records, strict=True):
            self._waits = is_job and record is not None and not record.state.terminal and not self._late()
            if self._waits or self._full():
                return
            await self._write_line(line, is_job, record)
            self._lines += 1
            self._size += len(self._good[-1]) if self._good else 0
            self._end = end

    def _full(self) -> bool:
        return self._size > PIECE_BYTES or time.monotonic() > self._until_s

    def _late(self) -> bool:
        return now_ms() >= self._batch.expires_at_ms + GRACE_MS

    async def _write_line(self, line: BatchLine, is_job: bool, record: JobRecord | None) -> None:
        batch = self._batch
        if line.ordinal > batch.read:
            word = "canceled" if batch.status is BatchStatus.CANCELLING else "over"
            code = "batch_cancelled" if batch.status is BatchStatus.CANCELLING else "batch_expired"
            self._bad.append(
                batch_lines.error_line(batch, line, code, f"the batch was {word} before this line's turn came")
            )
        elif not is_job:
            return  # it is in the error file since it was taken up
        elif record is None:
            self._bad.append(
                batch_lines.error_line(batch, line, "job_deleted", "its job was deleted before the batch ended")
            )
        elif not record.state.terminal:
            self._bad.append(batch_lines.error_line(batch, line, "batch_expired", "its job did not end in time"))
        elif record.state is not record.state.SUCCEEDED:
            self._bad.append(batch_lines.ended_badly(batch, line, record))
        else:
            try:
                self._good.append(await batch_lines.result_line(batch, line, record, self._desk.storage))
            except NotFound:
                self._bad.append(batch_lines.error_line(batch, line, "job_deleted", "its pictures were deleted"))

    async def _finish(self) -> bool:
        batch, now = self._batch, now_ms()
        await self._make_known(batch.output_file_id, batch.has_output, "output", now)
        await self._make_known(batch.error_file_id, batch.has_errors, "error", now)
        ends_as = BatchStatus.CANCELLED if batch.status is BatchStatus.CANCELLING else batch.ends_as
        counts = {"completed": batch.succeeded, "failed": batch.total - batch.succeeded}
        piece = BatchUpdate({"status": ends_as.value, f"{ends_as.value}_at": now, **counts})
        await self._queue.batches.commit(batch, piece, None)
        return False

    async def _make_known(self, file_id: str, there_is_one: bool, word: str, now: int) -> None:
        if not there_is_one:
            return
        batch = self._batch
        parts = await self._queue.files.parts(batch.tenant, file_id)
        file = File(
            id=file_id,
            tenant=batch.tenant,
            filename=f"{batch.id}_{word}.jsonl",
            purpose="batch_output",
            bytes=sum(part.bytes for part in parts),
            created_at_ms=now,
            expires_at_ms=now + self._desk.settings.file_retention_s * 1000,
        )
        await self._queue.files.put(file)


async def read(desk: Desk, batch: Batch, at: int) -> AsyncGenerator[FileLine]:
    """Yield the lines of a batch's input file from an offset on."""
    parts = await desk.queue.files.parts(batch.tenant, batch.input_file_id)
    pieces = files.content(desk.storage, batch.tenant, batch.input_file_id, parts, at)
    async with aclosing(pieces), aclosing(read_lines(pieces, at, desk.settings.max_body_bytes)) as found:
        async for line in found:
            yield line


async def read_piece(desk: Desk, batch: Batch, at: int, before: int, most: int) -> list[tuple[BatchLine, int]]:
    """Return up to `most` lines from an offset on, as many as fit into memory, each with the offset after it.

    `before` is how many there were up to there.
    """
    found: list[tuple[BatchLine, int]] = []
    size = 0
    async with aclosing(read(desk, batch, at)) as every:
        async for line in every:
            if line.raw:
                found.append((batch_lines.parse_line(before + len(found) + 1, line.raw), line.end))
                size += len(line.raw)
            if len(found) >= most or size > PIECE_BYTES:
                break
    return found


async def store(desk: Desk, batch: Batch, file_id: str, made: Sequence[bytes]) -> list[tuple[str, Part]]:
    """Store lines as the next part of a file; it counts from when it is committed."""
    if not made:
        return []
    data = b"".join(made)
    part = Part(f"{batch.rev:06d}-{secrets.token_hex(4)}.jsonl", len(data))
    await desk.storage.put(files.prefix(batch.tenant, file_id) + part.name, data, files.CONTENT_TYPE)
    return [(file_id, part)]
