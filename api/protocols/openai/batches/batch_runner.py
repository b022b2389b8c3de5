"""One step of a batch: it continues from the last committed update, and commits its own or has no effect."""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import takewhile

import structlog

from api.jobs import job_builder
from api.jobs.adapter_fetches import AdapterFetcher
from api.jobs.request import JobRequest
from api.jobs.resolve import resolve
from api.protocols.openai.batches import batch_lines
from api.protocols.openai.batches.batch_files import (
    ENDS_MS,
    NEXT_LINE_FAILURES,
    STEP_S,
    WAIT_MS,
    BatchContext,
    BatchWriter,
    LineAt,
    fails_line,
    input_lines,
    read_chunk,
    store_part,
)
from api.protocols.openai.batches.batch_lines import BatchLine, LineChecker
from api.protocols.openai.batches.batch_steps import (
    GRACE_MS,
    MAX_FILE_LINES,
    MAX_LINES,
    MAX_OPEN_JOBS,
    BatchStep,
    line_job_id,
    next_step,
)
from shared.batch import CHUNK_LINES, Batch, BatchError, BatchStatus
from shared.errors import Conflict, FusequeueError, InvalidRequest, NotFound, QueueFull, StorageUnavailable, Unavailable
from shared.job_fields import OnDeadline, Priority
from shared.queue import Submission
from shared.queue.batches import BatchUpdate
from shared.runtime import tracing

log = structlog.get_logger()

CONCURRENT_LINES = 8  # each can hold an image in memory
FULL_MS = 15_000
"""Longest time until a batch tries again to submit lines for which the queue was full."""

ADAPTERS_S = 30.0
"""How long a line waits for adapters that are fetched; the fetch goes on for later lines."""

LINES_S = 45.0
"""A step ends after this time. Its lines end before, by the timeouts of their URLs and of storage."""


class _Unchecked:
    """In place of a line that has not been checked."""


_UNCHECKED = _Unchecked()


