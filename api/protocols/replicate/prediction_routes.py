"""`/compat/replicate/v1/predictions`: jobs as predictions."""

import contextlib
import time
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from api import strict_json, submission, waiting
from api.context import Context, RequestContext, ServicesDep, Tenant, returns_secret
from api.http import openapi
from api.http.base64_json import Base64Json
from api.http.lists import known_parameters
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import operation_ids, request_body
from api.http.streaming import count_response
from api.jobs.request import validated
from api.protocols.base64_images import read_base64
from api.protocols.model_names import find_model
from api.protocols.replicate.prediction_inputs import parse_input
from api.protocols.replicate.prediction_objects import PredictionList, PredictionObject
from api.protocols.replicate.predictions import PREFIX, model_of_version, model_version, prediction
from api.protocols.text_errors import TextProblem
from api.responses import existing_job
from api.routes.jobs import Prefer
from api.submission import Idempotency, IdempotencyKey, idempotency
from shared.config.model_spec import ModelSpec
from shared.durations import duration_s
from shared.errors import InvalidRequest, NotFound, Overloaded, Unavailable, UnknownModel
from shared.job import State
from shared.job_fields import MAX_DEADLINE_S, Priority
from shared.job_record import JobRecord
from shared.webhooks import TERMINAL_EVENTS, JobEventName

problems = partial(openapi.problems, model=TextProblem)
router = APIRouter(prefix=PREFIX, tags=["Replicate"], generate_unique_id_function=operation_ids("replicate"))

MAX_WAIT_S = 60.0
RESPONSE_MARGIN_S = 0.25
"""The SDK times out half a second after its wait; the response is sent this much before the wait ends."""

CANCEL_WAIT_S = 5.0
"""Time for a running job to leave its batch, which it does at its next step."""

MAX_INLINE_BYTES = 8 * 1024 * 1024
"""Images of one prediction that are inlined in a response over http; larger ones are URLs."""

PAGE = 100
_EVENTS: dict[str, tuple[JobEventName, ...]] = {
    "start": ("job.running",),
    "output": ("job.succeeded",),  # the whole output arrives at the end
    "completed": TERMINAL_EVENTS,
}
_CREATED = problems(400, 404, 408, 413, 415, 422, 429, 503)

CancelAfter = Annotated[
    str | None, Header(max_length=32, description="Deadline from now: `90s`, `5m`, `1h30m`, or seconds.")
]


@dataclass(frozen=True)
class CreationOptions:
    """Headers of a request that creates a prediction."""

    prefer: Prefer = None
    cancel_after: CancelAfter = None
    key: IdempotencyKey = None


