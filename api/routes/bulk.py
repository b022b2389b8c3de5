"""Route that submits many jobs in one request: NDJSON in, one result line per job out, in order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import structlog
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import strict_json
from api.context import Context, RequestContext
from api.errors import TooManyLines, describe
from api.http.bodies import count_at_most
from api.http.middleware import NDJSON_TYPES, require_type
from api.http.ndjson import Line, Splitter, Spool
from api.http.openapi import ndjson_body, problems
from api.http.streaming import SEND_TIMEOUT_S
from api.jobs.request import JobRequest
from api.routes.bulk_keys import JobLine, LineKeys
from api.submission import (
    IdempotencyKey,
    SubmissionOrReplay,
    build_submission,
    idempotency,
    parse_job,
    result_label,
    submit_entries,
)
from shared.errors import Faults, FusequeueError, PayloadTooLarge
from shared.queue import Submission, SubmitResult
from shared.runtime import metrics, tracing
from shared.runtime.asyncio_tools import cancel_and_wait

log = structlog.get_logger()

router = APIRouter(tags=["jobs"])

CHUNK_LINES = 250  # a script of this many jobs blocks Redis for less than 5 ms
_LINES_PER_YIELD = 25  # prepared without yielding to other requests: about 5 ms
_CONCURRENT_FETCHES = 8  # lines with images and adapters that are fetched and stored, at a time for a bulk request
_FETCHED = (b'"image', b'"url"', b'"hub"')  # of such a line

_JSON = json.JSONEncoder(separators=(",", ":"))
_EXAMPLE = """{"line":1,"key":"still","id":"job_01ja3v5c8zq3m7x2r4t6w8y0ab","replayed":false,"url":"http://127.0.0.1:8000/v1/jobs/job_01..."}
{"line":2,"error":{"code":"invalid_request","message":"n is at most 8","param":"n","status":422,"retryable":false}}
"""


@router.post(
    "/v1/jobs:bulk",
    response_class=Response,
    openapi_extra=ndjson_body(),
    responses=problems(415, 422)
    | {
        200: {
            "description": "One result per line, in order, sent while lines still arrive. Blank lines have none.",
            "content": {"application/x-ndjson": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        }
    },
)
async def submit_jobs(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Submit one job per line. An invalid line gets an error that names its field; the other lines are submitted.

    With an `Idempotency-Key`, a request that is sent again enqueues no job twice: lines are identified by their
    numbers.

    A line with a `key`, up to 64 letters, digits, `.`, `-` and `_`, can be named by it in later lines, as jobs are by
    their ids: in `after`, and as `{"job": key}` in place of an image. A line that names a refused one is refused too
    (`parent_refused`).
    """
    require_type(request, NDJSON_TYPES)
    settings = context.services.settings
    count_at_most(request, 2 * settings.max_body_bytes)  # one line, and what has arrived of the next
    return BulkResponse(request.stream(), BulkSubmission(context, key), settings.max_bulk_lines)