class BatchRunner:
    """Runs one step of one batch."""

    def __init__(self, context: BatchContext, batch: Batch) -> None:
        self._context = context
        self._queue = context.queue
        self._clock = context.clock
        self._batch = batch
        self._until_s = time.monotonic() + STEP_S

    async def advance(self) -> bool:
        """Run the next step, and return whether another one can follow at once."""
        step = next_step(self._batch, self._clock.now_ms())
        if step is BatchStep.VALIDATE:
            return await self._validate()
        if step is BatchStep.SUBMIT:
            return await self._submit_chunk()
        if step is BatchStep.CANCEL_JOBS:
            return await self._cancel_jobs()
        if step is BatchStep.FINALIZE:
            return await self._finalize()
        if step is BatchStep.WRITE:
            return await BatchWriter(self._context, self._batch).write()
        if step is BatchStep.WAIT:
            again_ms = WAIT_MS if self._batch.read < self._batch.total else ENDS_MS
            await self._queue.batches.postpone(self._batch.tenant, self._batch.id, again_ms)
        return False

    async def _commit(self, update: BatchUpdate, again_ms: int | None = 0) -> bool:
        return await self._queue.batches.commit(self._batch, update, again_ms)

    async def _validate(self) -> bool:
        batch = self._batch
        total, errors = await self._check_file()
        if errors:
            wire = json.dumps([error.model_dump() for error in errors])
            return await self._end(BatchStatus.FAILED, {"errors": wire})
        life_ms = batch.expires_at_ms + GRACE_MS - self._clock.now_ms() + self._context.settings.file_retention_s * 1000
        for file_id in (batch.output_file_id, batch.error_file_id):
            await self._queue.files.begin_output(batch.tenant, file_id, life_ms)
        status = BatchStatus.IN_PROGRESS.value
        times = {"in_progress_at": self._clock.now_ms()}
        return await self._commit(BatchUpdate({"status": status, "total": total, **times}))

    async def _check_file(self) -> tuple[int, list[BatchError]]:
        """Return the number of lines and what is wrong with the file."""
        checker = LineChecker(self._batch.endpoint)
        async with aclosing(input_lines(self._context, self._batch, 0)) as lines:
            async for line in lines:
                if not line.blank:
                    checker.check(line.number, line.raw)
                if checker.total > MAX_LINES or line.number > MAX_FILE_LINES:
                    message = f"a batch has at most {MAX_LINES} lines, and {MAX_FILE_LINES} with blank ones"
                    return checker.total, [BatchError(code="too_many_lines", message=message)]
        if not checker.total:
            return 0, [BatchError(code="empty_file", message="the file has no lines")]
        return checker.total, checker.errors

    async def _end(self, status: BatchStatus, fields: dict[str, str | int] | None = None) -> bool:
        update = BatchUpdate({**(fields or {}), "status": status.value, f"{status.value}_at": self._clock.now_ms()})
        await self._commit(update, None)
        return False

    async def _submit_chunk(self) -> bool:
        """Submit the next lines; rejected lines are written to the error file."""
        batch = self._batch
        max_lines = min(CHUNK_LINES, MAX_OPEN_JOBS - batch.open_jobs)
        chunk = await read_chunk(self._context, batch, batch.read_offset, batch.read, max_lines)
        if not chunk:
            raise NotFound(f"input file {batch.input_file_id} ends before line {batch.read + 1}")
        checked = await self._check_lines(chunk)
        submissions = [item for item in checked if isinstance(item, Submission)]
        refused = await self._submit(submissions)
        outcomes = [refused.get(item.job.id, item) if isinstance(item, Submission) else item for item in checked]
        accepted, rejected, offset = [], [], batch.read_offset
        for (line, end), item in zip(chunk, outcomes, strict=False):
            if isinstance(item, QueueFull):
                break
            offset = end
            if isinstance(item, FusequeueError):
                rejected.append(batch_lines.error_line(batch, line, item.code, item.public, item.param))
            else:
                accepted.append(line.ordinal)
        parts = await store_part(self._context, batch, batch.error_file_id, rejected)
        counts = {"read": len(accepted) + len(rejected), "accepted": len(accepted), "failed": len(rejected)}
        full = [item for item in outcomes if isinstance(item, QueueFull)]
        again_ms = min([FULL_MS, *(1000 * one.retry_after_s for one in full)]) if full else 0
        last_try = any(isinstance(item, StorageUnavailable) and item.retryable for item in checked)
        failures = {"step_failures": NEXT_LINE_FAILURES} if last_try else {}
        update = BatchUpdate({"read_offset": offset, **failures}, counts, accepted, parts)
        if not await self._commit(update, again_ms):
            await self._cancel_late(submissions)
            return False
        return not full

    async def _check_lines(self, chunk: Sequence[LineAt]) -> list[Submission | FusequeueError | None]:
        """Return the job of each line, its error, or None for an existing job, of as many lines as there is time for.

        The result ends before a line for which a service failed, which is checked again in the next step; if that is
        the first one, its error is raised.
        """
        batch = self._batch
        known = await self._queue.batches.known_jobs([line_job_id(batch, line.ordinal) for line, _ in chunk])
        checked: list[Submission | FusequeueError | _Unchecked | None] = [_UNCHECKED] * len(chunk)
        lines = iter(range(len(chunk)))
        failed: Exception | None = None

        async def check_next_lines() -> None:
            nonlocal failed
            for at in lines:  # shared by all: each line is checked once
                if failed is not None or (at and time.monotonic() > self._until_s):
                    return
                try:
                    checked[at] = None if known[at] else await self._submission(chunk[at][0])
                except (InvalidRequest, QueueFull, Conflict) as error:  # Conflict: the tenant has too many adapters
                    checked[at] = error
                except Unavailable as error:
                    if await fails_line(self._context, batch, error):
                        checked[at] = error
                    else:
                        failed = error
                except Exception:  # one line must not stop the others
                    log.exception("batch_line_failed", batch_id=batch.id, line=chunk[at][0].ordinal)
                    checked[at] = FusequeueError("the request of this line could not be processed")

        try:
            async with asyncio.timeout(LINES_S):
                await asyncio.gather(*(check_next_lines() for _ in range(CONCURRENT_LINES)))
        except TimeoutError as error:
            failed = error
        done = list(takewhile(lambda item: not isinstance(item, _Unchecked), checked))
        if failed is not None and not done:
            raise failed
        return [item for item in done if not isinstance(item, _Unchecked)]

    async def _submission(self, line: BatchLine) -> Submission:
        context, batch = self._context, self._batch
        request = batch_lines.line_request(batch.endpoint, line.body(), context.catalog)
        resolved = resolve(request, context, batch.tenant, batch.created_at_ms)
        with tracing.new_trace("submit"):
            request = await self._with_adapters(request)
            job = await job_builder.build_job(resolved, request, context, base_url=batch.base_url)
        if job.parents:
            param = "after" if job.after else next(name for name, ref in job.inputs.items() if ref.source is not None)
            raise InvalidRequest(f"{param}: a line of a batch cannot wait for other jobs", param=param)
        left_ms = batch.expires_at_ms - max(self._clock.now_ms(), job.not_before_ms or 0)
        if job.not_before_ms is not None and left_ms <= 0:
            raise InvalidRequest("not_before is after the end of the batch", param="not_before")
        time_limit_ms = left_ms if job.time_limit_ms is None else min(job.time_limit_ms, left_ms)
        times: dict[str, object] = {"created_at_ms": batch.created_at_ms, "time_limit_ms": time_limit_ms}
        if time_limit_ms == left_ms:  # with `on_deadline: "run"` it would run after the end of the batch
            times["on_deadline"] = OnDeadline.EXPIRE
        names = {"id": line_job_id(batch, line.ordinal), "batch_id": batch.id, "priority": Priority.BULK}
        job = job.model_copy(update=names | times)
        return job_builder.make_submission(job, context.catalog)

    async def _with_adapters(self, request: JobRequest) -> JobRequest:
        """Return a request with the ids of adapters that it names by URL or on the hub, which are fetched."""
        if not request.fetches_adapters:
            return request
        context = self._context
        spec = context.catalog.get(request.model)
        fetcher = AdapterFetcher(
            self._batch.tenant, spec, context.queue, context.storage, context.settings, wait_s=ADAPTERS_S
        )
        return request.model_copy(update={"adapters": await fetcher.resolve(request.adapters)})

    async def _submit(self, submissions: Sequence[Submission]) -> dict[str, QueueFull | InvalidRequest]:
        """Submit jobs, and return the errors of those for which the queue is full or whose inputs are gone."""
        if not submissions:
            return {}
        refused: dict[str, QueueFull | InvalidRequest] = {}
        for item, outcome in zip(submissions, await self._queue.jobs.submit(submissions), strict=True):
            if isinstance(outcome, QueueFull | InvalidRequest):
                refused[item.job.id] = outcome
            elif isinstance(outcome, FusequeueError):
                raise outcome
        return refused

    async def _cancel_late(self, submissions: Sequence[Submission]) -> None:
        """Cancel the jobs of an outdated step if the batch was canceled or given up: the step that cancels can have
        passed them."""
        batch = await self._queue.batches.get(self._batch.tenant, self._batch.id)
        if batch.status is BatchStatus.IN_PROGRESS and not batch.errors:
            return
        kept = line_job_id(batch, batch.read if batch.errors else 0)  # one that is given up waits for what it has read
        for submission in submissions:
            if submission.job.id > kept:  # ids sort like lines
                await self._queue.jobs.cancel(submission.job.id)

    async def _cancel_jobs(self) -> bool:
        """Cancel the jobs of the next lines; jobs that have ended are not changed."""
        batch = self._batch
        first, count = batch.uncanceled + 1, min(CHUNK_LINES, batch.possibly_submitted - batch.uncanceled)
        accepted = await self._queue.batches.accepted_lines(batch, first, count)
        for ordinal, is_job in enumerate(accepted, first):
            if is_job or ordinal > batch.read:
                await self._queue.jobs.cancel(line_job_id(batch, ordinal))
        return await self._commit(BatchUpdate({"canceled": batch.uncanceled + count}))

    async def _finalize(self) -> bool:
        batch, now = self._batch, self._clock.now_ms()
        if not batch.total:
            return await self._end(BatchStatus.EXPIRED)
        final = BatchStatus.EXPIRED if now >= batch.expires_at_ms else BatchStatus.COMPLETED
        status = BatchStatus.FINALIZING.value
        return await self._commit(BatchUpdate({"status": status, "finalizing_at": now, "final_status": final.value}))
