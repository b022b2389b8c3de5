"""Routes that return artifacts, the finished images, videos, sounds and meshes of a job."""

import hashlib
import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import RedirectResponse, Response

from api.context import ArtifactContext, RequestContext
from api.errors import RangeNotSatisfiable
from api.http.openapi import problems
from api.http.streaming import StreamedResponse, TimedResponse, count_response, stored, with_first_read
from api.responses import etag_matches
from shared.config.destinations import bucket_of
from shared.errors import NotFound
from shared.job import InputRef
from shared.job_record import Artifact, JobRecord, Thumbnail
from shared.storage import CHUNK_BYTES, Storage
from shared.tasks import AUDIO_TYPES, GLB_TYPE, LATENTS_TYPE

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.IGNORECASE)
_SCHEMA = {"schema": {"type": "string", "format": "binary"}}
_IMAGES = dict.fromkeys(("image/png", "image/jpeg", "image/webp", LATENTS_TYPE), _SCHEMA)
_SOUNDS = dict.fromkeys(AUDIO_TYPES.values(), _SCHEMA)
_CONTENT = {"content": {**_IMAGES, "video/mp4": _SCHEMA, **_SOUNDS, GLB_TYPE: _SCHEMA}}
_THUMBNAILS = {"content": {"image/jpeg": _SCHEMA, "image/png": _SCHEMA}}
OBJECT_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The image, video, sound or mesh.", **_CONTENT},
    206: {"description": "The part of it that `Range` requests.", **_CONTENT},
    304: {"description": "The client has it already."},
    307: {"description": "With `redirect=true`: a URL of the storage, valid for a while."},
}
OBJECT_RESPONSES = problems(404, 416, 422, 503) | OBJECT_CONTENT

IMAGE_RESPONSES = problems(404, 416, 422, 503) | {
    200: {"description": "The image or sound.", "content": {**_IMAGES, **_SOUNDS}},
    206: {"description": "The part of it that `Range` requests.", "content": {**_IMAGES, **_SOUNDS}},
    304: {"description": "The client has it already."},
}


class Conditions(BaseModel):
    """Headers that make a request for an object conditional or partial."""

    range: str | None = Field(None, examples=["bytes=0-1023"])
    if_range: str | None = None
    if_none_match: str | None = None


ConditionsDep = Annotated[Conditions, Header()]
Redirect = Annotated[bool, Query(description="Respond with 307 to a signed URL if the storage supports them.")]


@router.head("/{job_id}/artifacts/{index}", include_in_schema=False)
@router.get("/{job_id}/artifacts/{index}", response_class=Response, responses=OBJECT_RESPONSES)
async def get_artifact(
    request: Request,
    job_id: str,
    index: int,
    context: ArtifactContext,
    conditions: ConditionsDep,
    redirect: Redirect = False,
) -> Response:
    """Read an image, video, sound or mesh of a job, or a part of it."""
    image_or_video = _artifact(await context.find_job(job_id), index)
    return await object_response(
        request,
        storage_of(image_or_video, context),
        image_or_video,
        conditions,
        name=f"{job_id}-{index}",
        redirect_s=context.services.settings.presign_expires_s if redirect else None,
    )


@router.head("/{job_id}/artifacts/{index}/thumbnail", include_in_schema=False)
@router.get(
    "/{job_id}/artifacts/{index}/thumbnail",
    response_class=Response,
    responses=OBJECT_RESPONSES
    | {
        200: {"description": "A JPEG of the video's first frame or the mesh, or a PNG of the waveform.", **_THUMBNAILS},
        206: {"description": "The part of it that `Range` requests.", **_THUMBNAILS},
    },
)
async def get_thumbnail(
    request: Request,
    job_id: str,
    index: int,
    context: ArtifactContext,
    conditions: ConditionsDep,
    redirect: Redirect = False,
) -> Response:
    """Read the thumbnail of a video, sound or mesh."""
    video = _artifact(await context.find_job(job_id), index)
    storage, still = storage_of(video, context), video.thumbnail
    if still is None:
        reason = "is no video, sound or mesh, and has no thumbnail"
        raise NotFound(f"artifact {index} of job {job_id} {reason}", param="index")
    return await object_response(
        request,
        storage,
        still,
        conditions,
        name=f"{job_id}-{index}-thumbnail",
        redirect_s=context.services.settings.presign_expires_s if redirect else None,
    )


def _artifact(record: JobRecord, index: int) -> Artifact:
    for candidate in record.artifacts:
        if candidate.index == index:
            return candidate
    raise NotFound(
        f"there is no artifact {index} of job {record.job.id}: it is {record.state.value} and has "
        f"{len(record.artifacts)} artifacts",
        param="index",
    )


def storage_of(artifact: Artifact, context: RequestContext) -> Storage:
    """Return where an artifact is stored; raises `NotFound` for one that was sent to a URL."""
    if artifact.location is None:
        return context.services.storage
    if (bucket := bucket_of(artifact.location)) is not None:
        return context.services.output_buckets.find(bucket)
    raise NotFound(f"artifact {artifact.index} is not stored here: it was sent to {artifact.location}", param="index")


async def object_response(
    request: Request,
    storage: Storage,
    stored_object: Artifact | Thumbnail | InputRef,
    conditions: Conditions,
    *,
    name: str,
    redirect_s: int | None = None,
) -> Response:
    """Return an object of `storage`, or the part of it that is requested; `name` is that of a saved file.

    With `redirect_s`, redirect to a URL that is valid for so long, if the storage has such.
    """
    size = stored_object.bytes
    if redirect_s is not None and request.method != "HEAD":  # the URL is signed for GET
        url = await storage.presigned_url(stored_object.key, redirect_s)
        if url is not None:
            return RedirectResponse(url, 307, {"Cache-Control": "no-store"})
    etag = f'"{hashlib.sha256(stored_object.key.encode()).hexdigest()[:32]}"'  # objects never change
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, max-age=86400, immutable",
        "Content-Type": stored_object.content_type,
        "Content-Disposition": f'inline; filename="{name}.{stored_object.key.rpartition(".")[2]}"',
        "X-Content-Type-Options": "nosniff",
    }
    if conditions.if_none_match is not None and etag_matches(conditions.if_none_match, etag):
        return Response(status_code=304, headers=headers)
    # RFC 9110: a range counts for GET only.
    has_range = request.method == "GET" and conditions.if_range in (None, etag)
    part = requested_range(conditions.range, size) if has_range else None
    start, end = part or (0, size)
    status = 206 if part else 200
    headers["Content-Length"] = str(end - start)
    if part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    count_response(request, end - start)
    if end - start <= CHUNK_BYTES:  # reading and sending one piece costs a fraction of a stream
        with stored("index"):
            return TimedResponse(await storage.read(stored_object.key, start, end), status, headers)
    pieces = await with_first_read(storage.stream(stored_object.key, start, end), param="index")
    return StreamedResponse(pieces, status_code=status, headers=headers)


def requested_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes [start, end) that a `Range` header (RFC 9110) requests of `size` bytes; None: all of them.

    Several ranges and invalid headers request all bytes, as the RFC allows. Raises `RangeNotSatisfiable` for a range
    outside the object.
    """
    match = _RANGE.fullmatch(header) if header else None
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:  # the last n bytes
        start, end = max(0, size - int(match[2])), size
        if int(match[2]) == 0:
            raise RangeNotSatisfiable("the range is empty", size=size)
    else:
        start = int(match[1])
        end = min(size, int(match[2]) + 1) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    if start >= size:
        raise RangeNotSatisfiable(f"the object has {size} bytes", size=size)
    return start, end
