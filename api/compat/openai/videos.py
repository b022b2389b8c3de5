"""`/v1/videos`: videos as OpenAI's protocol has them, which is asynchronous. Each is a job like any other."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, Response

from api import submission, waiting
from api.bodies import JSON_TYPES, UPLOAD_TYPES, require_type
from api.compat.openai.multipart import numeric_fields, parse_form
from api.compat.openai.openapi_bodies import generation_body
from api.compat.openai.pagination import Page, listed
from api.compat.sync_calls import deliver, earlier_attempt, request_digest
from api.http.openapi import problems
from api.http.streaming import StreamedResponse
from api.responses import find, placed
from api.routes.artifacts import Asked, To, object_answer
from api.visit import Context, RequestContext
from shared.config.adapters import AdapterChoice
from shared.errors import Conflict, FusequeueError, InvalidRequest, NotFound
from shared.inputs import store
from shared.job import JobRecord, State
from shared.protocols.openai.videos import VideoFields, parse_video_request, video_job_id, video_object
from shared.queue import Submitted
from shared.request import JobRequest
from shared.runtime import strict_json

router = APIRouter(prefix="/v1/videos", tags=["OpenAI"])

OVERHEAD_BYTES = 1024 * 1024
"""What a multipart body holds beside its picture."""

MAX_FIELDS = 128
DELETE_WAIT_S = 10.0
"""A video that is being made leaves at its next step: its deletion waits for that so long."""

_NUMBERS = numeric_fields(JobRequest, VideoFields, AdapterChoice)
_TO_COME = "in_" + 32 * "0"  # stands for a picture that is not stored yet
_POLL_RUNNING_MS = 1_000
_POLL_MS = (500, 10_000)
_ERRORS = problems(400, 404, 408, 409, 413, 415, 422, 429, 503)


@router.post("", openapi_extra=generation_body(VideoFields), responses=_ERRORS)
async def create_video(request: Request, context: Context) -> Response:
    """Ask for a video: JSON, or multipart with the picture to start from as `input_reference`. Fields of a job may
    stand beside OpenAI's own. It is there when its status is `completed`."""
    require_type(request, JSON_TYPES | UPLOAD_TYPES)
    if request.headers["content-type"].lower().startswith("multipart/"):
        async with request.form(max_files=1, max_fields=MAX_FIELDS, max_part_size=OVERHEAD_BYTES) as form:
            asked, digest = await _from_form(request, form, context)
    else:
        raw = await request.body()
        asked, digest = (
            parse_video_request(strict_json.decode(raw), context.services.catalog),
            request_digest(request, (raw,)),
        )
    record = await _joined(request, context, digest) or await _submitted(asked, context, digest)

    headers = {**await _headers(record, context), "Content-Type": "application/json"}
    answer = json.dumps(video_object(record)).encode()
    return StreamedResponse(deliver(request, context, digest, record.job.id, answer), headers=headers)


