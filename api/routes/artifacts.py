"""Finished pictures and videos."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import RedirectResponse, Response

from api.context import RequestContext, SignedUrlContext
from api.http import ranges
from api.http.openapi import problems
from api.http.streaming import StreamedResponse, TimedResponse, stored, with_first_read
from api.responses import etag_matches
from shared.errors import NotFound
from shared.job import Artifact, JobRecord, Thumbnail
from shared.storage import CHUNK_BYTES

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_SCHEMA = {"schema": {"type": "string", "format": "binary"}}
_BYTES = {"content": {"image/*": _SCHEMA, "video/mp4": _SCHEMA}}
_IMMUTABLE = "private, max-age=86400, immutable"


class Conditions(BaseModel):
    """What a client has already, and which part it wants."""

    range: str | None = Field(None, examples=["bytes=0-1023"])
    if_range: str | None = None
    if_none_match: str | None = None


Asked = Annotated[Conditions, Header()]
Redirect = Annotated[bool, Query(description="Answer 307 to a signed URL, where the storage has them.")]


@router.head("/{job_id}/artifacts/{index}", include_in_schema=False)
@router.get(
    "/{job_id}/artifacts/{index}",
    responses=problems(404, 416, 422, 503)
    | {
        200: {"description": "The picture or video.", **_BYTES},
        206: {"description": "The part of it that `Range` asks for.", **_BYTES},
        304: {"description": "As the client has it already."},
        307: {"description": "With `redirect=true`: where the storage itself serves it, for a while."},
    },
)
async def artifact(
    request: Request, job_id: str, index: int, context: SignedUrlContext, asked: Asked, redirect: Redirect = False
) -> Response:
    """Read one picture or video of a job, or a part of it."""
    found = _pick(await context.find_job(job_id), index)
    return await object_answer(request, context, found, asked, To(f"{job_id}-{index}", redirect))


@router.head("/{job_id}/artifacts/{index}/thumbnail", include_in_schema=False)
@router.get(
    "/{job_id}/artifacts/{index}/thumbnail",
    responses=problems(404, 416, 422, 503)
    | {
        200: {"description": "A JPEG of the video's first frame.", **_BYTES},
        206: {"description": "The part of it that `Range` asks for.", **_BYTES},
        304: {"description": "As the client has it already."},
        307: {"description": "With `redirect=true`: where the storage itself serves it, for a while."},
    },
)
async def thumbnail(
    request: Request, job_id: str, index: int, context: SignedUrlContext, asked: Asked, redirect: Redirect = False
) -> Response:
    """Read the still that stands for a video."""
    found = _pick(await context.find_job(job_id), index)
    if found.thumbnail is None:
        raise NotFound(f"artifact {index} of job {job_id} is no video and has no thumbnail", param="index")
    return await object_answer(request, context, found.thumbnail, asked, To(f"{job_id}-{index}-thumbnail", redirect))


@dataclass(frozen=True)
class To:
    """How an object is to be given: under which name it is saved, and whether by the storage itself."""

    name: str
    redirect: bool


async def object_answer(
    request: Request, context: RequestContext, found: Artifact | Thumbnail, asked: Conditions, to: To
) -> Response:
    """Return the answer that gives an object of the storage, or the part of it that is asked for."""
    if to.redirect:
        url = await context.services.storage.presigned_url(found.key, context.services.settings.presign_expires_s)
        if url is not None:
            return RedirectResponse(url, 307, {"Cache-Control": "no-store"})
    etag = f'"{hashlib.sha256(found.key.encode()).hexdigest()[:32]}"'  # a key is written once
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        "Cache-Control": _IMMUTABLE,
        "Content-Type": found.content_type,
        "Content-Disposition": f'inline; filename="{to.name}.{found.key.rpartition(".")[2]}"',
        "X-Content-Type-Options": "nosniff",
    }
    if asked.if_none_match is not None and etag_matches(asked.if_none_match, etag):
        return Response(status_code=304, headers=headers)
    part = ranges.requested(asked.range, found.bytes) if asked.if_range in (None, etag) else None
    start, end = part or (0, found.bytes)
    headers["Content-Length"] = str(end - start)
    if part:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.bytes}"
    if request.method == "HEAD":
        return Response(status_code=206 if part else 200, headers=headers)
    storage, status = context.services.storage, 206 if part else 200
    if end - start <= CHUNK_BYTES:  # one piece: to read and send it at once is a fraction of the work
        with stored("index"):
            return TimedResponse(await storage.read(found.key, start, end), status, headers)
    pieces = await with_first_read(storage.stream(found.key, start, end), param="index")
    return StreamedResponse(pieces, status_code=status, headers=headers)


def _pick(record: JobRecord, index: int) -> Artifact:
    for found in record.artifacts:
        if found.index == index:
            return found
    raise NotFound(
        f"job {record.job.id} is {record.state.value} and has {len(record.artifacts)} artifacts, none number {index}",
        param="index",
    )
