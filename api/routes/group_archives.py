"""The finished files of a group as one zip archive."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.context import ReadContext, RequestContext
from api.http.lists import known_parameters
from api.http.openapi import problems
from api.http.streaming import StreamedResponse, count_response, with_first_read
from api.http.zip_stream import ENTRY_BYTES, ZipFile, zip_archive
from api.jobs.manifest import manifest_row
from api.routes.artifacts import storage_of
from shared.errors import InvalidRequest, NotFound
from shared.file_names import slug
from shared.job import State
from shared.job_record import Artifact, JobRecord
from shared.storage import CHUNK_BYTES

router = APIRouter(prefix="/v1/groups", tags=["groups"])

MANIFEST = "manifest.jsonl"
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
    archive of stored files. Files that were sent elsewhere are not in it, nor those that are deleted meanwhile. The
    last one, `manifest.jsonl`, has a line for each job: its request, its files, and in `made` what the service has
    chosen for it. An archive is cut off where the storage fails."""
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
    return StreamedResponse(
        zip_archive(GroupFiles(group, context).read()), media_type="application/zip", headers=headers
    )


@dataclass
class GroupFiles:
    """The files of a group's jobs for one archive, and the manifest of those that are in it."""

    group: str
    context: RequestContext
    names: set[str] = field(default_factory=set)

    async def read(self) -> AsyncGenerator[ZipFile]:
        """Yield the files, oldest first, and last the manifest."""
        left = MAX_JOBS
        async with aclosing(self._succeeded()) as pages:
            async for records in pages:
                for record in records[:left]:
                    async for file in self._of_job(record):
                        yield file
                left -= len(records)
                if left <= 0:
                    break
        yield ZipFile(MANIFEST, None, datetime.now(UTC), self._manifest())

    async def _of_job(self, record: JobRecord) -> AsyncGenerator[ZipFile]:
        for artifact in record.artifacts:
            pieces = await _pieces(artifact, self.context)
            if pieces is not None:
                name = file_name(record, artifact)
                self.names.add(name)
                yield ZipFile(name, artifact.bytes, _ended_at(record), pieces)

    async def _manifest(self) -> AsyncGenerator[bytes]:
        """Yield the rows of the jobs whose files are in the archive; their records are read again, page by page."""
        left = len(self.names)
        async with aclosing(self._succeeded()) as pages:
            async for records in pages:
                for record in records:
                    files = [name for one in record.artifacts if (name := file_name(record, one)) in self.names]
                    left -= len(files)
                    if files:
                        row = json.dumps(manifest_row(record, files), ensure_ascii=False)
                        yield f"{row}\n".encode("utf-8", "backslashreplace")
                if left <= 0:
                    return

    async def _succeeded(self) -> AsyncGenerator[list[JobRecord]]:
        """Yield pages of the jobs that have succeeded, oldest first."""
        cursor: str | None = None
        while True:
            records, cursor = await self.context.services.queue.jobs.page(
                self.context.tenant, group=self.group, after=cursor, limit=_PAGE, newest_first=False
            )
            yield [record for record in records if record.state is State.SUCCEEDED]
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


def _ended_at(record: JobRecord) -> datetime:
    return datetime.fromtimestamp((record.finished_at_ms or record.job.created_at_ms) / 1000, UTC)
