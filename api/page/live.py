"""Route that follows several jobs in one stream: a browser has six connections to a server for everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from api.context import Context, RequestContext
from api.http.lists import known_parameters
from api.http.streaming import SSE_KEEPALIVE, sse_message, sse_response
from api.jobs.job_object import job_object
from shared.errors import FusequeueError, InvalidRequest, Unauthenticated, Unavailable
from shared.job import State
from shared.job_record import JobRecord, Progress
from shared.queue import JobEvent
from shared.runtime.asyncio_tools import cancel_and_wait

log = structlog.get_logger()

router = APIRouter(prefix="/page", include_in_schema=False)

MAX_JOBS = 64
PREVIEWS_EVERY_S = 0.2


@router.get("/live", dependencies=[known_parameters("jobs")])
async def follow_jobs(
    request: Request, context: Context, jobs: Annotated[str, Query(max_length=MAX_JOBS * 31)]
) -> Response:
    """Send `job` events with state, progress and worker of these jobs, `preview` events, and `end` with a whole job.

    A job that does not exist, or is another tenant's, gets `gone`. The stream ends with its last job.
    """
    ids = list(dict.fromkeys(jobs.split(",")))
    if len(ids) > MAX_JOBS:
        raise InvalidRequest(f"jobs: at most {MAX_JOBS} in one stream", param="jobs")
    records = await context.services.queue.jobs.get_many(ids)
    followed = {
        job_id: record
        for job_id, record in zip(ids, records, strict=True)
        if record is not None and record.job.tenant == context.tenant
    }
    context.waiters.check()
    gone = [_encoded("gone", {"id": job_id}) for job_id in ids if job_id not in followed]
    return sse_response(_messages(list(followed.values()), gone, context, request.headers.getlist("authorization")))


async def _messages(
    records: list[JobRecord], gone: list[bytes], context: RequestContext, authorization: list[str]
) -> AsyncGenerator[bytes]:
    """Yield the messages of all jobs as they come, and end when the key is revoked."""
    for one in gone:
        yield one
    messages: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=2 * MAX_JOBS)
    tasks = [asyncio.create_task(_follow(record, context, messages)) for record in records]
    left, authenticator = len(tasks), context.services.authenticator
    try:
        while left:
            message: bytes | None = SSE_KEEPALIVE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(context.services.settings.sse_keepalive_s):
                    message = await messages.get()
            with contextlib.suppress(Unavailable):
                await authenticator.caller(authorization)
            if message is None:
                left -= 1
            else:
                yield message
    except Unauthenticated:
        return  # the page asks again, and gets the status
    finally:
        await cancel_and_wait(tasks)


async def _follow(record: JobRecord, context: RequestContext, messages: asyncio.Queue[bytes | None]) -> None:
    """Put the messages of one job into the queue, then None."""
    job_id, shown, read_at = record.job.id, set[str](), 0.0
    try:
        async with contextlib.aclosing(context.waiters.events(job_id)) as events:
            async for event in events:
                if event is None:
                    continue
                if record.job.previews and time.monotonic() - read_at > PREVIEWS_EVERY_S:
                    read_at = time.monotonic()
                    for message in await _previews(record, shown, context):
                        await messages.put(message)
                await messages.put(await _message(event, context))
    except FusequeueError as error:  # the page follows the job again, and learns why
        log.info("job_not_followed", job_id=job_id, reason=error.message)
    await messages.put(None)


async def _previews(record: JobRecord, shown: set[str], context: RequestContext) -> list[bytes]:
    """Return the newest preview of each image that has not been shown."""
    job = record.job
    newest = {preview.index: preview for preview in await context.services.queue.previews.get(job.id, shown)}
    shown.update(f"{one.index}|{number}" for one in newest.values() for number in range(one.number + 1))
    content_type = job.output_format.preview_format.content_type
    return [
        _encoded("preview", {"id": job.id, "index": one.index, "url": f"data:{content_type};base64,{one.b64}"})
        for one in newest.values()
    ]


async def _message(event: JobEvent, context: RequestContext) -> bytes:
    record = await context.services.queue.jobs.get(event.job_id) if event.kind == "state" else None
    if record is not None and record.state.terminal:
        return sse_message("end", job_object(record, context.base_url, sign=context.sign).model_dump_json())
    progress = event.progress or Progress()
    body: dict[str, Any] = {
        "id": event.job_id,
        "status": event.state or State.RUNNING,
        "phase": event.phase,
        "progress": {"step": progress.step, "total": progress.total, "percent": min(100, progress.percent)},
    }
    return _encoded("job", body if record is None else {**body, "worker": record.worker})


def _encoded(kind: str, body: dict[str, Any]) -> bytes:
    return sse_message(kind, json.dumps(body, separators=(",", ":")))
