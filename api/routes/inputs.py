"""Route that uploads input images."""

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.responses import Response

from api.context import Context
from api.http.bodies import read_form
from api.http.middleware import UPLOAD_TYPES, require_type
from api.http.openapi import problems, upload_body
from shared.errors import InputRejected, InvalidRequest
from shared.protocols.native import iso
from shared.runtime.clock import now_ms

router = APIRouter(prefix="/v1/inputs", tags=["inputs"])

# Size of a multipart body in addition to its file: boundaries, and the headers of a few parts.
OVERHEAD_BYTES = 64 * 1024


class InputObject(BaseModel):
    """A stored image; send its `id` as the `image` of a job. Equal images have equal ids."""

    id: str = Field(examples=["in_0123456789abcdef0123456789abcdef"])
    object: str = "input"
    width: int
    height: int
    content_type: str
    bytes: int = Field(description="Size of what is kept: metadata are dropped.")
    expires_at: str = Field(description="When it is deleted; each upload and each use postpones this.")


@router.post(
    "",
    status_code=201,
    openapi_extra=upload_body(),
    responses=problems(400, 408, 413, 415, 422, 429, 503) | {201: {"model": InputObject}},
)
async def upload_input(request: Request, context: Context) -> Response:
    """Upload a PNG, JPEG or WebP as the multipart field `file`."""
    require_type(request, UPLOAD_TYPES)
    async with read_form(request, max_files=1, max_fields=4, max_text_bytes=OVERHEAD_BYTES) as form:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file: the multipart body has no file in a field of this name", param="file")
        if not file.size:
            raise InputRejected("file: it is empty", param="file")
        ref = await context.store_upload(file, "file")
    expires_at_ms = now_ms() + context.services.settings.input_retention_s * 1000
    uploaded = InputObject(**ref.model_dump(exclude={"key"}), expires_at=iso(expires_at_ms) or "")
    return Response(uploaded.model_dump_json(), 201, media_type="application/json")
