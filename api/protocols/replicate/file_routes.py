"""`/compat/replicate/v1/files`: uploaded images, which are inputs of jobs."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.datastructures import UploadFile
from starlette.responses import JSONResponse, Response

from api import strict_json
from api.context import Context
from api.http import openapi
from api.http.bodies import read_form, sha256
from api.http.middleware import UPLOAD_TYPES, require_type
from api.http.openapi import operation_ids, upload_body
from api.jobs.job_object import iso
from api.protocols.replicate.prediction_objects import ReplicateFile
from api.protocols.replicate.predictions import PREFIX
from api.protocols.text_errors import TextProblem
from api.routes.inputs import OVERHEAD_BYTES, find_input, forget_input
from shared.errors import InputRejected, InvalidRequest
from shared.queue.inputs import StoredInput
from shared.runtime.clock import now_ms

problems = partial(openapi.problems, model=TextProblem)
router = APIRouter(prefix=f"{PREFIX}/files", tags=["Replicate"], generate_unique_id_function=operation_ids("replicate"))


@router.post(
    "",
    status_code=201,
    openapi_extra=upload_body("content"),
    responses=problems(400, 408, 413, 415, 422, 429, 503) | {201: {"model": ReplicateFile}},
)
async def create_file(request: Request, context: Context) -> Response:
    """Upload an image; its `urls.get` is accepted in an input."""
    require_type(request, UPLOAD_TYPES)
    # Two files: the SDK for JavaScript sends `metadata` as one.
    async with read_form(request, max_files=2, max_fields=4, max_text_bytes=OVERHEAD_BYTES) as form:
        file, metadata = form.get("content"), await _metadata(form.get("metadata"))
        if not isinstance(file, UploadFile):
            raise InvalidRequest("content: missing; send the file as a multipart field of this name", param="content")
        if not file.size:
            raise InputRejected("content: it is empty", param="content")
        name, size, digest = file.filename or "file", file.size, await sha256(file)
        ref = await context.store_upload(file, "content")
    at_ms = now_ms()
    body: dict[str, Any] = {
        "id": ref.id,
        "name": name[:255],
        "content_type": ref.content_type,
        "size": size,
        "etag": digest,
        "checksums": {"sha256": digest},
        "metadata": metadata,
        "created_at": iso(at_ms),
        "expires_at": iso(at_ms + context.services.queue.client.policy("input_retention_s") * 1000),
        "urls": {"get": f"{context.base_url}{PREFIX}/files/{ref.id}"},
    }
    return JSONResponse(body, 201)


async def _metadata(sent: UploadFile | str | None) -> dict[str, Any]:
    """Return the object in the field `metadata`, which is text or a file."""
    encoded = (
        await sent.read(OVERHEAD_BYTES) if isinstance(sent, UploadFile) else (sent or "").encode("utf-8", "replace")
    )
    metadata = strict_json.decode(encoded) if encoded else {}
    return metadata if isinstance(metadata, dict) else {}


@router.get("/{file_id}", responses=problems(404, 503) | {200: {"model": ReplicateFile}})
async def get_file(file_id: str, context: Context) -> Response:
    """Get an uploaded image; its name and metadata are not kept."""
    stored = await find_input(file_id, context)
    return JSONResponse(
        _file_object(stored, context.base_url, context.services.queue.client.policy("input_retention_s"))
    )


@router.delete("/{file_id}", status_code=204, responses=problems(404, 409, 503))
async def delete_file(file_id: str, context: Context) -> Response:
    """Delete an uploaded image; 409 while a job that has not ended uses it."""
    await forget_input(file_id, context)
    return Response(status_code=204)


def _file_object(stored: StoredInput, base_url: str, retention_s: int) -> dict[str, Any]:
    ref, expires_at_ms = stored.ref, stored.expires_at_ms
    # Clients require a time. What is kept is the end of the retention, and nothing while a job uses the image.
    created_at_ms = 0 if expires_at_ms is None else expires_at_ms - retention_s * 1000
    return {
        "id": ref.id,
        "name": f"{ref.id}.{ref.content_type.rpartition('/')[2]}",
        "content_type": ref.content_type,
        "size": ref.bytes,
        "etag": ref.id.removeprefix("in_"),
        "checksums": {},
        "metadata": {},
        "created_at": iso(created_at_ms),
        "expires_at": iso(expires_at_ms),
        "urls": {"get": f"{base_url}{PREFIX}/files/{ref.id}"},
    }
