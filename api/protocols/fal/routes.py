"""`/compat/fal`: fal's queue protocol for its unmodified clients; jobs as queue requests, and uploads of inputs."""

import contextlib
import json
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from api import strict_json, submission
from api.context import Context, RequestContext, UploadContext
from api.errors import STATUSES, problem
from api.http import openapi
from api.http.bodies import read_body, release_body
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import event_stream, request_body
from api.http.streaming import SSE_KEEPALIVE, sse_message, sse_response
from api.jobs.request import validated
from api.protocols.fal.errors import FalProblem
from api.protocols.fal.objects import FalCancellation, FalResult, FalStatus, FalUpload, FalUploaded
from api.protocols.fal.queue_requests import (
    FILES,
    PREFIX,
    PRIORITIES,
    failure_of,
    log_lines,
    parse_input,
    result_object,
    status_object,
)
from api.protocols.model_names import find_model
from api.responses import existing_job
from api.submission import IdempotencyKey, idempotency
from shared.errors import InputRejected, InvalidRequest, NotFound, Unauthenticated, Unavailable
from shared.job import State
from shared.job_record import JobRecord

problems = partial(openapi.problems, model=FalProblem)
router = APIRouter(prefix=PREFIX, tags=["fal"])
upload_router = APIRouter(prefix=PREFIX, tags=["fal"])
"""The route of upload URLs, which can be signed."""

Logs = Annotated[bool, Query(description="Whether the status has logs.")]
_ERRORS = problems(401, 403, 404, 422, 429, 503)
_SUBMIT_ERRORS = problems(400, 401, 403, 404, 408, 413, 415, 422, 429, 503)
_EXAMPLE = {"prompt": "a red circle on a blue ground, left", "num_images": 2, "seed": 7}
_BODY = request_body("application/json", {"schema": {"type": "object"}, "example": _EXAMPLE})


@dataclass(frozen=True)
class SubmitOptions:
    """Headers and query of a request that submits a job."""

    priority: Annotated[str, Header(alias="x-fal-queue-priority", max_length=16)] = "normal"
    fal_webhook: Annotated[str | None, Query(description="Refused.")] = None
    key: IdempotencyKey = None


class UploadRequest(BaseModel):
    """The body that begins an upload."""

    model_config = ConfigDict(frozen=True)

    content_type: str = Field("application/octet-stream", max_length=255)
    file_name: str = Field("", max_length=1024)


@router.post(
    "/storage/upload/initiate",
    openapi_extra=request_body("application/json", {"schema": UploadRequest.model_json_schema()}),
    responses=_SUBMIT_ERRORS,
)
async def begin_fal_upload(request: Request, context: Context) -> FalUpload:
    """Begin the upload of an image: it is sent with `PUT` to `upload_url`, and named in an input by `file_url`."""
    require_type(request, JSON_TYPES)
    validated(UploadRequest, strict_json.decode(await request.body()))
    input_id = f"in_{secrets.token_hex(16)}"
    url = f"{context.base_url}{FILES}/{input_id}"
    return FalUpload(file_url=url, upload_url=url + context.sign_upload(input_id))


@upload_router.put(
    "/storage/files/{input_id}", openapi_extra=request_body("*/*", {"schema": {}}), responses=_SUBMIT_ERRORS
)
async def upload_fal_file(request: Request, input_id: str, context: UploadContext) -> FalUploaded:
    """Upload an image to a URL of `initiate`. A repeated upload changes nothing."""
    data = await read_body(request, context.services.settings.max_input_bytes)
    if not data:
        raise InputRejected("file: it is empty", param="file")
    await context.store_as(input_id, data, "file")
    return FalUploaded(file_url=f"{context.base_url}{FILES}/{input_id}")


@router.get("/{owner}/{name}/requests/{request_id}/status", responses=_ERRORS | {200: {"model": FalStatus}})
async def get_fal_status(owner: str, name: str, request_id: str, context: Context, logs: Logs = False) -> Response:
    """Get the status of a request: a read of its job, and of a queued one's position once a second."""
    return JSONResponse(await _status(await context.find_job(request_id), context, logs))


@router.get(
    "/{owner}/{name}/requests/{request_id}/status/stream",
    response_class=Response,
    responses=_ERRORS | {200: event_stream("Events with the status of the request, the last one `COMPLETED`.")},
)
async def stream_fal_status(
    request: Request, owner: str, name: str, request_id: str, context: Context, logs: Logs = False
) -> Response:
    """Stream the status of a request until it is completed."""
    record = await context.find_job(request_id)
    context.waiters.check()
    return sse_response(_statuses(record, context, logs, request.headers.getlist("authorization")))


