"""`/compat/replicate/v1/files/{id}`: uploaded images, which are inputs of jobs."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from api.compat.replicate.prediction_objects import ReplicateFile
from api.context import Context
from api.http.openapi import problems
from api.routes.inputs import find_input, forget_input
from shared.protocols.native import iso
from shared.protocols.replicate.predictions import PREFIX
from shared.queue.jobs import StoredInput

router = APIRouter(prefix=f"{PREFIX}/files", tags=["Replicate"])


@router.get("/{file_id}", responses=problems(404, 503) | {200: {"model": ReplicateFile}})
async def get_file(file_id: str, context: Context) -> Response:
    """Get an uploaded image; its name and metadata are not kept."""
    return JSONResponse(_file_object(await find_input(file_id, context), context.base_url))


@router.delete("/{file_id}", status_code=204, responses=problems(404, 409, 503))
async def delete_file(file_id: str, context: Context) -> Response:
    """Delete an uploaded image; 409 while a job that has not ended uses it."""
    await forget_input(file_id, context)
    return Response(status_code=204)


def _file_object(stored: StoredInput, base_url: str) -> dict[str, Any]:
    ref = stored.ref
    return {
        "id": ref.id,
        "name": f"{ref.id}.{ref.content_type.removeprefix('image/')}",
        "content_type": ref.content_type,
        "size": ref.bytes,
        "etag": ref.id.removeprefix("in_"),
        "checksums": {},
        "metadata": {},
        "created_at": None,
        "expires_at": iso(stored.expires_at_ms),
        "urls": {"get": f"{base_url}{PREFIX}/files/{ref.id}"},
    }
