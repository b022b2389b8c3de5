"""Jobs, newest first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.context import Services
from api.http.openapi import problems
from api.visit import Context
from shared.errors import InvalidRequest
from shared.job import JobRecord, State
from shared.protocols.native import JobObject, job_object

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

MAX_LIMIT = 100
PAGE = 100  # jobs read at once for a filtered list
MAX_SCANNED = 1_000  # jobs looked at for one page of a filtered list; what is left is for the next page
_METADATA = "metadata."


class ListQuery(BaseModel):
    """Which jobs a client asks for."""

    status: str | None = Field(None, max_length=128, description="One or more states, by commas.")
    model: str | None = Field(None, max_length=128)
    batch_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    created_after: datetime | None = Field(None, description="ISO 8601 or epoch seconds; inclusive.")
    created_before: datetime | None = Field(None, description="ISO 8601 or epoch seconds; exclusive.")
    after: str | None = Field(None, max_length=128, description="`next_cursor` of the page before.")
    limit: int = Field(20, ge=1, le=MAX_LIMIT)


class JobList(BaseModel):
    """A page of jobs; the next one is asked for with `after=next_cursor`.

    A filtered page may be short, or empty, while `has_more` is true: it looks at a bounded number of jobs.
    """

    object: Literal["list"] = "list"
    data: list[JobObject]
    has_more: bool
    next_cursor: str | None
    first_id: str | None = Field(description="Of the first job of this page.")
    last_id: str | None


@dataclass(frozen=True)
class Filter:
    """What jobs of a list must be; it is applied to the jobs read, not by an index."""

    statuses: frozenset[State]
    model: str | None
    metadata: dict[str, str]

    def __bool__(self) -> bool:
        return bool(self.statuses or self.model is not None or self.metadata)

    def passes(self, record: JobRecord) -> bool:
        """Say whether a job is one of those asked for."""
        return (
            (not self.statuses or record.state in self.statuses)
            and (self.model is None or record.job.model == self.model)
            and all(record.job.metadata.get(key) == value for key, value in self.metadata.items())
        )


@dataclass(frozen=True)
class Scan:
    """Which jobs are read: by an index."""

    tenant: str
    batch_id: str | None
    created_after_ms: int | None
    created_before_ms: int | None


@router.get("", responses=problems(422, 503) | {200: {"model": JobList}})
async def list_jobs(request: Request, context: Context, asked: Annotated[ListQuery, Query()]) -> Response:
    """List jobs, newest first. `metadata.KEY=VALUE` keeps those with that metadata."""
    wanted = Filter(_states(asked.status), asked.model, _metadata(request.query_params.multi_items()))
    scan = Scan(context.tenant, asked.batch_id, _ms(asked.created_after), _ms(asked.created_before))
    records, cursor = await _page(scan, wanted, asked, context.services)
    data = [job_object(record, context.base_url, sign=context.sign) for record in records]
    page = JobList(
        data=data,
        has_more=cursor is not None,
        next_cursor=cursor,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
    return Response(page.model_dump_json(), media_type="application/json")


async def _page(scan: Scan, wanted: Filter, asked: ListQuery, services: Services) -> tuple[list[JobRecord], str | None]:
    """Return up to `limit` jobs that pass, and where to go on; reads at most `MAX_SCANNED`."""
    found: list[JobRecord] = []
    cursor, scanned = asked.after, 0
    while True:
        records, cursor = await services.queue.jobs.page(
            scan.tenant,
            batch_id=scan.batch_id,
            after=cursor,
            limit=PAGE if wanted else asked.limit,
            created_after_ms=scan.created_after_ms,
            created_before_ms=scan.created_before_ms,
        )
        scanned += PAGE
        for record in records:
            if wanted.passes(record):
                found.append(record)
                if len(found) == asked.limit:
                    return found, cursor if record is records[-1] else record.job.id
        if cursor is None or scanned >= MAX_SCANNED:
            return found, cursor


def _states(status: str | None) -> frozenset[State]:
    if status is None:
        return frozenset()
    try:
        return frozenset(State(word.strip()) for word in status.split(","))
    except ValueError:
        known = ", ".join(State)
        raise InvalidRequest(f"status must be of: {known}", param="status") from None


def _metadata(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the metadata filter; a parameter that is unknown or repeated is an error: it would list the wrong jobs."""
    wanted: dict[str, str] = {}
    seen: set[str] = set()
    for name, value in items:
        if name in seen:
            raise InvalidRequest(f"{name[:64]}: given twice", param=name)
        seen.add(name)
        if name.startswith(_METADATA):
            wanted[name.removeprefix(_METADATA)] = value
        elif name not in ListQuery.model_fields:
            raise InvalidRequest(f"{name[:64]}: there is no such parameter", param=name)
    if len(wanted) > 16:
        raise InvalidRequest("metadata: at most 16 keys", param="metadata")
    return wanted


def _ms(at: datetime | None) -> int | None:
    if at is None:
        return None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
