"""`/v1/images/...`: pictures in one call. Each is a job like any other, waited for by the request that made it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from api.bodies import JSON_TYPES, UPLOAD_TYPES, require_type
from api.compat.openai import image_stream, results
from api.compat.openai.multipart import numeric_fields, parse_form
from api.compat.openai.openapi_bodies import generation_body
from api.compat.sync_calls import SyncCall, is_retry, request_digest, submit
from api.http.openapi import problems
from api.http.streaming import StreamedResponse
from api.visit import Context, RequestContext
from shared.config.adapters import AdapterChoice
from shared.config.models_file import MAX_INPUT_IMAGES
from shared.errors import InvalidRequest
from shared.inputs import store
from shared.job import JobRecord
from shared.protocols.openai.images import ImageFields, ImageRequest, parse_image_request
from shared.request import JobRequest
from shared.runtime import strict_json

router = APIRouter(prefix="/v1/images", tags=["OpenAI"])

OVERHEAD_BYTES = 1024 * 1024
"""What a multipart body holds beside its pictures: the prompt, and the heads of the parts."""

MAX_FIELDS = 128
_NUMBERS = numeric_fields(JobRequest, ImageFields, AdapterChoice)
_ERRORS = problems(400, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504)
# Stands for a picture that is not stored yet: nothing is stored for a request that would be refused anyway.
_TO_COME = "in_" + 32 * "0"


class ImageData(BaseModel):
    """One picture, in one of the two ways."""

    b64_json: str | None = None
    url: str | None = Field(None, description="Needs no key for a while.")
    revised_prompt: None = None
    seed: int
    flagged: bool


class ImagesResponse(BaseModel):
    """OpenAI's answer; `id` is the job's."""

    id: str
    created: int
    data: list[ImageData]
    size: str
    quality: str
    output_format: str
    background: str
    usage: dict[str, object]


_ANSWER = {200: {"model": ImagesResponse, "description": "The pictures; Server-Sent Events with `stream`."}} | _ERRORS


@router.post("/generations", openapi_extra=generation_body(ImageFields), responses=_ANSWER)
async def generate(request: Request, context: Context) -> Response:
    """Make pictures from words and wait for them. Fields of a job may stand beside OpenAI's own."""
    require_type(request, JSON_TYPES)
    raw = await request.body()
    asked = parse_image_request(strict_json.decode(raw), context.services.catalog, "image_generation")
    return await _answered(request, context, asked, request_digest(request, (raw,)))


@router.post("/edits", openapi_extra=generation_body(ImageFields, upload=True), responses=_ANSWER)
async def edit(request: Request, context: Context) -> Response:
    """Make pictures from pictures and wait for them: `image` or several `image[]`, and a `mask` that is transparent
    where something new is wanted. As JSON, pictures are ids of `POST /v1/inputs`, data URLs or https URLs."""
    require_type(request, JSON_TYPES | UPLOAD_TYPES)
    if not request.headers["content-type"].lower().startswith("multipart/"):
        raw = await request.body()
        asked = _with_picture(parse_image_request(strict_json.decode(raw), context.services.catalog, "image_edit"))
        return await _answered(request, context, asked, request_digest(request, (raw,)))
    async with request.form(
        max_files=MAX_INPUT_IMAGES + 1, max_fields=MAX_FIELDS, max_part_size=OVERHEAD_BYTES
    ) as form:
        asked, digest = await _from_form(request, form, context)
    return await _answered(request, context, asked, digest)


async def _from_form(request: Request, form: FormData, context: RequestContext) -> tuple[ImageRequest, str]:
    """Return what a multipart body asks for, its pictures stored, and the digest of it."""
    texts = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
    files = [(name.removesuffix("[]"), value) for name, value in form.multi_items() if isinstance(value, UploadFile)]
    for name, _ in files:
        if name not in ("image", "mask") or (name == "mask" and [other for other, _ in files].count(name) > 1):
            raise InvalidRequest(f"{name[:64]}: no such file is taken, or it is given twice", param=name)
    body = parse_form(texts, _NUMBERS)
    named: dict[str, Any] = dict.fromkeys((name for name, _ in files), _TO_COME)
    count = sum(name == "image" for name, _ in files)
    if count > 1:
        named["images"] = [named.pop("image")] * count
    asked = _with_picture(parse_image_request({**body, **named}, context.services.catalog, "image_edit"))
    digested = [part.encode("utf-8", "surrogatepass") for item in texts for part in item]
    stored: dict[str, list[str]] = {}
    for name, file in files:
        data = await file.read()
        digested += [name.encode(), data]
        services = context.services
        ref = await store.store_input(
            data,
            tenant=context.tenant,
            queue=services.queue,
            storage=services.storage,
            settings=services.settings,
            param=name,
        )
        stored.setdefault(name, []).append(ref.id)
    images = stored.pop("image", [])
    put: dict[str, object] = {name: ids[0] for name, ids in stored.items()}
    if images:
        put |= {"image": images[0]} if len(images) == 1 else {"images": tuple(images)}
    known = ImageRequest(asked.request.model_copy(update=put), asked.fields, asked.kind)
    return known, request_digest(request, digested)


def _with_picture(asked: ImageRequest) -> ImageRequest:
    if asked.request.image is None and asked.request.images is None:
        raise InvalidRequest("image: an edit needs one", param="image")
    return asked


async def _answered(request: Request, context: RequestContext, asked: ImageRequest, digest: str) -> Response:
    """Put the job in line, or find that of an earlier try, and answer when it has ended."""
    context.services.waiter_limit.check()
    job_id = await _joined(request, context, digest) or await submit(asked.request, context, digest, asked.previews)
    found = SyncCall(job_id, context.tenant, digest, context.services)
    if asked.fields.stream:
        return StreamedResponse(
            found.delivering(image_stream.lines(job_id, asked, context, request.scope)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def pictures(record: JobRecord) -> StreamedResponse:
        whole = await results.body(record, asked, context)
        headers = {"Content-Length": str(len(whole)), "Cache-Control": "no-store"}
        return StreamedResponse(results.pieces(whole), media_type="application/json", headers=headers)

    return await found.answered(request, pictures)


async def _joined(request: Request, context: RequestContext, digest: str) -> str | None:
    """Return the job that an earlier try of this request made, None where there is none to wait for."""
    queue = context.services.queue
    job_id = await queue.sync_calls.join(context.tenant, digest) if is_retry(request) else None
    return job_id if job_id is not None and await queue.jobs.get(job_id) is not None else None
