"""`/v1/images`: image requests that wait for their job, and stream its images with server-sent events."""

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.datastructures import FormData
from starlette.responses import Response

from api import strict_json
from api.context import Context, RequestContext, direct_context
from api.errors import STATUSES, problem
from api.http.base64_json import Base64Json
from api.http.bodies import max_json_bytes, read_body, read_form
from api.http.direct_routes import DirectRoute, route_of
from api.http.middleware import JSON_TYPES, UPLOAD_TYPES, require_type
from api.http.openapi import IMAGE_ID, event_stream
from api.http.streaming import SSE_KEEPALIVE, StreamedResponse, count_response, sse_message, sse_response
from api.jobs.request import JobRequest
from api.jobs.resolve import resolve
from api.protocols.base64_images import read_base64
from api.protocols.openai.image_requests import (
    ImageFields,
    ImageRequest,
    created_s,
    has_base64,
    image_data,
    images_object,
    parse_image_request,
    require_image,
    response_fields,
    usage,
)
from api.protocols.openai.request_bodies import (
    MAX_FIELDS,
    OVERHEAD_BYTES,
    PLACEHOLDER,
    Form,
    generation_body,
    numeric_fields,
    openai_problems,
)
from api.protocols.sync_calls import (
    RequestDigest,
    StreamInterrupted,
    SyncCall,
    failed_response,
    left_job,
    request_digest,
    submit,
    submit_with_key,
)
from api.submission import IdempotencyKey, idempotency_key
from shared.config.request_limits import MAX_INPUT_IMAGES
from shared.errors import Faults, InvalidRequest, NotFound, Unavailable
from shared.job import Job, State
from shared.job_record import FieldWarning, JobRecord
from shared.runtime.clock import now_ms

router = APIRouter(prefix="/v1/images", tags=["OpenAI"])

_NUMERIC = numeric_fields(JobRequest, ImageFields)
_ERRORS = openai_problems(404, 408, 409, 413, 415, 429, 500, 503, 504)


class ImageData(BaseModel):
    """One image: base64 and a URL, or the one that `response_format` names."""

    b64_json: str | None = None
    url: str | None = Field(None, description="Signed: needs no key until it expires.")
    revised_prompt: None = None
    seed: int
    flagged: bool


class ImagesResponse(BaseModel):
    """OpenAI's response; `id` is the job's."""

    id: str
    created: int
    data: list[ImageData]
    size: str
    quality: str
    output_format: str
    background: str
    usage: dict[str, object]
    warnings: list[FieldWarning]


_EVENTS = event_stream("The images; with `stream`, events `...partial_image`, `...completed` and `error`.")
_RESPONSES = {200: {"model": ImagesResponse, **_EVENTS}} | _ERRORS


_GENERATION_BODY = generation_body(
    ImageFields,
    example={"model": "demo", "prompt": "a red circle on a blue ground, left", "n": 2, "size": "64x64", "steps": 12},
)
_EDIT_BODY = generation_body(
    ImageFields,
    files={"image": "PNG, JPEG or WebP; several are `image[]`.", "mask": "PNG, JPEG or WebP."},
    required=("image", "prompt"),
    forms=sorted(UPLOAD_TYPES),
    example={"prompt": "a green cross on a white ground, top", "image": IMAGE_ID, "strength": 0.7},
)


