"""Files: what a batch is made from, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response

from api.bodies import UPLOAD_TYPES, require_type
from api.compat.openai.pagination import Page, listed
from api.compat.sync_calls import deliver, earlier_attempt, request_digest
from api.http.openapi import problems
from api.http.streaming import StreamedResponse, opened
from api.visit import Context, RequestContext
from shared.errors import FusequeueError, InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from shared.protocols.openai import files
from shared.protocols.openai.files import File
from shared.runtime.clock import new_id, now_ms

router = APIRouter(prefix="/v1/files", tags=["files and batches"])

OVERHEAD_BYTES = 64 * 1024
"""What a multipart body holds beside the file itself."""

MAX_NAME_CHARS = 255
STORING_WAIT_S = 30.0
"""How long a retried upload waits for its first try, which goes on storing what it got, before it stores its own."""

_READ_BYTES = 1024 * 1024
_LOOK_S = 0.1
_FILE = {"type": "string", "format": "binary"}
_SCHEMA = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": _FILE, "purpose": {"type": "string", "enum": ["batch"]}},
}


class FilePage(Page):
    purpose: str | None = None


@router.post(
    "",
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}},
    responses=problems(400, 408, 409, 413, 415, 422, 503),
)
async def upload(request: Request, context: Context) -> Response:
    """Upload the JSONL file of a batch: multipart fields `file` and `purpose`, which is `batch`."""
    require_type(request, UPLOAD_TYPES)
    settings = context.services.settings
    async with request.form(max_files=1, max_fields=8, max_part_size=OVERHEAD_BYTES) as form:
        sent, purpose = form.get("file"), form.get("purpose")
        if not isinstance(sent, UploadFile):
            raise InvalidRequest("file: the multipart body has no file in a field of this name", param="file")
        if purpose != "batch":
            raise InvalidRequest("purpose: it must be 'batch'", param="purpose")
        if not sent.size:
            raise InvalidRequest("file: it is empty", param="file")
        if sent.size > settings.max_file_bytes:
            raise PayloadTooLarge(f"file: at most {settings.max_file_bytes} bytes, not {sent.size}", param="file")
        digest = await _digest(request, sent)
        file = await _joined(request, context, digest) or await _store(sent, sent.size, context, digest)
    answer = json.dumps(file_object(file)).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(answer))}
    return StreamedResponse(deliver(request, context, digest, file.id, answer), headers=headers)


async def _digest(request: Request, sent: UploadFile) -> str:
    """Return what equal uploads of one key share."""
    content = hashlib.sha256()
    async for piece in _pieces(sent):
        content.update(piece)
    await sent.seek(0)
    return request_digest(request, ((sent.filename or "").encode("utf-8", "surrogatepass"), content.digest()))


async def _joined(request: Request, context: RequestContext, digest: str) -> File | None:
    """Return the file of an earlier try of this request, whose answer did not arrive; it may still be stored."""
    file_id = await earlier_attempt(request, context, digest)
    give_up = time.monotonic() + STORING_WAIT_S
    while file_id is not None and time.monotonic() < give_up:
        with contextlib.suppress(NotFound):
            return await context.services.queue.files.get(context.tenant, file_id)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.services.closing.wait(), _LOOK_S)
            break
    return None


async def _store(sent: UploadFile, size: int, context: RequestContext, digest: str) -> File:
    """Store an upload; a kill at any point leaves nothing that is not swept."""
    services, now = context.services, now_ms()
    file = File(
        id=new_id("file", now),
        tenant=context.tenant,
        filename=(sent.filename or "upload.jsonl")[:MAX_NAME_CHARS],
        purpose="batch",
        bytes=size,
        created_at_ms=now,
        expires_at_ms=now + services.settings.file_retention_s * 1000,
    )
    await services.queue.files.begin(file.tenant, file.id)
    await services.queue.sync_calls.start(file.tenant, digest, file.id)
    try:
        stored = await files.store_upload(_pieces(sent), services.storage, file.tenant, file.id)
        await services.queue.files.put(file, stored)
    except FusequeueError:
        with contextlib.suppress(Unavailable):
            await services.queue.sync_calls.delivered(file.tenant, digest, file.id)  # a retry has nothing to wait for
        raise
    return file


async def _pieces(sent: UploadFile) -> AsyncIterator[bytes]:
    while piece := await sent.read(_READ_BYTES):
        yield piece


@router.get("", responses=problems(404, 422, 503))
async def list_files(context: Context, asked: Annotated[FilePage, Query()]) -> Response:
    """List files, newest first."""
    found, more = await context.services.queue.files.page(
        context.tenant, asked.after, asked.rows, asked.order == "desc"
    )
    page = listed([file_object(file) for file in found], more)
    if asked.purpose is not None:  # within the page: its cursors are those of all files
        page["data"] = [shown for shown in page["data"] if shown["purpose"] == asked.purpose]
    return JSONResponse(page)


@router.get("/{file_id}", responses=problems(404, 503))
async def get_file(file_id: str, context: Context) -> Response:
    """Read what is known of a file."""
    return JSONResponse(file_object(await context.services.queue.files.get(context.tenant, file_id)))


@router.get("/{file_id}/content", responses=problems(404, 503))
async def get_content(file_id: str, context: Context) -> Response:
    """Read a file's bytes."""
    queue, storage = context.services.queue, context.services.storage
    file = await queue.files.get(context.tenant, file_id)
    parts = await queue.files.parts(context.tenant, file_id)
    pieces = await opened(files.content(storage, context.tenant, file_id, parts), param="id")
    headers = {
        "Content-Type": files.CONTENT_TYPE,
        "Content-Length": str(file.bytes),
        "Content-Disposition": f'attachment; filename="{file_id}.jsonl"',
        "Cache-Control": "private, no-cache",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamedResponse(pieces, headers=headers)


@router.delete("/{file_id}", responses=problems(404, 409, 503))
async def delete_file(file_id: str, context: Context) -> Response:
    """Delete a file; one that a batch still reads stays (409)."""
    await context.services.queue.files.forget(context.tenant, file_id)
    await context.services.storage.delete_prefix(files.prefix(context.tenant, file_id))
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
