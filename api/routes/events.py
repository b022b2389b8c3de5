"""What happens to a job, as it happens: Server-Sent Events."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator
from typing import Annotated

import structlog
from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from api.http.openapi import problems
from api.http.streaming import StreamedResponse
from api.responses import find
from api.visit import Context, RequestContext
from api.waiting import follow
from shared.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from shared.job import Progress, State
from shared.protocols.native import job_object
from shared.queue import JobEvent

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
    responses=problems(404, 422, 503)
    | {
        200: {
            "description": "Events `state` and `progress`; the last one holds the whole job, then the stream ends.",
            "content": {"text/event-stream": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        },
        204: {"description": "The job has ended, and `Last-Event-ID` names its last event: nothing will follow."},
    },
)
async def job_events(
    request: Request,
    job_id: str,
    context: Context,
    last_event_id: Annotated[str | None, Header(description="Go on after this event.")] = None,
) -> Response:
    """Subscribe to a job: its state now, every change and step, and at the end the whole job."""
    if last_event_id is not None and not _EVENT_ID.fullmatch(last_event_id):
        raise InvalidRequest("Last-Event-ID must be the id of an event of this API", param="Last-Event-ID")
    record = await find(job_id, context)
    if record.state.terminal and last_event_id == record.event_id:
        return Response(status_code=204)
    context.services.waiter_limit.check()
    return StreamedResponse(
        _lines(job_id, last_event_id, context, request.headers.getlist("authorization")),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _lines(job_id: str, after: str | None, context: RequestContext, key: list[str]) -> AsyncGenerator[bytes]:
    services = context.services
    silence_s = services.settings.sse_keepalive_s
    yield f"retry: {RECONNECT_MS}\n\n".encode()
    try:
        async with (
            services.feed.subscribe(job_id, after) as events,
            contextlib.aclosing(follow(events, services.closing, silence_s)) as followed,
        ):
            with services.waiter_limit.counted():
                async for event in followed:
                    with contextlib.suppress(Unavailable):
                        await services.authenticator.caller(key)  # it may have been revoked since
                    yield b": keep-alive\n\n" if event is None else await _message(event, context)
                    if event is not None and event.state is not None and event.state.terminal:
                        return
    except (
        Unavailable,
        NotFound,
        Unauthenticated,
    ) as error:  # too late for a status: the client comes back, and is told then
        log.info("events_cut", job_id=job_id, reason=error.message)


async def _message(event: JobEvent, context: RequestContext) -> bytes:
    """Return the event as it goes over the wire; a terminal one carries the whole job."""
    ended = event.state is not None and event.state.terminal
    record = await context.services.queue.jobs.get(event.job_id) if ended else None
    if record is not None:
        data = job_object(record, context.base_url, sign=context.sign).model_dump_json()
    else:
        progress = event.progress or Progress()
        told = {"step": progress.step, "total": progress.total, "percent": min(100, progress.percent)}
        data = json.dumps(
            {"id": event.job_id, "status": event.state or State.RUNNING, "phase": event.phase, "progress": told},
            separators=(",", ":"),
        )
    # Progress is not kept, so it has no id: whoever comes back goes on after the last change of state.
    number = f"id: {event.id}\n" if event.kind == "state" and event.id else ""
    return f"{number}event: {event.kind}\ndata: {data}\n\n".encode()
