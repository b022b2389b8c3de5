"""One try of a call that waits for its job: how it waits, and what becomes of the job when its client hangs up.

OpenAI's SDKs send no Idempotency-Key. What tells a retry is the header `x-stainless-retry-count`: it goes on waiting
for the job that its earlier try made, as long as that one's answer has not been delivered. Likewise it finds the
video, the file or the batch that its earlier try made.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog
from fastapi import Request
from starlette.responses import Response

from api import submission, waiting
from api.compat.openai import results
from api.context import Services
from api.errors import WaitTimeout
from api.http.streaming import StreamedResponse
from api.visit import RequestContext
from shared.errors import FusequeueError, Unavailable
from shared.job import JobRecord, State
from shared.queue import Submitted
from shared.request import JobRequest
from shared.runtime.cancellation import canceled

log = structlog.get_logger()

RETRY_COUNT = "x-stainless-retry-count"
_leaving: set[asyncio.Task[None]] = set()


def is_retry(request: Request) -> bool:
    """Say whether an SDK sends this request again."""
    count = request.headers.get(RETRY_COUNT, "0")
    return count.isdecimal() and len(count) < 9 and int(count) > 0


def request_digest(request: Request, parts: Iterable[bytes]) -> str:
    """Return what equal requests of one key share; `parts` are the body, without a multipart's boundary."""
    digest = hashlib.sha256()
    for part in (request.url.path.encode(), request.headers.get("authorization", "").encode(), *parts):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:40]


async def submit(asked: JobRequest, context: RequestContext, digest: str, previews: int = 0) -> str:
    """Put a job in line that the request waits for, and return its id."""
    item = await submission.submission_of(asked, context.tenant, context.services, previews=previews)
    outcome = item if isinstance(item, Submitted) else (await submission.submit([item], context.services))[0]
    if isinstance(outcome, FusequeueError):
        raise outcome
    await context.services.queue.sync_calls.start(context.tenant, digest, outcome.job_id)
    return outcome.job_id


async def earlier_attempt(request: Request, context: RequestContext, digest: str) -> str | None:
    """Return the id of what an earlier try of this request noted, and whose answer did not arrive; None: of none."""
    return await context.services.queue.sync_calls.join(context.tenant, digest) if is_retry(request) else None


async def deliver(
    request: Request, context: RequestContext, digest: str, made_id: str, answer: bytes
) -> AsyncGenerator[bytes]:
    """Yield the whole answer; once it has been taken, the same request sent again means something new."""
    yield answer
    with contextlib.suppress(Unavailable):
        if not await request.is_disconnected():
            await context.services.queue.sync_calls.delivered(context.tenant, digest, made_id)


@dataclass(frozen=True)
class SyncCall:
    """A request that waits for `job_id`; `digest` is that of its body."""

    job_id: str
    tenant: str
    digest: str
    services: Services

    async def ended(self, request: Request) -> bool | None:
        """Wait for the job's end: True once it has ended, False after `sync_wait_s`, None when the client hung up."""
        job_end = asyncio.ensure_future(
            waiting.until_terminal(self.job_id, self.services.settings.sync_wait_s, self.services)
        )
        hanging_up = asyncio.ensure_future(_hung_up(request))
        try:
            await asyncio.wait({job_end, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
            return job_end.result() if job_end.done() else None
        finally:
            await canceled((job_end, hanging_up))

    async def answered(self, request: Request, give: Callable[[JobRecord], Awaitable[StreamedResponse]]) -> Response:
        """Wait for the job's end, and return what `give` makes of one that succeeded, or the answer that tells why not.

        Where the job is not done in time it goes on, and `WaitTimeout` says so.
        """
        try:
            ended = await self.ended(request)
            if ended is None:
                self.leave()
                return Response(status_code=499)  # nobody sees it
            record = await self._record(ended)
            if record.state is not State.SUCCEEDED:
                await self.delivered()
                return results.failed(request.scope, record)
            given = await give(record)
        except WaitTimeout:
            raise
        except FusequeueError:
            self.leave()
            raise
        given.pieces = self.delivering(given.pieces)
        return given

    async def _record(self, ended: bool) -> JobRecord:
        """Return the job that has ended, or raise that it has not: then a retry goes on waiting for it."""
        record = await self.services.queue.jobs.get(self.job_id)
        if record is None:
            raise Unavailable(f"job {self.job_id} was deleted while its pictures were waited for")
        if record.state.terminal:
            return record
        if not ended and not self.services.closing.is_set():
            waited_s = self.services.settings.sync_wait_s
            raise WaitTimeout(
                f"job {self.job_id} is not done after {waited_s} s; it goes on: GET /v1/jobs/{self.job_id}"
            )
        raise Unavailable("this process is being stopped; send the request again")

    async def delivering(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Yield `pieces`; the answer counts as delivered when all are taken, and as hung up on when not."""
        taken = False
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
            taken = True
        finally:
            if not taken:
                self.leave()
        with contextlib.suppress(Unavailable):
            await self.delivered()

    async def delivered(self) -> None:
        """Let the same request, sent again, mean a new job."""
        await self.services.queue.sync_calls.delivered(self.tenant, self.digest, self.job_id)

    def leave(self) -> None:
        """Note that this request waits no more; the job is canceled unless another comes for it in time."""
        task = asyncio.ensure_future(self._leave())
        _leaving.add(task)
        task.add_done_callback(_leaving.discard)

    async def _leave(self) -> None:
        queue, closing = self.services.queue, self.services.closing
        try:
            left = await queue.sync_calls.leave(self.tenant, self.digest, self.job_id)
            if left is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.services.settings.disconnect_grace_s):
                    await closing.wait()
                return  # a retry finds the job at another process of the API
            if await queue.sync_calls.abandon(self.tenant, self.digest, self.job_id, left):
                log.info("job_abandoned", job_id=self.job_id)
                await queue.jobs.cancel(self.job_id)
        except Unavailable as error:
            log.warning("job_not_abandoned", job_id=self.job_id, reason=error.message)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
