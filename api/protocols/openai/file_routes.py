"""`/v1/files`: the input and output files of batches."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import FormData, UploadFile
from starlette.responses import JSONResponse, Response

from api.context import Context, RequestContext
from api.http.bodies import read_form
from api.http.lists import known_parameters
from api.http.middleware import UPLOAD_TYPES, require_type
from api.http.openapi import problems, request_body
from api.http.streaming import StreamedResponse, count_response, with_first_read
from api.jobs.request import validated
from api.protocols.openai import stored_files
from api.protocols.openai.objects import DeletedFile, FileList, FileObject
from api.protocols.openai.request_bodies import ListParams, list_page, openai_problems, parse_form
from api.protocols.openai.stored_files import ExpiresAfter
from api.protocols.sync_calls import RequestDigest, created_response, earlier_attempt, request_digest
from api.submission import Idempotency, IdempotencyKey, reserved_id
from shared.batch import File, file_prefix
from shared.errors import FusequeueError, InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from shared.runtime.clock import new_id

router = APIRouter(prefix="/v1/files", tags=["files and batches"])

OVERHEAD_BYTES = 64 * 1024
"""Allowance of a multipart body next to its file."""

UPLOAD_WAIT_S = 30.0
"""How long a retry waits for the upload of its first attempt before it stores its own."""

BEGIN_WAIT_S = 1.0
"""How long a retry waits for the first attempt to begin its upload; one whose file was deleted does not."""

_READ_BYTES = 1024 * 1024
_POLL_S = 0.1
_FIELDS = {
    "file": {"type": "string", "format": "binary"},
    "purpose": {"type": "string", "enum": ["batch"]},
    "expires_after": ExpiresAfter.model_json_schema(),
}
_SCHEMA = {"type": "object", "required": ["file", "purpose"], "properties": _FIELDS}
_BODY = request_body("multipart/form-data", {"schema": _SCHEMA})
_CONTENT = {"description": "The lines.", "content": {stored_files.CONTENT_TYPE: {"schema": {"type": "string"}}}}


class FileListParams(ListParams):
    purpose: str | None = None


@router.post(
    "", openapi_extra=_BODY, responses=openai_problems(408, 409, 413, 415, 429, 503) | {200: {"model": FileObject}}
)
async def upload_file(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Upload the JSONL file of a batch: multipart fields `file` and `purpose`, which is `batch`. `expires_after` is how
    long the file is kept; a running batch keeps its file anyway."""
    require_type(request, UPLOAD_TYPES)
    async with read_form(request, max_files=1, max_fields=8, max_text_bytes=OVERHEAD_BYTES) as form:
        content, size = _checked_file(form, context.services.settings.max_file_bytes)
        keep_s = _keep_s(form) or context.services.settings.file_retention_s
        digest = await _digest(request, content, keep_s)
        new = new_id("file")
        file_id = await reserved_id(Idempotency(key, digest.body), new, context)
        earlier_id = file_id if file_id != new else await earlier_attempt(request, context, digest)
        earlier = await _earlier_file(earlier_id, context)
        file = earlier or await _store(content, size, keep_s, context, digest, file_id)
    headers = {} if key is None or earlier is None else {"Idempotent-Replayed": "true"}
    return created_response(request, context, digest, file.id, file_object(file), **headers)


def _checked_file(form: FormData, max_bytes: int) -> tuple[UploadFile, int]:
    """Return the uploaded file and its size, or raise the error of an invalid form."""
    content, purpose = form.get("file"), form.get("purpose")
    if not isinstance(content, UploadFile):
        raise InvalidRequest("file: missing; send it as a multipart field of this name", param="file")
    if purpose != "batch":
        raise InvalidRequest("purpose: it must be 'batch'", param="purpose")
    if not content.size:
        raise InvalidRequest("file: it is empty", param="file")
    if content.size > max_bytes:
        raise PayloadTooLarge(f"file: {content.size} bytes; at most {max_bytes} are allowed", param="file")
    return content, content.size


def _keep_s(form: FormData) -> int | None:
    """Return the seconds of `expires_after`, which SDKs send as `expires_after[seconds]`; None without the field."""
    texts = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
    sent = [(name, value) for name, value in texts if name.startswith("expires_after")]
    return validated(_Expiry, parse_form(sent, {"seconds"})).expires_after.seconds if sent else None