async def _from_form(request: Request, form: FormData, context: RequestContext) -> tuple[JobRequest, str]:
    """Return what a multipart body asks for, its picture stored, and the digest of it."""
    texts = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
    sent = [(name, value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
    body = parse_form(texts, _NUMBERS)
    digested = [part.encode("utf-8", "surrogatepass") for item in texts for part in item]
    if not sent:
        return parse_video_request(body, context.services.catalog), request_digest(request, digested)
    name, file = sent[0]
    if name != "input_reference" or name in body:
        raise InvalidRequest(f"{name[:64]}: no such file is taken, or it is given twice", param=name)
    asked = parse_video_request({**body, name: _TO_COME}, context.services.catalog)
    data, services = await file.read(), context.services
    ref = await store.store_input(
        data,
        tenant=context.tenant,
        queue=services.queue,
        storage=services.storage,
        settings=services.settings,
        param=name,
    )
    return asked.model_copy(update={"image": ref.id}), request_digest(request, [*digested, data])


async def _joined(request: Request, context: RequestContext, digest: str) -> JobRecord | None:
    """Return the job that an earlier try of this request made, whose answer did not arrive."""
    job_id = await earlier_attempt(request, context, digest)
    return None if job_id is None else await context.services.queue.jobs.get(job_id)


async def _submitted(asked: JobRequest, context: RequestContext, digest: str) -> JobRecord:
    item = await submission.submission_of(asked, context.tenant, context.services)
    if isinstance(item, Submitted):
        raise AssertionError("there is no key by which it could be known")
    outcome = (await submission.submit([item], context.services))[0]
    if isinstance(outcome, FusequeueError):
        raise outcome
    await context.services.queue.sync_calls.start(context.tenant, digest, outcome.job_id)
    return JobRecord(job=item.job, state=State.QUEUED)


@router.get("", responses=problems(422, 503))
async def list_videos(context: Context, asked: Annotated[Page, Query()]) -> Response:
    """List videos, newest first unless asked otherwise."""
    after = None if asked.after is None else video_job_id(asked.after)
    found, more = await context.services.queue.jobs.video_page(context.tenant, after, asked.rows, asked.order == "desc")
    return JSONResponse(listed([video_object(record) for record in found], more))


@router.get("/{video_id}", responses=problems(404, 503))
async def get_video(video_id: str, context: Context) -> Response:
    """Read a video; the header `openai-poll-after-ms` says when it is worth asking again."""
    record = await _find(video_id, context)
    return JSONResponse(video_object(record), headers=await _headers(record, context))


@router.delete("/{video_id}", responses=problems(404, 409, 503))
async def delete_video(video_id: str, context: Context) -> Response:
    """Delete a video; one that is not done is canceled first."""
    record = await _find(video_id, context)
    job_id, queue = record.job.id, context.services.queue
    if not record.state.terminal:
        canceled = await queue.jobs.cancel(job_id)
        if canceled is not None and not canceled.state.terminal:
            await waiting.until_terminal(job_id, DELETE_WAIT_S, context.services)
    await context.services.storage.delete_prefix(f"jobs/{job_id}/")
    if not await queue.jobs.forget(job_id) and await queue.jobs.get(job_id) is not None:
        raise Conflict(f"video {video_id} is being canceled; delete it in a moment", param="id")
    return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})


@router.get("/{video_id}/content", responses=problems(404, 416, 422, 503))
async def video_content(
    request: Request,
    video_id: str,
    context: Context,
    asked: Asked,
    variant: Literal["video", "thumbnail", "spritesheet"] = "video",
) -> Response:
    """Read the MP4 of a video, or its thumbnail, a JPEG; or a part of it."""
    record = await _find(video_id, context)
    video = next(iter(record.artifacts), None)
    if video is None:
        raise NotFound(f"video {video_id} is {video_object(record)['status']} and has no content", param="id")
    found = {"video": video, "thumbnail": video.thumbnail}.get(variant)
    if found is None:
        raise NotFound(f"video {video_id} has no {variant}", param="variant")
    return await object_answer(request, context, found, asked, To(f"{video_id}-{variant}", redirect=False))


async def _find(video_id: str, context: RequestContext) -> JobRecord:
    """Return the job that makes a video of the tenant, or raise `NotFound`."""
    try:
        record = await find(video_job_id(video_id), context)
    except NotFound:
        record = None
    if record is None or not record.job.task.makes_video:
        raise NotFound(f"there is no video {video_id[:64]}, or no longer", param="id")
    return record


async def _headers(record: JobRecord, context: RequestContext) -> dict[str, str]:
    return {} if record.state.terminal else {"openai-poll-after-ms": str(await _poll_ms(record, context))}


async def _poll_ms(record: JobRecord, context: RequestContext) -> int:
    """Return when it is worth asking again: soon for a video that is being made, by its place for one that waits."""
    place = await placed(record, context.services) if record.state is State.QUEUED else None
    if place is None or place.eta_s is None:
        return _POLL_RUNNING_MS
    least, most = _POLL_MS
    return max(least, min(most, round(500 * place.eta_s)))
