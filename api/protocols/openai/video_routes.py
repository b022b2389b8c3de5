"""`/v1/videos`: asynchronous video requests; each is a job."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData
from starlette.responses import JSONResponse, Response

from api import strict_json
from api.context import Context, RequestContext
from api.http.bodies import read_form
from api.http.middleware import JSON_TYPES, UPLOAD_TYPES, URLENCODED_TYPES, content_type_of, require_type
from api.http.openapi import problems
from api.jobs.request import JobRequest
from api.jobs.resolve import resolve
from api.protocols.openai.objects import DeletedVideo, VideoList, VideoObject
from api.protocols.openai.request_bodies import (
    LIST_PARAMETERS,
    MAX_FIELDS,
    OVERHEAD_BYTES,
    PLACEHOLDER,
    Form,
    ListParams,
    generation_body,
    list_page,
    numeric_fields,
    openai_problems,
)
from api.protocols.openai.video_requests import (
    VideoFields,
    VideoRequest,
    parse_video_request,
    video_job_id,
    video_object,
)
from api.protocols.sync_calls import (
    RequestDigest,
    created_response,
    earlier_attempt,
    request_digest,
    submit,
    submit_with_key,
)
from api.routes.artifacts import OBJECT_CONTENT, ConditionsDep, object_response, storage_of
from api.routes.job_changes import delete_ended
from api.submission import IdempotencyKey
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.job import State
from shared.job_record import JobRecord

router = APIRouter(prefix="/v1/videos", tags=["OpenAI"])

DELETE_WAIT_S = 10.0
"""Time for a running job to leave its batch, which it does at its next step."""

_NUMERIC = numeric_fields(JobRequest, VideoFields)
_ERRORS = openai_problems(404, 408, 409, 413, 415, 429, 503)
_BODY = generation_body(
    VideoFields,
    files={"input_reference": "Start from this image: a PNG, JPEG or WebP."},
    required=("prompt",),
    forms=sorted(UPLOAD_TYPES | URLENCODED_TYPES),
    example={"prompt": "a wave breaks", "seconds": 4},
)


@router.post("", openapi_extra=_BODY, responses=_ERRORS | {200: {"model": VideoObject}})
async def create_video(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Create a video from JSON or a form; a multipart form can have a start image as `input_reference`. Job fields are
    allowed next to OpenAI's. The video is ready when its status is `completed`."""
    require_type(request, JSON_TYPES | UPLOAD_TYPES | URLENCODED_TYPES)
    if content_type_of(request) in JSON_TYPES:
        raw = await request.body()
        parsed = parse_video_request(strict_json.decode(raw), context.services.catalog)
        digest = request_digest(request, (raw,))
    else:
        async with read_form(request, max_files=1, max_fields=MAX_FIELDS, max_text_bytes=OVERHEAD_BYTES) as form:
            parsed, digest = await _parse_form(request, form, context)
    replayed = False
    if key is not None:
        accepted = await submit_with_key(parsed.request, context, digest, key)
        record, replayed = accepted.record, accepted.replayed
    else:
        job_id = await earlier_attempt(request, context, digest)
        earlier = None if job_id is None else await context.services.queue.jobs.get(job_id)
        record = earlier or JobRecord(job=await submit(parsed.request, context, digest), state=State.QUEUED)
    headers = {**await _headers(record, context), **({"Idempotent-Replayed": "true"} if replayed else {})}
    content = video_object(record)
    content["warnings"] = [*(warning.model_dump() for warning in parsed.warnings), *content["warnings"]]
    return created_response(request, context, digest, record.job.id, content, **headers)