class _Expiry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    expires_after: ExpiresAfter


async def _digest(request: Request, content: UploadFile, keep_s: int) -> RequestDigest:
    digest = hashlib.sha256(str(keep_s).encode())
    async for chunk in _chunks(content):
        digest.update(chunk)
    await content.seek(0)
    return request_digest(request, ((content.filename or "").encode("utf-8", "surrogatepass"), digest.digest()))


async def _earlier_file(file_id: str | None, context: RequestContext) -> File | None:
    """Return the file of an earlier attempt; waits while that attempt stores it."""
    services, tenant = context.services, context.tenant
    began_s = time.monotonic()
    while file_id is not None:
        with contextlib.suppress(NotFound):
            return await services.queue.files.get(tenant, file_id)
        most_s = UPLOAD_WAIT_S if await services.queue.files.is_being_stored(tenant, file_id) else BEGIN_WAIT_S
        if time.monotonic() - began_s > most_s:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(services.closing.wait(), _POLL_S)
            break
    return None


async def _store(
    content: UploadFile, size: int, keep_s: int, context: RequestContext, digest: RequestDigest, file_id: str
) -> File:
    """Store an upload; the retention sweep removes what a killed process leaves."""
    services = context.services
    now = await services.queue.now_ms()  # retention compares it with the time of Redis
    file = File(
        id=file_id,
        tenant=context.tenant,
        filename=(content.filename or "upload.jsonl")[:255],
        purpose="batch",
        bytes=size,
        created_at_ms=now,
        expires_at_ms=now + keep_s * 1000,
    )
    await services.queue.files.begin(file.tenant, file.id, size)
    await services.queue.sync_calls.start(file.tenant, digest.attempt, file.id)
    try:
        parts = await stored_files.store_upload(_chunks(content), services.storage, file.tenant, file.id)
        await services.queue.files.put(file, parts)
    except FusequeueError:
        with contextlib.suppress(Unavailable):  # a retry does not wait for this upload
            await services.queue.files.abandon(file.tenant, file.id)
            await services.queue.sync_calls.delivered(file.tenant, digest.attempt, file.id)
        raise
    return file


async def _chunks(content: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await content.read(_READ_BYTES):
        yield chunk


@router.get(
    "",
    responses=openai_problems(503) | {200: {"model": FileList}},
    dependencies=[known_parameters(*FileListParams.model_fields)],
)
async def list_files(context: Context, params: Annotated[FileListParams, Query()]) -> Response:
    """List files, by default newest first."""
    queue = context.services.queue
    newest_first = params.order == "desc"
    rows, more = await queue.files.page(context.tenant, params.after, params.rows, newest_first, params.purpose)
    return JSONResponse(list_page([file_object(file) for file in rows], more))


@router.get("/{file_id}", responses=problems(404, 503) | {200: {"model": FileObject}})
async def get_file(file_id: str, context: Context) -> Response:
    """Get the metadata of a file."""
    return JSONResponse(file_object(await context.services.queue.files.get(context.tenant, file_id)))


@router.get("/{file_id}/content", response_class=Response, responses=problems(404, 503) | {200: _CONTENT})
async def get_file_content(request: Request, file_id: str, context: Context) -> Response:
    """Get the content of a file."""
    stored, tenant = context.services.queue.files, context.tenant
    file, parts = await stored.get(tenant, file_id), await stored.parts(tenant, file_id)
    count_response(request, file.bytes)
    chunks = await with_first_read(stored_files.content(context.services.storage, tenant, file_id, parts), param="id")
    headers = {
        "Content-Type": stored_files.CONTENT_TYPE,
        "Content-Length": str(file.bytes),
        "Content-Disposition": f'attachment; filename="{file_id}.jsonl"',
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamedResponse(chunks, headers=headers)


@router.delete("/{file_id}", responses=problems(404, 409, 503) | {200: {"model": DeletedFile}})
async def delete_file(file_id: str, context: Context) -> Response:
    """Delete a file; 409 while a batch reads it."""
    await context.services.queue.files.forget(context.tenant, file_id)
    await context.services.storage.delete_prefix(file_prefix(context.tenant, file_id))
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def file_object(file: File) -> dict[str, Any]:
    """Return a file as OpenAI's SDKs read it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at_ms // 1000,
        "expires_at": file.expires_at_ms // 1000,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