@router.get(
    "/{owner}/{name}/requests/{request_id}",
    responses=problems(400, 401, 403, 404, 422, 429, 503) | {200: {"model": FalResult}},
)
async def get_fal_result(request: Request, owner: str, name: str, request_id: str, context: Context) -> Response:
    """Get the result of a completed request; 400 while it is not."""
    record = await context.find_job(request_id)
    headers = {"x-fal-request-id": request_id}
    if not record.state.terminal:
        return problem(request.scope, "bad_request", "the request is still in progress", headers=headers)
    if record.state is not State.SUCCEEDED:
        code, message = failure_of(record)
        # Its clients repeat a request on other statuses, and the result stays the same.
        code = code if STATUSES.get(code, (500, ""))[0] in (422, 500) else "job_failed"
        return problem(request.scope, code, message, headers=headers)
    base = f"{context.base_url}/v1/jobs/{request_id}/artifacts"
    result = result_object(record, lambda file: f"{base}/{file.index}{context.sign(request_id, file.index)}")
    return JSONResponse(result, headers=headers)


@router.put(
    "/{owner}/{name}/requests/{request_id}/cancel",
    status_code=202,
    responses=problems(401, 403, 404, 429, 503)
    | {202: {"model": FalCancellation}, 400: {"model": FalCancellation | FalProblem}},
)
async def cancel_fal_request(owner: str, name: str, request_id: str, context: Context) -> Response:
    """Cancel a request: a queued one at once, a running one at its next step; 400 for a completed one."""
    record = await context.find_job(request_id)
    if record.state.terminal:
        return JSONResponse({"status": "ALREADY_COMPLETED"}, 400)
    existing_job(await context.services.queue.jobs.cancel(request_id), request_id)
    return JSONResponse({"status": "CANCELLATION_REQUESTED"}, 202)


@router.post("/{owner}/{name}", openapi_extra=_BODY, responses=_SUBMIT_ERRORS | {200: {"model": FalStatus}})
async def submit_fal_request(
    request: Request, owner: str, name: str, context: Context, options: Annotated[SubmitOptions, Depends()]
) -> Response:
    """Submit a request. The path is `owner/model`; any owner is accepted for a model whose id has none."""
    require_type(request, JSON_TYPES)
    spec = find_model(owner, name, context.services.catalog)
    if options.fal_webhook is not None:
        message = "fal_webhook: not supported; POST /v1/webhooks creates an endpoint for the events of all jobs"
        raise InvalidRequest(message, param="fal_webhook")
    if options.priority not in PRIORITIES:
        message = f"X-Fal-Queue-Priority: {options.priority!r}; use {', '.join(PRIORITIES)}"
        raise InvalidRequest(message, param="X-Fal-Queue-Priority")
    raw = await request.body()
    recognized_by = idempotency(options.key, f"{spec.id} {options.priority}\n".encode() + raw)
    job_request, names = parse_input(strict_json.decode(raw), spec, {"priority": PRIORITIES[options.priority]})
    del raw
    release_body(request)
    with names.in_errors():
        accepted = await submission.submit(job_request, context, recognized_by)
    record = accepted.record
    headers = {"x-fal-request-id": record.job.id, **({"Idempotent-Replayed": "true"} if accepted.replayed else {})}
    return JSONResponse(await _status(record, context, logs=False), headers=headers)


async def _status(record: JobRecord, context: RequestContext, logs: bool) -> dict[str, Any]:
    """Return a status with the position of a queued job."""
    queue = await context.queue_position(record)
    position = None if queue is None else queue.position
    return status_object(record, context.base_url, position=position, with_logs=logs)


async def _statuses(record: JobRecord, context: RequestContext, logs: bool, key: list[str]) -> AsyncGenerator[bytes]:
    """Yield a status at every change and step; a client collects the log lines, so each is sent once.

    `key` has the authorization headers; the stream ends when the key is revoked.
    """
    job, services, seeded = record.job, context.services, 0
    try:
        async with contextlib.aclosing(context.waiters.events(job.id)) as events:
            async for event in events:
                with contextlib.suppress(Unavailable):
                    await services.authenticator.caller(key)
                if event is None:
                    yield SSE_KEEPALIVE
                    continue
                ended = event.state is not None and event.state.terminal
                if ended:
                    record = existing_job(await services.queue.jobs.get(job.id), job.id)
                elif event.state is not None:
                    record = record.model_copy(update={"state": event.state})
                elif event.progress is not None:
                    record = record.model_copy(update={"state": State.RUNNING, "progress": event.progress})
                status = await _status(record, context, logs)
                if logs and "logs" in status:
                    status["logs"], seeded = log_lines(record, record.progress)[seeded:], 1
                yield sse_message("status", json.dumps(status, separators=(",", ":")))
                if ended:
                    return
    except (Unavailable, NotFound, Unauthenticated):
        return  # too late for a status: the client reads the status