@router.post("/generations", openapi_extra=_GENERATION_BODY, responses=_RESPONSES)
async def generate_images(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Generate images and wait for them. Job fields are allowed next to OpenAI's."""
    require_type(request, JSON_TYPES)
    raw = await request.body()
    parsed = parse_image_request(strict_json.decode(raw), context.services.catalog, "image_generation")
    return await _respond(request, context, parsed, request_digest(request, (raw,)), key)


@router.post("/edits", openapi_extra=_EDIT_BODY, responses=_RESPONSES)
async def edit_images(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Edit images and wait for the result: one `image` or several `image[]`, and a `mask` that is transparent where
    the image changes. In JSON, images are ids of `POST /v1/inputs`, data URLs or https URLs."""
    require_type(request, JSON_TYPES | UPLOAD_TYPES)
    if not request.headers["content-type"].lower().startswith("multipart/"):
        raw = await read_body(request, max_json_bytes(context.services.settings))
        parsed, digest = _parse_edit(strict_json.decode(raw), context), request_digest(request, (raw,))
    else:
        limits = {"max_files": MAX_INPUT_IMAGES + 1, "max_fields": MAX_FIELDS, "max_text_bytes": OVERHEAD_BYTES}
        async with read_form(request, **limits) as form:
            parsed, digest = await _parse_form(request, form, context)
    return await _respond(request, context, parsed, digest, key)


def _parse_edit(body: Any, context: RequestContext) -> ImageRequest:
    parsed = parse_image_request(body, context.services.catalog, "image_edit")
    require_image(parsed.request)
    return parsed


async def _parse_form(request: Request, form: FormData, context: RequestContext) -> tuple[ImageRequest, RequestDigest]:
    """Return the request of a multipart body and its digests; its images are stored."""
    parts = Form(form, _NUMERIC)
    names = [name for name, _ in parts.files]
    for name in names:
        if name not in ("image", "mask") or (name == "mask" and names.count(name) > 1):
            raise InvalidRequest(f"unexpected or repeated file field: {name[:64]}", param=name)
    # Checked with placeholders first: nothing is stored for a request that is refused.
    placeholders = _image_fields(names, [PLACEHOLDER] * len(names))
    if repeated := placeholders.keys() & parts.values.keys():
        name = min(repeated)
        raise InvalidRequest(f"{name}: send either a file or a text field", param=name)
    parsed = _parse_edit({**parts.values, **placeholders}, context)
    context.waiters.check()
    resolve(parsed.request, context.services, context.tenant)
    ids: list[str] = []
    faults = Faults()
    for name, (_, file) in zip(names, parts.files, strict=True):
        with faults.collected():
            ids.append(await parts.store(file, name, context))
    faults.check()
    job_request = parsed.request.model_copy(update=_image_fields(names, ids))
    return replace(parsed, request=job_request), request_digest(request, parts.digested)


def _image_fields(names: list[str], ids: list[str]) -> dict[str, object]:
    """Return the fields of a job for images with these names."""
    fields: dict[str, object] = {name: image for name, image in zip(names, ids, strict=True) if name == "mask"}
    images = tuple(image for name, image in zip(names, ids, strict=True) if name == "image")
    if images:
        fields |= {"image": images[0]} if len(images) == 1 else {"images": images}
    return fields


async def _respond(
    request: Request, context: RequestContext, parsed: ImageRequest, digest: RequestDigest, key: str | None
) -> Response:
    """Submit the job, or join that of an earlier request, and respond when it has ended."""
    services, replayed = context.services, False
    context.waiters.check()
    if key is not None:
        accepted = await submit_with_key(parsed.request, context, digest, key, parsed.previews)
        job_id, replayed = accepted.record.job.id, accepted.replayed
    else:
        earlier = await left_job(request, context, digest)
        if earlier is None or await services.queue.jobs.get(earlier) is None:
            earlier = (await submit(parsed.request, context, digest, parsed.previews)).id
        job_id = earlier
    call = SyncCall(job_id, digest, context)
    response = await _answer(request, context, parsed, call)
    if replayed:
        response.headers["Idempotent-Replayed"] = "true"
    return response


async def _answer(request: Request, context: RequestContext, parsed: ImageRequest, call: SyncCall) -> Response:
    """Return the stream of a call's job, or its images when it has ended."""
    services = context.services
    if parsed.fields.stream:
        return sse_response(call.track(ImageStream(call.job_id, parsed, context, request).events()))

    async def build(record: JobRecord) -> StreamedResponse:
        response_format, body = parsed.fields.response_format, Base64Json(request, services.storage)
        encoded = has_base64(response_format)
        images = [body.add(artifact.key, artifact.bytes) for artifact in record.artifacts if encoded]
        data = image_data(record, images, context.base_url, response_format=response_format, sign=context.sign)
        content = images_object(record, data, parsed.fields.quality, parsed.warnings)
        return await body.response(content, param="b64_json", headers={"Cache-Control": "no-store"})

    return await call.respond(request, build)


async def _generate_directly(request: Request) -> Response:
    context = await direct_context(request)
    return await generate_images(request, context, await idempotency_key(request.headers.get("idempotency-key")))


DIRECT = (DirectRoute(route_of(router, generate_images), re.compile("/v1/images/generations"), _generate_directly),)


@dataclass
class ImageStream:
    """Server-sent events of one job: previews, then its images or one `error`."""

    _job_id: str
    _parsed: ImageRequest
    _context: RequestContext
    _request: Request
    _sent: set[str] = field(default_factory=set)
    _job: Job | None = None

    async def events(self) -> AsyncGenerator[bytes]:
        queue = self._context.services.queue
        try:
            async for message in self._until_end():
                yield message
            record = await queue.jobs.get(self._job_id)
            if record is None or not record.state.terminal:
                raise Unavailable("the stream was interrupted; send the request again")
            if record.state is not State.SUCCEEDED:
                yield _error_event(failed_response(self._request.scope, record))
                return
            async for message in self._previews():
                yield message
            async for message in self._images(record):
                yield message
        except (Unavailable, NotFound) as error:  # the response status was sent already
            code = error.code if error.code in STATUSES else Unavailable.code
            yield _error_event(problem(self._request.scope, code, error.public))
            raise StreamInterrupted from error

    async def _until_end(self) -> AsyncGenerator[bytes]:
        """Yield previews and keep-alives until the job ends."""
        async with contextlib.aclosing(self._context.waiters.events(self._job_id)) as events:
            async for event in events:
                if event is None:
                    yield SSE_KEEPALIVE
                    continue
                if event.state is not None and event.state.terminal:
                    return
                async for message in self._previews():
                    yield message

    async def _previews(self) -> AsyncGenerator[bytes]:
        """Yield the previews that have not been sent."""
        if not self._parsed.previews:
            return
        queue = self._context.services.queue
        for preview in await queue.previews.get(self._job_id, self._sent):
            self._sent.add(preview.name)
            if self._job is None:
                record = await queue.jobs.get(self._job_id)
                if record is None:
                    return
                self._job = record.job
            fields = {
                "b64_json": preview.b64,
                "created_at": now_ms() // 1000,
                **response_fields(self._job, self._parsed.fields.quality),
                "output_format": self._job.output_format.preview_format.value,
                "partial_image_index": preview.number,
                "index": preview.index,
            }
            yield _event(f"{self._parsed.kind}.partial_image", fields)

    async def _images(self, record: JobRecord) -> AsyncGenerator[bytes]:
        """Yield one event per image; `index` extends OpenAI's event, which has no number."""
        largest = 4 * max(artifact.bytes for artifact in record.artifacts) // 3  # as base64
        count_response(self._request, largest, largest)
        for artifact in record.artifacts:
            fields = {
                "b64_json": await read_base64(self._context.services.storage, artifact.key),
                "created_at": created_s(record),
                **response_fields(record.job, self._parsed.fields.quality),
                "usage": usage(record.job),
                "warnings": [warning.model_dump() for warning in (*self._parsed.warnings, *record.warnings)],
                "id": record.job.id,
                "index": artifact.index,
                "seed": artifact.seed,
            }
            yield _event(f"{self._parsed.kind}.completed", fields)


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return sse_message(kind, json.dumps({"type": kind, **fields}, separators=(",", ":")))


def _error_event(response: Response) -> bytes:
    return sse_message("error", json.dumps(json.loads(bytes(response.body)), separators=(",", ":")))
