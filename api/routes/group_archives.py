"""The finished files of a group as one zip archive."""

from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.context import ReadContext, RequestContext
from api.http.lists import known_parameters
from api.http.openapi import problems
from api.http.streaming import StreamedResponse, count_response, with_first_read
from api.http.zip_stream import ENTRY_BYTES, ZipFile, zip_archive
from api.routes.artifacts import storage_of
from shared.errors import InvalidRequest, NotFound
from shared.file_names import slug
from shared.job import Artifact, JobRecord, State
from shared.storage import CHUNK_BYTES

router = APIRouter(prefix="/v1/groups", tags=["groups"])

MAX_JOBS = 10_000
"""Jobs with results of one archive: it takes 5 MB until its end, and hours at a slow client."""

_PAGE = 100
_ZIP = {"content": {"application/zip": {"schema": {"type": "string", "format": "binary"}}}}


@router.get(
    "/{group}/artifacts.zip",
    response_class=Response,
    responses=problems(404, 422, 429, 503) | {200: {"description": "The archive.", **_ZIP}},
    dependencies=[known_parameters("tenant")],
)
async def get_group_archive(group: str, request: Request, context: ReadContext) -> Response:
    """Read the images, videos, sounds and meshes of the jobs of a group that have succeeded, oldest first, as a zip
    archive of stored files. Files that were sent elsewhere are not in it, nor those that are deleted meanwhile. An
    archive is cut off where the storage fails."""
    succeeded = (await context.services.queue.groups.get(context.tenant, group)).jobs["succeeded"]
    if not succeeded:
        raise NotFound(f"no job of group {group} has succeeded", param="group")
    if succeeded > MAX_JOBS:
        message = f"group: {succeeded} jobs of {group} have succeeded, and an archive has at most {MAX_JOBS}"
        raise InvalidRequest(f"{message}; `fusequeue groups download {group}` saves them in a folder", param="group")
    piece_bytes = CHUNK_BYTES + ENTRY_BYTES * succeeded
    count_response(request, 2 * piece_bytes, piece_bytes)
    headers = {
        "Content-Disposition": f'attachment; filename="{group}.zip"',
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    return StreamedResponse(zip_archive(_files(group, context)), media_type="application/zip", headers=headers)


async def _files(group: str, context: RequestContext) -> AsyncGenerator[ZipFile]:
    """Yield the files of a group's jobs, oldest first."""
    cursor: str | None = None
    left = MAX_JOBS
    while left > 0:
        records, cursor = await context.services.queue.jobs.page(
            context.tenant, group=group, after=cursor, limit=_PAGE, newest_first=False
        )
        for record in records:
            if record.state is State.SUCCEEDED:
                left -= 1
                for artifact in record.artifacts:
                    pieces = await _pieces(artifact, context)
                    if pieces is not None:
                        yield ZipFile(file_name(record, artifact), artifact.bytes, _modified(record), pieces)
        if cursor is None:
            return


async def _pieces(artifact: Artifact, context: RequestContext) -> AsyncIterator[bytes] | None:
    """Return the pieces of an artifact; None if it is not stored here, or no longer."""
    try:
        stream = storage_of(artifact, context).stream(artifact.key, 0, artifact.bytes)
        return await with_first_read(stream, param="group")
    except NotFound:
        return None


def file_name(record: JobRecord, artifact: Artifact) -> str:
    """Return the name of an artifact in an archive, as `fusequeue groups download` names it; they sort by age."""
    words = slug(record.job.prompt)
    stem = f"{record.job.id}-{words}" if words else record.job.id
    return f"{stem}-{artifact.index}.{artifact.key.rpartition('.')[2]}"


def _modified(record: JobRecord) -> tuple[int, int, int, int, int, int]:
    at = datetime.fromtimestamp((record.finished_at_ms or record.job.created_at_ms) / 1000, UTC)
    return at.year, at.month, at.day, at.hour, at.minute, at.second
