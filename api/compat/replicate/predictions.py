"""`/compat/replicate/v1/predictions`: jobs under another name."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from api import submission, waiting
from api.compat.replicate import outputs, prediction_stream
from api.context import Context, RequestContext
from api.http.body_limits import JSON_TYPES, require_type
from api.http.openapi import problems
from api.http.streaming import StreamedResponse
from api.responses import existing_job
from api.routes.jobs import Prefer
from shared.config.models_file import ModelSpec
from shared.errors import InvalidRequest, Unavailable
from shared.job import JobRecord, Priority
from shared.protocols.replicate.models import named, of_version, version_of
from shared.protocols.replicate.prediction_inputs import request_of
from shared.protocols.replicate.predictions import PREFIX
from shared.request import MAX_DEADLINE_S, validated
from shared.runtime import strict_json
from shared.webhooks import TERMINAL_EVENTS, JobEvent

router = APIRouter(prefix=PREFIX, tags=["Replicate"])

MAX_WAIT_S = 60.0
ANSWERED_BEFORE_S = 0.25
"""The SDK gives up half a second after the time that it asks us to wait: the answer leaves so much before that time."""

CANCEL_WAIT_S = 5.0
"""A job that runs leaves at its next step: the answer to a cancellation waits for that so long."""

PAGE = 100
_SPAN = re.compile(r"(?=\d)(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s?)?")
_EVENTS: dict[str, tuple[JobEvent, ...]] = {
    "start": ("job.running",),
    "output": ("job.succeeded",),  # all of it comes at the end
    "completed": TERMINAL_EVENTS,
}
_CREATED = problems(400, 404, 408, 413, 415, 422, 429, 503)

CancelAfter = Annotated[
    str | None, Header(max_length=32, description="Give up so long from now: `90s`, `5m`, `1h30m`, or seconds.")
]


class PredictionRequest(BaseModel):
    """The body of a prediction. `input` has the fields of a job by the names that Replicate's models have for them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[
        str | None, Field(max_length=256, description="A version of `GET /v1/models`, `owner/name`, or a model's id.")
    ] = None
    input: Annotated[dict[str, Any], Field(examples=[{"prompt": "a red circle", "num_outputs": 2, "seed": 7}])] = {}
    webhook: Annotated[str | None, Field(max_length=2048, description="An https URL; it gets predictions.")] = None
    webhook_completed: Annotated[str | None, Field(max_length=2048, description="The same, of the end alone.")] = None
    webhook_events_filter: Annotated[
        tuple[Literal["start", "output", "logs", "completed"], ...] | None,
        Field(min_length=1, description="Unset: start and completed. `logs` is not sent."),
    ] = None
    stream: Annotated[bool | None, Field(description="Taken: every prediction has a stream.")] = None


_BODY = {
    "required": True,
    "content": {"application/json": {"schema": {**PredictionRequest.model_json_schema(), "title": "Prediction"}}},
}


@router.post("/predictions", status_code=201, openapi_extra={"requestBody": _BODY}, responses=_CREATED)
async def create_prediction(
    request: Request, context: Context, prefer: Prefer = None, cancel_after: CancelAfter = None
) -> Response:
    """Make a prediction of a version. With `Prefer: wait=n` the answer is the finished one, or, after n seconds, one
    that is `starting`."""
    asked = await _asked(request)
    if asked.version is None:
        raise InvalidRequest("version: say which model is meant", param="version")
    spec = of_version(asked.version, context.services.catalog)
    return await _created(asked, spec, context, prefer, cancel_after)


@router.post(
    "/models/{owner}/{name}/predictions", status_code=201, openapi_extra={"requestBody": _BODY}, responses=_CREATED
)
async def create_of_model(
    request: Request, owner: str, name: str, context: Context, prefer: Prefer = None, cancel_after: CancelAfter = None
) -> Response:
    """Make a prediction of a model. `owner` may be anybody where the model's id names none."""
    spec = named(owner, name, context.services.catalog)
    asked = await _asked(request)
    if asked.version is not None and of_version(asked.version, context.services.catalog) != spec:
        raise InvalidRequest(f"version: it is none of {owner}/{name}", param="version")
    return await _created(asked, spec, context, prefer, cancel_after)


@router.get("/predictions", responses=problems(422, 503))
async def list_predictions(
    context: Context, cursor: Annotated[str | None, Query(max_length=128, description="As `next` has it.")] = None
) -> Response:
    """List predictions, newest first, a hundred a page."""
    queue, all_of_them = context.services.queue, f"{context.base_url}{PREFIX}/predictions"
    try:
        records, following_on = await queue.jobs.page(context.tenant, after=cursor, limit=PAGE)
    except InvalidRequest as error:
        raise InvalidRequest("cursor: it must be that of `next` or `previous`", param="cursor") from error
    previous = None
    if cursor is not None:
        before = await queue.jobs.nth_newer(context.tenant, cursor, PAGE)
        previous = all_of_them if before is None else f"{all_of_them}?cursor={before}"
    told = {
        "previous": previous,
        "next": None if following_on is None else f"{all_of_them}?cursor={following_on}",
        "results": [outputs.listed(record, context) for record in records],
    }
    return JSONResponse(told)