async def _parse_form(request: Request, form: FormData, context: RequestContext) -> tuple[VideoRequest, RequestDigest]:
    """Return the request of a form and its digests; its image is stored."""
    parts, catalog = Form(form, _NUMERIC), context.services.catalog
    if not parts.files:
        return parse_video_request(parts.values, catalog), request_digest(request, parts.digested)
    name, file = parts.files[0]
    if name != "input_reference" or name in parts.values:
        raise InvalidRequest(f"unexpected or repeated file field: {name[:64]}", param=name)
    parsed = parse_video_request({**parts.values, name: PLACEHOLDER}, catalog)
    resolve(parsed.request, context.services, context.tenant)  # before its image is stored
    image = await parts.store(file, name, context)
    job_request = parsed.request.model_copy(update={"image": image})
    return VideoRequest(job_request, parsed.warnings), request_digest(request, parts.digested)


@router.get("", responses=openai_problems(503) | {200: {"model": VideoList}}, dependencies=[LIST_PARAMETERS])
async def list_videos(context: Context, params: Annotated[ListParams, Query()]) -> Response:
    """List videos, by default newest first."""
    after = None if params.after is None else video_job_id(params.after)
    records, more = await context.services.queue.jobs.video_page(
        context.tenant, after, params.rows, params.order == "desc"
    )
    return JSONResponse(list_page([video_object(record) for record in records], more))


@router.get("/{video_id}", responses=problems(404, 503) | {200: {"model": VideoObject}})
async def get_video(video_id: str, context: Context) -> Response:
    """Get a video; the header `openai-poll-after-ms` is the recommended delay of the next poll."""
    record = await _find(video_id, context)
    return JSONResponse(video_object(record), headers=await _headers(record, context))


@router.delete("/{video_id}", responses=problems(404, 409, 503) | {200: {"model": DeletedVideo}})
async def delete_video(video_id: str, context: Context) -> Response:
    """Delete a video; cancels it first if it has not ended."""
    record = await _find(video_id, context)
    job_id, queue = record.job.id, context.services.queue
    if not record.state.terminal:
        canceled = await queue.jobs.cancel(job_id)
        if canceled is not None and not canceled.state.terminal:
            await context.waiters.until_terminal(job_id, DELETE_WAIT_S)
    if not await delete_ended(job_id, context) and await queue.jobs.get(job_id) is not None:
        raise Conflict(f"video is being canceled: {video_id}; delete it again later", param="id")
    return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})


@router.get("/{video_id}/content", response_class=Response, responses=openai_problems(404, 416, 503) | OBJECT_CONTENT)
async def get_video_content(
    request: Request,
    video_id: str,
    context: Context,
    conditions: ConditionsDep,
    variant: Literal["video", "thumbnail", "spritesheet"] = "video",
) -> Response:
    """Get the MP4 of a video or its JPEG thumbnail; supports ranges."""
    record = await _find(video_id, context)
    video = next(iter(record.artifacts), None)
    if video is None:
        raise NotFound(f"video {video_id} is {video_object(record)['status']} and has no content", param="id")
    storage = storage_of(video, context)
    stored = {"video": video, "thumbnail": video.thumbnail}.get(variant)
    if stored is None:
        raise NotFound(f"video {video_id} has no {variant}", param="variant")
    name = f"{video_id}-{variant}"
    return await object_response(request, storage, stored, conditions, name=name)


async def _find(video_id: str, context: RequestContext) -> JobRecord:
    """Return the job of a tenant's video, or raise `NotFound`."""
    try:
        record = await context.find_job(video_job_id(video_id))
    except NotFound:
        record = None
    if record is None or not record.job.task.makes_video:
        raise NotFound(f"no such video: {video_id[:64]}", param="id")
    return record


async def _headers(record: JobRecord, context: RequestContext) -> dict[str, str]:
    """Return the delay of the next poll: 1 s for a running video, half of the ETA for a queued one."""
    if record.state.terminal:
        return {}
    position, poll_ms = await context.queue_position(record), 1_000
    if position is not None and position.eta_s is not None:
        poll_ms = max(500, min(10_000, round(500 * position.eta_s)))
    return {"openai-poll-after-ms": str(poll_ms)}
