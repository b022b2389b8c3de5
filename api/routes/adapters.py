"""Routes of uploaded adapters: upload, list, read, delete."""

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response

from api.context import Context, RequestContext
from api.http.bodies import read_form
from api.http.lists import MAX_LIMIT, After, Limit, Order, known_parameters
from api.http.middleware import UPLOAD_TYPES, require_type
from api.http.openapi import problems, request_body
from api.jobs.adapter_intake import AdapterIntake, token_in
from api.jobs.job_object import iso
from api.jobs.request import validated
from api.submission import Idempotency, IdempotencyKey, reserved_id
from shared.config.adapters import TOKEN_PATTERN, Kind, UploadedAdapter
from shared.config.model_spec import ModelSpec
from shared.errors import InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from shared.inputs import adapter_store
from shared.inputs.adapter_check import unusual_weights
from shared.inputs.formats.safetensors import TensorEntry
from shared.runtime.clock import new_id, now_ms

router = APIRouter(prefix="/v1/adapters", tags=["adapters"])

OVERHEAD_BYTES = 64 * 1024
"""Allowance of a multipart body next to its file."""


class AdapterUpload(BaseModel):
    """The text fields of an upload."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: Annotated[str, Field(max_length=128, description="The model whose jobs can use it.")]
    name: Annotated[str, Field(max_length=128, description="For people; jobs use the id. Unset: the file's name.")] = ""
    component: Annotated[
        str | None, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="`transformer_2`: the second denoiser.")
    ] = None
    token: Annotated[
        str | None,
        Field(
            pattern=TOKEN_PATTERN,
            description="The word of an embedding in prompts. Unset: that in the file, or the file's name.",
        ),
    ] = None
    scale: Annotated[float, Field(ge=-10, le=10, description="Weight in jobs that set none.")] = 1.0
    max_scale: Annotated[float, Field(gt=0, le=10, description="Largest weight of a job, also negative.")] = 2.0


class UploadedAdapterObject(BaseModel):
    """An uploaded or fetched adapter; name its `id` in `adapters` of jobs of its model."""

    id: str = Field(examples=["adapter_01k5zt8e2vw8r4n6y9qbcdefgh"])
    object: str = "adapter"
    model: str
    name: str
    kind: Kind = Field(description="An embedding (textual inversion) has no scale.")
    token: str | None = Field(description="Of an embedding: the word that stands for it in prompts.")
    component: str | None
    scale: float
    max_scale: float
    bytes: int
    sha256: str
    created_at: str
    source: str | None = Field(None, description="Of one that was fetched: its URL, without the query.")
    warnings: list[str] = Field([], description="Of an upload: weights of the file that may have no effect.")


class UploadedAdapterList(BaseModel):
    """A page of adapters; `after=next_cursor` returns the next one."""

    object: Literal["list"] = "list"
    data: list[UploadedAdapterObject]
    has_more: bool
    next_cursor: str | None


_FILE = {"type": "string", "format": "binary", "description": "A safetensors file of LoRA weights, or of an embedding."}
_FIELDS = AdapterUpload.model_json_schema()["properties"]
_SCHEMA = {"type": "object", "required": ["file", "model"], "properties": {"file": _FILE, **_FIELDS}}
_BODY = request_body("multipart/form-data", {"schema": _SCHEMA})


@router.post(
    "",
    status_code=201,
    openapi_extra=_BODY,
    responses=problems(400, 404, 408, 409, 413, 415, 422, 429, 503) | {201: {"model": UploadedAdapterObject}},
)
async def upload_adapter(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Upload a LoRA or an embedding for a model as the multipart fields `file` and `model`. Its jobs can use it at
    once, without a restart; it is kept until it is deleted."""
    require_type(request, UPLOAD_TYPES)
    async with read_form(request, max_files=1, max_fields=8, max_text_bytes=OVERHEAD_BYTES) as form:
        file, size = _checked_form(form, context.services.settings.max_adapter_bytes)
        fields = validated(AdapterUpload, {name: text for name, text in form.items() if isinstance(text, str)})
        spec = _checked_spec(fields, context)
        fields = fields.model_copy(update={"model": spec.id})
        intake = AdapterIntake(context.tenant, context.services.queue, context.services.storage)
        sha256, tensors = await intake.check(file.file, size, spec, fields.component)
        token = _checked_token(tensors, file.filename or "", fields)
        fingerprint = hashlib.sha256(f"{sha256} {fields.model_dump_json()}".encode()).hexdigest()
        adapter_id = await reserved_id(Idempotency(key, fingerprint), new_id("adapter"), context)
        adapter = UploadedAdapter(
            **{**fields.model_dump(), "name": fields.name or (file.filename or "adapter")[:128], "token": token},
            id=adapter_id,
            bytes=size,
            parts=adapter_store.number_of_parts(size),
            sha256=sha256,
            created_at_ms=now_ms(),
        )
        earlier = None if key is None else await _earlier(adapter_id, context)
        if earlier is None:
            await file.seek(0)
            await intake.store(file.read, adapter)
    headers = {} if earlier is None else {"Idempotent-Replayed": "true"}
    warning = unusual_weights(tensors)
    made = _object(earlier or adapter).model_copy(update={"warnings": [] if warning is None else [warning]})
    return Response(made.model_dump_json(), 201, headers=headers, media_type="application/json")