@router.get("/predictions/{prediction_id}", responses=problems(404, 503))
async def get_prediction(prediction_id: str, context: Context) -> Response:
    """Read a prediction."""
    return JSONResponse(await outputs.shown(await context.find_job(prediction_id), context))


@router.post("/predictions/{prediction_id}/cancel", responses=problems(404, 503))
async def cancel_prediction(prediction_id: str, context: Context) -> Response:
    """Cancel a prediction: at once while it waits, at its next step while it runs."""
    await context.find_job(prediction_id)
    queue = context.services.queue
    record = existing_job(await queue.jobs.cancel(prediction_id), prediction_id)
    if not record.state.terminal:
        with contextlib.suppress(Unavailable):
            await context.services.waiters.until_terminal(prediction_id, CANCEL_WAIT_S)
        record = existing_job(await queue.jobs.get(prediction_id), prediction_id)
    return JSONResponse(await outputs.shown(record, context))


@router.get("/predictions/{prediction_id}/stream", responses=problems(404, 503))
async def stream_prediction(request: Request, prediction_id: str, context: Context) -> Response:
    """Follow a prediction by Server-Sent Events: `logs` with its progress, `output` for each picture, then `done`."""
    record = await context.find_job(prediction_id)
    context.services.waiters.check()
    return StreamedResponse(
        prediction_stream.lines(record, context, request.headers.getlist("authorization")),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _asked(request: Request) -> PredictionRequest:
    require_type(request, JSON_TYPES)
    body = strict_json.decode(await request.body())
    sent = {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body
    return validated(PredictionRequest, sent)


async def _created(
    asked: PredictionRequest, spec: ModelSpec, context: RequestContext, prefer: str | None, cancel_after: str | None
) -> Response:
    began_s = time.monotonic()
    wait_s = waiting.preferred_wait_s(prefer, min(MAX_WAIT_S, context.services.settings.max_wait_s))
    beside: dict[str, Any] = {"priority": (Priority.INTERACTIVE if wait_s else Priority.STANDARD).value}
    if cancel_after is not None:
        beside["deadline_s"] = deadline_s(cancel_after)
    request, naming = request_of(asked.input, spec, {**beside, **webhook_fields(asked)})
    with naming.told():
        submitted = (await submission.submit(request, context, webhook_version=version_of(spec))).record
    record: JobRecord | None = None
    if wait_s:
        left_s = max(0.0, wait_s - ANSWERED_BEFORE_S - (time.monotonic() - began_s))
        with contextlib.suppress(Unavailable):
            await context.services.waiters.until_terminal(submitted.job.id, left_s)
            record = await context.services.queue.jobs.get(submitted.job.id)
    if record is None or not record.state.terminal:
        # By `starting` clients know that they must ask again; they take anything else for the end.
        record = submitted
    told = await outputs.shown(record, context)
    headers = {"Location": told["urls"]["get"]}
    if wait_s:
        headers["Preference-Applied"] = f"wait={wait_s:.0f}"
    return JSONResponse(told, 201, headers)


def webhook_fields(asked: PredictionRequest) -> dict[str, Any]:
    """Return the webhook of a prediction by a job's own fields, or raise `InvalidRequest`."""
    chosen = asked.webhook_events_filter
    if chosen is not None and asked.webhook is None:
        raise InvalidRequest("webhook_events_filter needs a webhook to tell", param="webhook_events_filter")
    if chosen is not None and "logs" in chosen:
        raise InvalidRequest(
            "webhook_events_filter: logs are not sent here; read them from the prediction, or follow its stream",
            param="webhook_events_filter",
        )
    if asked.webhook_completed is not None:
        if asked.webhook is not None:
            raise InvalidRequest("webhook_completed: send either webhook or this", param="webhook_completed")
        return {"webhook": asked.webhook_completed, "webhook_events": TERMINAL_EVENTS}
    if asked.webhook is None:
        return {}
    events = [event for name in chosen or ("start", "completed") for event in _EVENTS[name]]
    return {"webhook": asked.webhook, "webhook_events": tuple(dict.fromkeys(events))}


def deadline_s(cancel_after: str) -> float:
    """Return the seconds that the header `Cancel-After` means, or raise `InvalidRequest`."""
    found = _SPAN.fullmatch(cancel_after.strip().lower())
    hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    span_s = 3600 * hours + 60 * minutes + seconds
    if not 0 < span_s <= MAX_DEADLINE_S:
        raise InvalidRequest("Cancel-After: it must be as 90s, 5m or 1h30m, at most 7 days", param="Cancel-After")
    return float(span_s)
