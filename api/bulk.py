"""Many jobs in one request: a line in, a line out, in order, however many there are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api import submission
from api.errors import RequestTimeout, TooManyLines, describe
from api.http.ndjson import Line, Splitter
from api.http.response_spool import Spool
from api.http.streaming import SEND_STALL_S
from api.idempotency import once
from api.visit import RequestContext
from shared.errors import FusequeueError, PayloadTooLarge
from shared.queue import Submission, Submitted
from shared.runtime import metrics
from shared.runtime.cancellation import canceled

log = structlog.get_logger()

PIECE_LINES = 250  # a script of so many jobs holds Redis up for less than 5 ms
_LINES_A_BREATH = 25  # checked without letting others run: about 5 ms
_PICTURES_AT_ONCE = 8  # fetched, decoded and stored for one bulk request

Checked = Submission | Submitted | FusequeueError
"""A line that may be submitted, one whose job is known already, or what is wrong with it."""


class BulkSubmit:
    """The lines of one bulk request, on their way into the queue."""

    def __init__(self, context: RequestContext, key: str | None) -> None:
        self._here = context
        self._services = context.services
        self._key = key
        self._pictures = asyncio.Semaphore(_PICTURES_AT_ONCE)

    async def submit(self, lines: list[Line]) -> bytes:
        """Submit up to `PIECE_LINES` lines in one script, and return a result line for each, in order."""
        checked = await self._check(lines)
        good = [item for item in checked if isinstance(item, Submission)]
        outcomes = iter(await self._submit(good))
        told = []
        for line, item in zip(lines, checked, strict=True):
            outcome = next(outcomes) if isinstance(item, Submission) else item
            told.append(self._tell(line.number, outcome))
        return b"".join(told)

    async def _check(self, lines: list[Line]) -> list[Checked]:
        """Check the lines; those with a picture side by side, since theirs may have to be fetched."""
        checked: list[asyncio.Task[Checked] | Checked] = []
        async with asyncio.TaskGroup() as pictures:
            for index, line in enumerate(lines):
                if line.raw is not None and b'"image' in line.raw:
                    checked.append(pictures.create_task(self._check_picture(line)))
                else:
                    checked.append(await self._check_one(line))
                if index % _LINES_A_BREATH == _LINES_A_BREATH - 1:
                    await asyncio.sleep(0)
        return [item.result() if isinstance(item, asyncio.Task) else item for item in checked]

    async def _check_picture(self, line: Line) -> Checked:
        async with self._pictures:
            return await self._check_one(line)

    async def _check_one(self, line: Line) -> Checked:
        if line.raw is None:
            return PayloadTooLarge(
                f"the line is longer than {self._services.settings.max_body_bytes} bytes", param="line"
            )
        try:
            return await submission.submission(
                line.raw, self._here.tenant, self._services, once(self._key, line.raw, line.number)
            )
        except FusequeueError as error:
            return error

    async def _submit(self, items: list[Submission]) -> list[Submitted | FusequeueError]:
        if not items:
            return []
        try:
            return await submission.submit(items, self._services)
        except FusequeueError as error:
            return [error] * len(items)

    def _tell(self, number: int, outcome: Submitted | FusequeueError) -> bytes:
        if isinstance(outcome, FusequeueError):
            metrics.bulk_lines.labels(outcome.code).inc()
            return error_line(number, outcome)
        metrics.bulk_lines.labels("replayed" if outcome.replayed else "accepted").inc()
        url = f"{self._here.base_url}/v1/jobs/{outcome.job_id}"
        return _encoded({"line": number, "id": outcome.job_id, "replayed": outcome.replayed, "url": url})


class BulkResponse(Response):
    """Reads the request's body and answers it line by line at the same time."""

    media_type = "application/x-ndjson"

    def __init__(self, body: AsyncIterator[bytes], work: BulkSubmit, *, max_lines: int, max_line_bytes: int) -> None:
        self._body = body
        self._work = work
        self._max_lines = max_lines
        self._splitter = Splitter(max_line_bytes)
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
            await canceled((reading,))
            self._spool.close()

    async def _send(self, send: Send, piece: bytes, reading: asyncio.Future[None]) -> None:
        """Send a piece; a client that has sent all of its lines must read their results in time."""
        sending = asyncio.ensure_future(send({"type": "http.response.body", "body": piece, "more_body": True}))
        try:
            done: set[asyncio.Future[None]] = set()
            while not done:
                all_sent = reading.done()
                done, _ = await asyncio.wait({sending}, timeout=SEND_STALL_S)
                if not done and all_sent:
                    raise TimeoutError(f"the client has read nothing for {SEND_STALL_S:.0f} s")
            sending.result()
        finally:
            sending.cancel()

    async def _read(self) -> None:
        try:
            async for data in self._body:
                if not await self._take(self._splitter.feed(data)):
                    return
            await self._take(self._splitter.finish())
        except RequestTimeout as error:
            await self._spool.write(error_line(None, error))
        except ClientDisconnect:
            log.info("bulk_client_left", lines=self._splitter.number)
        finally:
            await self._spool.end()

    async def _take(self, lines: Iterator[Line]) -> bool:
        """Submit `lines` in pieces, and return whether more may follow."""
        while piece := list(islice(lines, PIECE_LINES)):
            allowed = [line for line in piece if line.number <= self._max_lines]
            if allowed:
                await self._spool.write(await self._work.submit(allowed))
            if self._splitter.number > self._max_lines:
                break
        if self._splitter.number <= self._max_lines:
            return True
        beyond = TooManyLines(f"a request has at most {self._max_lines} lines; send the rest in another", param="line")
        await self._spool.write(error_line(self._max_lines + 1, beyond))
        return False


def error_line(number: int | None, error: FusequeueError) -> bytes:
    """Return the result line of a line that was refused; without a number, of the request as a whole."""
    return _encoded({"line": number, "error": describe(error)})


def _encoded(told: dict[str, Any]) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