@router.get("", responses=problems(422, 503), dependencies=[known_parameters("after", "limit", "order")])
async def list_adapters(
    context: Context, after: After = None, limit: Limit = 20, order: Order = "desc"
) -> UploadedAdapterList:
    """List the uploaded and fetched adapters, by default newest first."""
    found, cursor = await context.services.queue.adapters.page(
        context.tenant, after, min(limit, MAX_LIMIT), newest_first=order == "desc"
    )
    return UploadedAdapterList(data=[_object(one) for one in found], has_more=cursor is not None, next_cursor=cursor)


@router.get("/{adapter_id}", responses=problems(404, 503))
async def get_adapter(adapter_id: str, context: Context) -> UploadedAdapterObject:
    """Read the metadata of an adapter."""
    return _object(await context.services.queue.adapters.get(context.tenant, adapter_id))


@router.delete("/{adapter_id}", status_code=204, responses=problems(404, 409, 503))
async def delete_adapter(adapter_id: str, context: Context) -> Response:
    """Delete an adapter; 409 while a job that has not ended uses it."""
    services = context.services
    item = await services.queue.adapters.forget(context.tenant, adapter_id)
    with contextlib.suppress(Unavailable):  # a sweep deletes what an outage of the storage leaves
        await services.storage.delete_prefix(item.prefix)
        await services.queue.maintenance.forget_item(item)
    return Response(status_code=204)


def _checked_form(form: FormData, max_bytes: int) -> tuple[UploadFile, int]:
    """Return the uploaded file and its size, or raise the error of an invalid form."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("file: the multipart body has no file in a field of this name", param="file")
    if not file.size:
        raise InvalidRequest("file: it is empty", param="file")
    if file.size > max_bytes:
        raise PayloadTooLarge(f"file: {file.size} bytes; at most {max_bytes} are allowed", param="file")
    return file, file.size


def _checked_spec(fields: AdapterUpload, context: RequestContext) -> ModelSpec:
    """Return the model of an upload, or raise `InvalidRequest`."""
    spec = context.services.catalog.get(fields.model)
    if spec.adapters_refused is not None:
        message = f"model: {spec.id!r} takes no uploaded adapters: {spec.adapters_refused}"
        raise InvalidRequest(message, param="model")
    if abs(fields.scale) > fields.max_scale:
        raise InvalidRequest(f"scale: {fields.scale} is above max_scale {fields.max_scale}", param="scale")
    return spec


def _checked_token(tensors: Sequence[TensorEntry], file_name: str, fields: AdapterUpload) -> str | None:
    """Return the word of an embedding, None for a LoRA; raises `InvalidRequest` for fields of the other kind."""
    token = token_in(tensors, file_name, fields.token)
    if token is not None and fields.scale != 1:
        raise InvalidRequest("scale: an embedding has none; leave it out", param="scale")
    if token is not None and fields.component is not None:
        raise InvalidRequest("component: an embedding is for the text encoders; leave it out", param="component")
    return token


async def _earlier(adapter_id: str, context: RequestContext) -> UploadedAdapter | None:
    with contextlib.suppress(NotFound):
        return await context.services.queue.adapters.get(context.tenant, adapter_id)
    return None


def _object(adapter: UploadedAdapter) -> UploadedAdapterObject:
    fields = adapter.model_dump(exclude={"parts", "created_at_ms"})
    return UploadedAdapterObject(**fields, kind=adapter.kind, created_at=iso(adapter.created_at_ms) or "")