class PredictionRequest(BaseModel):
    """The body of a prediction; `input` has job fields by the names of Replicate's models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: str | None = Field(
        None, max_length=256, description="A version of `GET /v1/models`, `owner/name`, or a model's id."
    )
    input: dict[str, Any] = {}
    webhook: str | None = Field(None, max_length=2048, description="An https URL that receives predictions.")
    webhook_completed: str | None = Field(None, max_length=2048, description="Like `webhook`, only at the end.")
    webhook_events_filter: tuple[Literal["start", "output", "logs", "completed"], ...] | None = Field(
        None, min_length=1, description="Default: start and completed. `logs` is not supported."
    )
    stream: bool | None = Field(None, description="Accepted: every prediction has a stream.")


_SCHEMA = {**PredictionRequest.model_json_schema(), "title": "Prediction"}
_INPUT = {"prompt": "a red circle on a blue ground, left", "num_outputs": 2, "seed": 7}
_EXAMPLE = {"version": "fusequeue/demo", "input": _INPUT}
_BODY = request_body("application/json", {"schema": _SCHEMA, "example": _EXAMPLE})
_MODEL_BODY = request_body("application/json", {"schema": _SCHEMA, "example": {"input": _INPUT}})


@router.post(
    "/predictions", status_code=201, openapi_extra=_BODY, responses=_CREATED | {201: {"model": PredictionObject}}
)
async def create_prediction(
    request: Request, context: Context, options: Annotated[CreationOptions, Depends()]
) -> Response:
    """Create a prediction of a version. With `Prefer: wait=n` the response is the ended prediction or, after n seconds,
    one with status `starting`."""
    body = await _parse(request)
    if body.version is None:
        raise InvalidRequest("version: required", param="version")
    spec = model_of_version(body.version, context.services.catalog)
    return await _create(request, body, spec, context, options, idempotency(options.key, await request.body()))


@router.post(
    "/models/{owner}/{name}/predictions",
    status_code=201,
    openapi_extra=_MODEL_BODY,
    responses=_CREATED | {201: {"model": PredictionObject}},
)
async def create_model_prediction(
    request: Request, owner: str, name: str, context: Context, options: Annotated[CreationOptions, Depends()]
) -> Response:
    """Create a prediction of a model. Any `owner` is accepted for a model whose id has none."""
    spec = find_model(owner, name, context.services.catalog)
    body = await _parse(request)
    if body.version is not None and model_of_version(body.version, context.services.catalog) != spec:
        raise InvalidRequest(f"version: it is not one of {owner}/{name}", param="version")
    raw = f"{spec.id}\n".encode() + await request.body()  # the body need not name the model
    return await _create(request, body, spec, context, options, idempotency(options.key, raw))


@router.get(
    "/predictions",
    responses=problems(422, 503) | {200: {"model": PredictionList}},
    dependencies=[known_parameters("cursor")],
)
async def list_predictions(
    context: Context,
    cursor: Annotated[str | None, Query(max_length=128, description="From `next` or `previous`.")] = None,
) -> Response:
    """List predictions, newest first, 100 per page."""
    jobs, url = context.services.queue.jobs, f"{context.base_url}{PREFIX}/predictions"
    try:
        records, next_cursor = await jobs.page(context.tenant, after=cursor, limit=PAGE)
    except InvalidRequest as error:
        raise InvalidRequest("cursor: it must be from `next` or `previous`", param="cursor") from error
    previous = None
    if cursor is not None:
        before = await jobs.nth_newer(context.tenant, cursor, PAGE)
        previous = url if before is None else f"{url}?cursor={before}"
    page = {
        "previous": previous,
        "next": None if next_cursor is None else f"{url}?cursor={next_cursor}",
        "results": [_prediction(record, context, _urls(record, context)) for record in records],
    }
    return JSONResponse(page)


@router.get("/predictions/{prediction_id}", responses=problems(404, 503) | {200: {"model": PredictionObject}})
async def get_prediction(request: Request, prediction_id: str, context: Context) -> Response:
    """Get a prediction."""
    return await _response(request, await context.find_job(prediction_id), context)


@router.post("/predictions/{prediction_id}/cancel", responses=problems(404, 503) | {200: {"model": PredictionObject}})
async def cancel_prediction(request: Request, prediction_id: str, context: Context) -> Response:
    """Cancel a prediction: a queued one at once, a running one at its next step."""
    await context.find_job(prediction_id)
    queue = context.services.queue
    record = existing_job(await queue.jobs.cancel(prediction_id), prediction_id)
    if not record.state.terminal:
        with contextlib.suppress(Unavailable):
            await context.waiters.until_terminal(prediction_id, CANCEL_WAIT_S)
        record = existing_job(await queue.jobs.get(prediction_id), prediction_id)
    return await _response(request, record, context)


@router.get("/webhooks/default/secret", responses=problems(503))
@returns_secret
async def webhook_secret(tenant: Tenant, services: ServicesDep) -> dict[str, str]:
    """Get the secret that signs the webhooks of predictions."""
    return {"key": (await services.queue.webhooks.account_secrets(tenant))[0].secret}


async def _parse(request: Request) -> PredictionRequest:
    require_type(request, JSON_TYPES)
    body = strict_json.decode(await request.body())
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
    return validated(PredictionRequest, body)


async def _create(
    request: Request,
    body: PredictionRequest,
    spec: ModelSpec,
    context: RequestContext,
    options: CreationOptions,
    key: Idempotency,
) -> Response:
    started_s, services = time.monotonic(), context.services
    wait_s = waiting.preferred_wait_s(options.prefer, min(MAX_WAIT_S, services.settings.max_wait_s))
    defaults: dict[str, Any] = {"priority": (Priority.INTERACTIVE if wait_s else Priority.STANDARD).value}
    if options.cancel_after is not None:
        defaults["deadline_s"] = deadline_s(options.cancel_after)
    job_request, names = parse_input(body.input, spec, {**defaults, **webhook_fields(body)})
    with names.in_errors():
        accepted = await submission.submit(job_request, context, key, webhook_version=model_version(spec))
    submitted = accepted.record
    record: JobRecord | None = None
    if wait_s:
        left_s = max(0.0, wait_s - RESPONSE_MARGIN_S - (time.monotonic() - started_s))
        with contextlib.suppress(Unavailable):
            await context.waiters.until_terminal(submitted.job.id, left_s)
            record = await services.queue.jobs.get(submitted.job.id)
    if record is None or not record.state.terminal:
        record = submitted
    if wait_s and not record.state.terminal:  # `starting`, also of a replay: clients take any other status for the end
        record = record.model_copy(update={"state": State.QUEUED})
    headers = {"Location": _prediction(record, context, [])["urls"]["get"]}
    if accepted.replayed:
        headers["Idempotent-Replayed"] = "true"
    if wait_s:
        headers["Preference-Applied"] = f"wait={wait_s:.0f}"
    return await _response(request, record, context, 201, headers)


async def _response(
    request: Request,
    record: JobRecord,
    context: RequestContext,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a prediction with its images."""
    urls = _urls(record, context) if record.state is State.SUCCEEDED else []
    if urls and _inlines(record, context):
        body = Base64Json(request, context.services.storage)
        images = [f"data:{one.content_type};base64,{body.add(one.key, one.bytes)}" for one in record.artifacts]
        # Just deleted, and the URLs respond with 404; or no memory is free now.
        with contextlib.suppress(NotFound, Overloaded):
            content = _prediction(record, context, images)
            return await body.response(content, param="output", status=status, headers=headers)
    return JSONResponse(_prediction(record, context, urls), status, headers)


