"""Routes of input images, videos and sounds: upload, list, read, delete."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.responses import Response

from api.context import Context, RequestContext
from api.http.bodies import read_form
from api.http.lists import MAX_LIMIT, After, Limit, Order, known_parameters
from api.http.middleware import UPLOAD_TYPES, require_type
from api.http.openapi import problems, upload_body
from api.jobs.job_object import iso
from api.routes.artifacts import IMAGE_RESPONSES, ConditionsDep, object_response
from shared.errors import InputRejected, InvalidRequest, NotFound
from shared.queue.inputs import StoredInput
from shared.runtime.clock import now_ms

router = APIRouter(prefix="/v1/inputs", tags=["inputs"])

# Size of a multipart body in addition to its file: boundaries, and the headers of a few parts.
OVERHEAD_BYTES = 64 * 1024


class InputObject(BaseModel):
    """A stored image, video or sound; send its `id` as the `image`, `video` or `audio` of a job.

    Equal files have equal ids.
    """

    id: str = Field(examples=["in_0123456789abcdef0123456789abcdef"])
    object: str = "input"
    kind: Literal["image", "video", "audio", "latents"]
    width: int
    height: int
    duration_s: float | None = Field(None, description="Of a sound, whose width and height are 0.")
    content_type: str
    bytes: int = Field(description="Size of what is kept: metadata are dropped.")
    frames: int | None = Field(None, description="Videos only.")
    fps: float | None = Field(None, description="The mean rate of the frames; videos only.")
    expires_at: str | None = Field(
        description="When it is deleted; each upload and each use postpones this. Null while a job uses it."
    )


class InputList(BaseModel):
    """A page of inputs; `after=next_cursor` returns the next one."""

    object: Literal["list"] = "list"
    data: list[InputObject]
    has_more: bool
    next_cursor: str | None


@router.post(
    "",
    status_code=201,
    openapi_extra=upload_body(),
    responses=problems(400, 408, 413, 415, 422, 429, 503) | {201: {"model": InputObject}},
)
async def upload_input(request: Request, context: Context) -> Response:
    """Upload a PNG, JPEG or WebP, an MP4 or MOV, or a WAV, FLAC, MP3 or Ogg, as the multipart field `file`."""
    require_type(request, UPLOAD_TYPES)
    async with read_form(request, max_files=1, max_fields=4, max_text_bytes=OVERHEAD_BYTES) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file: the multipart body has no file in a field of this name", param="file")
        if not file.size:
            raise InputRejected("file: it is empty", param="file")
        ref = await context.store_upload(file, "file")
    expires_at_ms = now_ms() + context.services.queue.client.policy("input_retention_s") * 1000
    uploaded = _object(StoredInput(ref, expires_at_ms))
    return Response(uploaded.model_dump_json(), 201, media_type="application/json")


@router.get("", responses=problems(422, 503), dependencies=[known_parameters("after", "limit", "order")])
async def list_inputs(context: Context, after: After = None, limit: Limit = 20, order: Order = "desc") -> InputList:
    """List the stored images, by default newest first."""
    inputs, cursor = await context.services.queue.inputs.page(
        context.tenant, after, min(limit, MAX_LIMIT), newest_first=order == "desc"
    )
    return InputList(data=[_object(one) for one in inputs], has_more=cursor is not None, next_cursor=cursor)


@router.get("/{input_id}", responses=problems(404, 503))
async def get_input(input_id: str, context: Context) -> InputObject:
    """Read the metadata of an input."""
    return _object(await find_input(input_id, context))


@router.get("/{input_id}/content", response_class=Response, responses=IMAGE_RESPONSES)
async def get_input_content(request: Request, input_id: str, context: Context, conditions: ConditionsDep) -> Response:
    """Read the image of an input, or a part of it."""
    ref = (await find_input(input_id, context)).ref
    return await object_response(request, context.services.storage, ref, conditions, name=input_id)


@router.delete("/{input_id}", status_code=204, responses=problems(404, 409, 503))
async def delete_input(input_id: str, context: Context) -> Response:
    """Delete an input; 409 while a job that has not ended uses it."""
    await forget_input(input_id, context)
    return Response(status_code=204)


async def find_input(input_id: str, context: RequestContext) -> StoredInput:
    """Return an input of the tenant, or raise `NotFound`."""
    (found,) = await context.services.queue.inputs.get_many(context.tenant, [input_id])
    if found is None:
        raise _no_input(input_id)
    return found


async def forget_input(input_id: str, context: RequestContext) -> None:
    """Delete an input of the tenant and its object, or raise `NotFound`."""
    maintenance = context.services.queue.maintenance
    item = await maintenance.forget_input(context.tenant, input_id)
    if item is None:
        raise _no_input(input_id)
    await context.services.storage.delete_prefix(item.prefix)
    await maintenance.forget_item(item)


def _no_input(input_id: str) -> NotFound:
    return NotFound(f"there is no input {input_id[:64]}, or it has been deleted", param="id")


def _object(stored: StoredInput) -> InputObject:
    fields = stored.ref.model_dump(exclude={"key"})
    return InputObject(**fields, kind=stored.ref.kind, expires_at=iso(stored.expires_at_ms))