class BulkResponse(Response):
    """Reads the request's body and sends the result lines at the same time."""

    media_type = "application/x-ndjson"

    def __init__(self, body: AsyncIterator[bytes], submission: BulkSubmission, max_lines: int) -> None:
        self._body = body
        self._submission = submission
        self._max_lines = max_lines
        self._splitter = Splitter(submission.max_line_bytes)
        self._spool = Spool()
        self.status_code = 200
        self.background = None
        self.init_headers({"X-Accel-Buffering": "no", "Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while piece := await self._spool.read():
                await self._send(send, piece, reading)
            await reading
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await cancel_and_wait((reading,))
            self._spool.close()
            self._splitter.clear()  # Python looks rarely for the cycles that would keep its line

    async def _read(self) -> None:
        try:
            async for data in self._body:
                if not await self._submit(self._splitter.feed(data)):
                    return
            await self._submit(self._splitter.finish())
        except FusequeueError as error:  # the body came too slowly, or there is no memory for it
            await self._spool.write(error_line(None, error))
        except ClientDisconnect:
            log.info("bulk_client_disconnected", lines=self._splitter.number)
        finally:
            await self._spool.end()

    async def _submit(self, lines: Iterator[Line]) -> bool:
        """Submit `lines` in chunks, and return whether more can follow."""
        while chunk := list(islice(lines, CHUNK_LINES)):
            allowed = [line for line in chunk if line.number <= self._max_lines]
            if allowed:
                await self._spool.write(await self._submission.submit(allowed))
            if self._splitter.number > self._max_lines:
                break
        if self._splitter.number <= self._max_lines:
            return True
        error = TooManyLines(f"a request has at most {self._max_lines} lines; send the rest in another", param="line")
        await self._spool.write(error_line(self._max_lines + 1, error))
        return False

    async def _send(self, send: Send, piece: bytes, reading: asyncio.Future[None]) -> None:
        """Send a piece; a client that has sent all its lines must read the results in time."""
        sending = asyncio.ensure_future(send({"type": "http.response.body", "body": piece, "more_body": True}))
        try:
            done: set[asyncio.Future[None]] = set()
            while not done:
                all_received = reading.done()
                done, _ = await asyncio.wait({sending}, timeout=SEND_TIMEOUT_S)
                if not done and all_received:
                    raise TimeoutError(f"the client has read nothing for {SEND_TIMEOUT_S:.0f} s")
            sending.result()
        finally:
            sending.cancel()


class BulkSubmission:
    """Submits the lines of one bulk request."""

    def __init__(self, context: RequestContext, key: str | None) -> None:
        self._context = context
        self._key = key
        self._keys = LineKeys()
        self._fetches = asyncio.Semaphore(_CONCURRENT_FETCHES)
        self.max_line_bytes = context.services.settings.max_body_bytes

    async def submit(self, lines: list[Line]) -> bytes:
        """Submit up to `CHUNK_LINES` lines, and return a result line for each, in order.

        One script submits them, but those that name others by key: they follow when the ids of their jobs are known,
        which are those of an earlier request if this one repeats it.
        """
        answers: dict[int, bytes] = {}
        waiting: list[JobLine] = []
        for line in lines:
            try:
                waiting.append(self._read(line))
            except FusequeueError as error:  # kept by nothing: its traceback has this frame, with all lines
                answers[line.number] = self._answer(line.number, None, error)
        while waiting:
            unknown = {one.key for one in waiting}
            ready = [one for one in waiting if unknown.isdisjoint(one.parents)]
            for one, result in zip(ready, await self._submit(ready), strict=True):
                answers[one.number] = self._answer(one.number, one.key, result)
                self._keys.settle(one, result if isinstance(result, FusequeueError) else result.job_id)
            waiting = [one for one in waiting if one.number not in answers]
        return b"".join(answers[line.number] for line in lines)

    def _read(self, line: Line) -> JobLine:
        if line.raw is None:
            raise PayloadTooLarge(f"the line is longer than {self.max_line_bytes} bytes", param="line")
        return self._keys.read(line.number, line.raw, strict_json.decode(line.raw))

    async def _submit(self, lines: list[JobLine]) -> list[SubmitResult | FusequeueError]:
        """Submit lines in one script, and return their results in order."""
        entries = await self._build_all(lines)
        try:
            return await submit_entries(entries, self._context.services)
        except FusequeueError as error:
            return [error if isinstance(entry, Submission) else entry for entry in entries]

    async def _build_all(self, lines: list[JobLine]) -> list[SubmissionOrReplay | FusequeueError]:
        """Build the submissions of the lines; those with images and adapters to fetch concurrently."""
        entries: list[asyncio.Task[SubmissionOrReplay | FusequeueError] | SubmissionOrReplay | FusequeueError] = []
        async with asyncio.TaskGroup() as tasks:
            for index, line in enumerate(lines):
                if any(name in line.raw for name in _FETCHED):
                    entries.append(tasks.create_task(self._build_with_fetches(line)))
                else:
                    entries.append(await self._build(line))
                if index % _LINES_PER_YIELD == _LINES_PER_YIELD - 1:
                    await asyncio.sleep(0)
        return [item.result() if isinstance(item, asyncio.Task) else item for item in entries]

    async def _build_with_fetches(self, line: JobLine) -> SubmissionOrReplay | FusequeueError:
        async with self._fetches:
            return await self._build(line)

    async def _build(self, line: JobLine) -> SubmissionOrReplay | FusequeueError:
        try:
            request = self._request(line)
            with tracing.new_trace("submit"):
                return await build_submission(request, self._context, idempotency(self._key, line.raw, line.number))
        except FusequeueError as error:
            return error

    def _request(self, line: JobLine) -> JobRequest:
        """Return the request of a line, or raise `InvalidRequest` with the faults of its keys and of its fields."""
        self._keys.name_jobs(line)
        faults = Faults()
        faults.found += line.faults
        wrong = {(fault.param or "").partition(".")[0] for fault in line.faults}
        with faults.collected():
            body = {name: value for name, value in line.body.items() if name not in wrong} if wrong else line.body
            request = parse_job(body, self._context.services)
        faults.check()
        return request

    def _answer(self, number: int, key: str | None, result: SubmitResult | FusequeueError) -> bytes:
        """Count the result of a line, and return its result line."""
        metrics.bulk_lines.labels(result_label(result)).inc()
        if isinstance(result, FusequeueError):
            return error_line(number, result, key)
        url = self._context.job_url(result.job_id)
        return _encode({**_name(number, key), "id": result.job_id, "replayed": result.replayed, "url": url})


def error_line(number: int | None, error: FusequeueError, key: str | None = None) -> bytes:
    """Return the result line of a refused line; without a number, of the request as a whole."""
    return _encode({**_name(number, key), "error": describe(error)})


def _name(number: int | None, key: str | None) -> dict[str, Any]:
    return {"line": number} if key is None else {"line": number, "key": key}


def _encode(result: dict[str, Any]) -> bytes:
    return _JSON.encode(result).encode() + b"\n"