def _prediction(record: JobRecord, context: RequestContext, outputs: list[str]) -> dict[str, Any]:
    version = ""
    with contextlib.suppress(UnknownModel):  # no longer served
        version = model_version(context.services.catalog.get(record.job.model))
    query = context.sign(record.job.id, "events")
    return prediction(record, context.base_url, version, outputs=outputs, stream_query=query)


def _urls(record: JobRecord, context: RequestContext) -> list[str]:
    """Return the signed URLs of a job's images."""
    base = f"{context.base_url}/v1/jobs/{record.job.id}/artifacts"
    return [f"{base}/{artifact.index}{context.sign(record.job.id, artifact.index)}" for artifact in record.artifacts]


def _inlines(record: JobRecord, context: RequestContext) -> bool:
    """Return whether images are data URLs: over http, because the SDKs take http URLs for text."""
    small = sum(artifact.bytes for artifact in record.artifacts) <= MAX_INLINE_BYTES
    return small and not context.base_url.startswith("https:")


async def outputs_of(request: Request, record: JobRecord, context: RequestContext) -> list[str]:
    """Return the images of a job as URLs or data URLs, which count as memory until the request ends."""
    if not _inlines(record, context):
        return _urls(record, context)
    size = 4 * sum(artifact.bytes for artifact in record.artifacts) // 3  # as base64
    try:
        count_response(request, size, size)
        images = [
            (image.content_type, await read_base64(context.services.storage, image.key)) for image in record.artifacts
        ]
        return [f"data:{content_type};base64,{data}" for content_type, data in images]
    except (NotFound, Overloaded):  # just deleted, and the URLs respond with 404; or no memory is free now
        return _urls(record, context)


def webhook_fields(body: PredictionRequest) -> dict[str, Any]:
    """Return the webhook fields of a job, or raise `InvalidRequest`."""
    chosen = body.webhook_events_filter
    if chosen is not None and body.webhook is None:
        raise InvalidRequest("webhook_events_filter: it needs a webhook", param="webhook_events_filter")
    if chosen is not None and "logs" in chosen:
        message = "webhook_events_filter: logs are not supported; read them from the prediction or its stream"
        raise InvalidRequest(message, param="webhook_events_filter")
    if body.webhook_completed is not None:
        if body.webhook is not None:
            message = "webhook_completed: send either webhook or webhook_completed"
            raise InvalidRequest(message, param="webhook_completed")
        return {"webhook": body.webhook_completed, "webhook_events": TERMINAL_EVENTS}
    if body.webhook is None:
        return {}
    events = [event for name in chosen or ("start", "completed") for event in _EVENTS[name]]
    return {"webhook": body.webhook, "webhook_events": tuple(dict.fromkeys(events))}


def deadline_s(cancel_after: str) -> float:
    """Return the seconds of the header `Cancel-After`, or raise `InvalidRequest`."""
    text = cancel_after.strip().lower()
    seconds = duration_s(f"{text}s" if text[-1:].isdigit() else text) or 0
    if not 0 < seconds <= MAX_DEADLINE_S:
        message = f"Cancel-After: invalid: {cancel_after[:32]}; use 90s, 5m or 1h30m, at most 7 days"
        raise InvalidRequest(message, param="Cancel-After")
    return float(seconds)
