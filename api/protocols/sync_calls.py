"""Calls that wait for their job, and retries of calls whose response was lost.

OpenAI's SDKs send no Idempotency-Key of their own; the only sign of a retry is the header `x-stainless-retry-count`. A
retry waits for the job of its earlier attempt, or finds its video, file or batch, unless that response was delivered.
The earlier attempt can also have been refused, while equal requests wait for jobs of their own: a retry joins a job
that a request has left, or that of a process that has died. A key that a client does send decides by itself.
"""

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import Request
from starlette.responses import Response

from api import submission
from api.context import RequestContext
from api.errors import STATUSES, WaitTimeout, problem
from api.http.streaming import StreamedResponse, disconnected
from api.jobs.request import JobRequest
from api.submission import Idempotency
from shared.errors import FusequeueError, Unavailable
from shared.job import Job, State
from shared.job_record import JobRecord
from shared.runtime.asyncio_tools import cancel_and_wait

log = structlog.get_logger()

LEAVE_WAIT_S = 1.0
"""How long a retry waits until the disconnect of its earlier attempt is noticed."""

_LEAVE_POLL_S = 0.1
_abandoning: set[asyncio.Task[None]] = set()


@dataclass(frozen=True)
class RequestDigest:
    """Digests of a request: `body`, of its path and body, is the same after the rotation of an API key, and belongs to
    an Idempotency-Key; `attempt` is also that of the API key, and lets a retry find its first attempt."""

    body: str
    attempt: str


def request_digest(request: Request, parts: Iterable[bytes]) -> RequestDigest:
    """Return the digests of a request with a body of `parts`, which exclude a multipart boundary."""
    body = _digest((request.url.path.encode(), *parts))
    return RequestDigest(body, _digest((request.headers.get("authorization", "").encode(), body.encode())))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:40]


async def submit(job_request: JobRequest, context: RequestContext, digest: RequestDigest, previews: int = 0) -> Job:
    """Submit a job that a retry can find, and return it."""
    recognized_by = Idempotency(sync_call=digest.attempt)
    return (await submission.submit(job_request, context, recognized_by, previews=previews)).record.job


async def submit_with_key(
    job_request: JobRequest, context: RequestContext, digest: RequestDigest, key: str, previews: int = 0
) -> submission.AcceptedJob:
    """Return the job of this Idempotency-Key: a new one, or that of an earlier request with the same body."""
    return await submission.submit(job_request, context, Idempotency(key, digest.body), previews=previews)


async def earlier_attempt(request: Request, context: RequestContext, digest: RequestDigest) -> str | None:
    """Return the id of the object that an earlier attempt created without a delivered response, if this is a retry.

    A response is sent at once: one that is not delivered is most likely that of the earlier attempt.
    """
    sync_calls = context.services.queue.sync_calls
    return await sync_calls.join(context.tenant, digest.attempt, waited_for=True) if _is_retry(request) else None


async def left_job(request: Request, context: RequestContext, digest: RequestDigest) -> str | None:
    """Return the id of the job that an earlier attempt has left without a delivered response, if this is a retry."""
    sync_calls, until_s = context.services.queue.sync_calls, time.monotonic() + LEAVE_WAIT_S
    while _is_retry(request):
        job_id = await sync_calls.join(context.tenant, digest.attempt)
        if job_id != "":
            return job_id
        if time.monotonic() > until_s:
            break
        await asyncio.sleep(_LEAVE_POLL_S)
    return None


def _is_retry(request: Request) -> bool:
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and len(count) < 9 and int(count) > 0


def created_response(
    request: Request,
    context: RequestContext,
    digest: RequestDigest,
    object_id: str,
    content: Mapping[str, Any],
    **headers: str,
) -> StreamedResponse:
    """Return a created object as JSON; after its delivery the same request creates a new object."""
    body = json.dumps(content).encode()

    async def chunks() -> AsyncGenerator[bytes]:
        yield body
        with contextlib.suppress(Unavailable):
            if not await request.is_disconnected():
                await context.services.queue.sync_calls.delivered(context.tenant, digest.attempt, object_id)

    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    return StreamedResponse(chunks(), headers=headers)


