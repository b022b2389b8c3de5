"""`/compat/replicate/v1/files`: input images, which the SDKs upload when an input holds an open file."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response

from api.context import Context
from api.http.middleware import UPLOAD_TYPES, require_type
from api.http.openapi import problems, upload_body
from api.routes.inputs import OVERHEAD_BYTES
from shared.errors import InputRejected, InvalidRequest
from shared.protocols.native import iso
from shared.protocols.replicate.predictions import PREFIX
from shared.runtime import strict_json
from shared.runtime.clock import now_ms

router = APIRouter(prefix=f"{PREFIX}/files", tags=["Replicate"])


@router.post(
    "", status_code=201, openapi_extra=upload_body("content"), responses=problems(400, 408, 413, 415, 422, 429, 503)
)
async def create_file(request: Request, context: Context) -> Response:
    """Upload an image; its `urls.get` is accepted in an input."""
    require_type(request, UPLOAD_TYPES)
    async with request.form(max_files=1, max_fields=4, max_part_size=OVERHEAD_BYTES) as form:
        file, metadata_text = form.get("content"), form.get("metadata")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("content: missing; send the file as a multipart field of this name", param="content")
        if not file.size:
            raise InputRejected("content: it is empty", param="content")
        data, name = await file.read(), file.filename or "file"
    text = metadata_text.encode("utf-8", "replace") if isinstance(metadata_text, str) else b"{}"
    metadata = strict_json.decode(text)
    ref = await context.store_input(data, "content")
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
    at_ms = now_ms()
    body: dict[str, Any] = {
        "id": ref.id,
        "name": name[:255],
        "content_type": ref.content_type,
        "size": ref.bytes,
        "etag": digest,
        "checksums": {"sha256": digest},
        "metadata": metadata if isinstance(metadata, dict) else {},
        "created_at": iso(at_ms),
        "expires_at": iso(at_ms + context.services.settings.input_retention_s * 1000),
        "urls": {"get": f"{context.base_url}{PREFIX}/files/{ref.id}"},
    }
    return JSONResponse(body, 201)
