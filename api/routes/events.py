"""Route that streams the events of a job as Server-Sent Events."""

import contextlib
import json
import re
from collections.abc import AsyncGenerator
from typing import Annotated

import structlog
from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from api.context import EventsContext, RequestContext
from api.http.openapi import event_stream, problems
from api.http.streaming import SSE_KEEPALIVE, sse_message, sse_response
from api.jobs.job_object import job_object
from shared.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from shared.job import State
from shared.job_record import Progress
from shared.queue import JobEvent
from shared.runtime.clock import now_ms

log = structlog.get_logger()

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

RECONNECT_MS = 2_000
_EVENT_ID = re.compile(r"\d{1,20}-\d{1,20}")
_EXAMPLE = """id: 1769860800000-0
event: state
data: {"id":"job_01ja3v5c8zq3m7x2r4t6w8y0ab","status":"running","phase":"loading","progress":{...}}

"""


@router.get(
    "/{job_id}/events",
    response_class=Response,
    responses=problems(404, 422, 503)
    | {
        200: event_stream(
            "Events `state` and `progress`; the last one contains the whole job, then the stream ends.", _EXAMPLE
        ),
        204: {"description": "The job has ended, and `Last-Event-ID` is its last event: nothing follows."},
    },
)
async def get_job_events(
    request: Request,
    job_id: str,
    context: EventsContext,
    last_event_id: Annotated[str | None, Header(description="Resume after this event.")] = None,
) -> Response:
    """Subscribe to a job: its state now, every change and step, and at the end the whole job. `urls.events` of a job
    needs no key, and works in a browser's EventSource."""
    last_event_id = last_event_id or None  # what an EventSource sends after an event with an empty id
    if last_event_id is not None and not _EVENT_ID.fullmatch(last_event_id):
        raise InvalidRequest("Last-Event-ID must be the id of an event of this API", param="Last-Event-ID")
    record = await context.find_job(job_id)
    if record.state.terminal and last_event_id == record.event_id:
        return Response(status_code=204)
    context.waiters.check()
    return sse_response(_messages(job_id, last_event_id, context, request.headers.getlist("authorization")))


async def _messages(
    job_id: str, after: str | None, context: RequestContext, authorization: list[str]
) -> AsyncGenerator[bytes]:
    retry = f"retry: {RECONNECT_MS}\n".encode()  # in the first event: strict parsers fail on an event without data
    try:
        async with contextlib.aclosing(context.waiters.events(job_id, after)) as events:
            async for event in events:
                with contextlib.suppress(Unavailable):
                    await check_access(context, authorization)
                if event is None:
                    yield SSE_KEEPALIVE
                    continue
                yield retry + await _message(event, context)
                retry = b""
                if event.state is not None and event.state.terminal:
                    return
    except (Unavailable, NotFound, Unauthenticated) as error:
        # Too late for a status: the client reconnects and receives it then.
        log.info("event_stream_ended", job_id=job_id, reason=error.message)


async def check_access(context: RequestContext, authorization: list[str]) -> None:
    """Raise `Unauthenticated` when the key was revoked, or the signed URL expired, since the stream began."""
    if context.url_expires_s is None:
        await context.services.authenticator.caller(authorization)
    elif context.url_expires_s * 1000 <= now_ms():
        raise Unauthenticated("the URL has expired", param="expires")


async def _message(event: JobEvent, context: RequestContext) -> bytes:
    """Return an event in its wire form; a terminal one contains the whole job."""
    ended = event.state is not None and event.state.terminal
    record = await context.services.queue.jobs.get(event.job_id) if ended else None
    if record is not None:
        data = job_object(record, context.base_url, sign=context.sign).model_dump_json()
    else:
        progress = event.progress or Progress()
        values = {"step": progress.step, "total": progress.total, "percent": min(100, progress.percent)}
        data = json.dumps(
            {"id": event.job_id, "status": event.state or State.RUNNING, "phase": event.phase, "progress": values},
            separators=(",", ":"),
        )
    # Progress events are not kept and have no id: a client resumes after the last change of state.
    return sse_message(event.kind, data, event.id if event.kind == "state" and event.id else None)