def failed_response(scope: Mapping[str, Any], record: JobRecord) -> Response:
    """Return the error response of a job without a result; the SDK reads `x-should-retry`."""
    code, param, retryable = "job_failed", None, False
    message = f"job {record.job.id} {record.state.value}"
    if record.state is State.CANCELED:
        code = "job_canceled"
    elif record.state is State.EXPIRED and record.error is None:  # while it was queued
        code, message = "deadline_exceeded", f"the deadline of job {record.job.id} passed while it was queued"
    elif record.error is not None:
        code = record.error.code if record.error.code in STATUSES else code
        message, param, retryable = record.error.message, record.error.param, record.error.retryable
    return problem(scope, code, message, param=param, headers={"x-should-retry": "true" if retryable else "false"})


class StreamInterrupted(Exception):
    """A stream ends before its job, with an error that its client has received: no SDK sends such a request again."""


@dataclass(frozen=True)
class SyncCall:
    """A request that waits for `job_id`; with an Idempotency-Key the job continues when all its clients have left."""

    job_id: str
    digest: RequestDigest
    context: RequestContext

    async def respond(self, request: Request, build: Callable[[JobRecord], Awaitable[StreamedResponse]]) -> Response:
        """Wait for the job, and return `build` of a job that succeeded or the error response.

        Raises `WaitTimeout` after `sync_wait_s`; the job continues.
        """
        try:
            ended = await self._wait(request)
            if ended is None:
                self.abandon()
                return Response(status_code=499)  # the client has disconnected
            record = await self._ended_record(ended)
            if record.state is not State.SUCCEEDED:
                await self._delivered()
                return failed_response(request.scope, record)
            response = await build(record)
        except WaitTimeout:
            with contextlib.suppress(Unavailable):
                await self._leave()  # a retry waits for the same job
            raise
        except FusequeueError:
            self.abandon()
            raise
        response.pieces = self.track(response.pieces)
        return response

    async def _wait(self, request: Request) -> bool | None:
        """Return True when the job has ended, False after `sync_wait_s`, None when the client has disconnected."""
        wait_s = self.context.services.queue.client.policy("sync_wait_s")
        job_end = asyncio.ensure_future(self.context.waiters.until_terminal(self.job_id, wait_s))
        disconnect = asyncio.ensure_future(disconnected(request.receive))
        try:
            await asyncio.wait({job_end, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            return job_end.result() if job_end.done() else None
        finally:
            await cancel_and_wait((job_end, disconnect))

    async def _ended_record(self, ended: bool) -> JobRecord:
        """Return the record of the ended job; raises for a job that has not ended, for which a retry can wait."""
        record = await self.context.services.queue.jobs.get(self.job_id)
        if record is None:
            raise Unavailable(f"job {self.job_id} was deleted before it ended")
        if record.state.terminal:
            return record
        if not ended and not self.context.services.closing.is_set():
            waited_s = self.context.services.queue.client.policy("sync_wait_s")
            raise WaitTimeout(f"job {self.job_id} has not ended after {waited_s} s; poll GET /v1/jobs/{self.job_id}")
        raise Unavailable("the API process is stopping; send the request again")

    async def track(self, chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Yield `chunks`; the response counts as delivered after the last one, otherwise the job is abandoned."""
        ended = False
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            ended = True
            with contextlib.suppress(Unavailable):
                await self._delivered()
        except StreamInterrupted:
            ended = True
            await self._abandon(retryable=False)
        finally:
            if not ended:
                self.abandon()

    async def _delivered(self) -> None:
        sync_calls = self.context.services.queue.sync_calls
        await sync_calls.delivered(self.context.tenant, self.digest.attempt, self.job_id)

    async def _leave(self) -> int | None:
        """Record that this request no longer waits; returns the score for `abandon`."""
        queue = self.context.services.queue
        return await queue.sync_calls.leave(self.context.tenant, self.digest.attempt, self.job_id)

    def abandon(self) -> None:
        """Stop waiting; the job is canceled unless a retry joins it within `disconnect_grace_s`."""
        task = asyncio.ensure_future(self._abandon())
        _abandoning.add(task)
        task.add_done_callback(_abandoning.discard)

    async def _abandon(self, *, retryable: bool = True) -> None:
        queue, closing = self.context.services.queue, self.context.services.closing
        try:
            score = await self._leave()
            if score is None:
                return
            if retryable:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.context.services.settings.disconnect_grace_s):
                        await closing.wait()
                    return  # a retry finds the job in another API process
            if await queue.sync_calls.abandon(self.context.tenant, self.digest.attempt, self.job_id, score):
                log.info("job_abandoned", job_id=self.job_id)
                await queue.jobs.cancel(self.job_id)
        except Unavailable as error:
            log.warning("job_abandon_failed", job_id=self.job_id, reason=error.message)
