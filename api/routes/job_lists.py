"""Routes of many jobs: list them, cancel them, delete them, all by the same filters."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.context import Context, RequestContext
from api.http.lists import MAX_LIMIT, SCANS, After, Limit, Order, known_parameters
from api.http.openapi import problems
from shared.errors import InvalidRequest
from shared.job import JobRecord, State
from shared.protocols.native import JobObject, job_object

router = APIRouter(tags=["jobs"])

SCAN_PAGE_SIZE = 100  # jobs read at once for a filtered list
MAX_SCANNED = 1_000  # jobs read by one request with filters
MAX_DELETED = 100  # jobs deleted by one request: each takes several calls of the storage
_CONCURRENT = 8
_METADATA = "metadata."
_TIME_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number"}]}


class JobFilters(BaseModel):
    """Which jobs of the tenant are meant; all filters must match."""

    status: str | None = Field(None, max_length=128, description="One or more states, separated by commas.")
    model: str | None = Field(None, max_length=128)
    batch_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    created_after: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; inclusive.", json_schema_extra=_TIME_SCHEMA
    )
    created_before: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; exclusive.", json_schema_extra=_TIME_SCHEMA
    )


class JobListQuery(JobFilters):
    """Filters and paging of a list."""

    after: After = None
    limit: Limit = 20
    order: Order = "desc"


class JobPieceQuery(JobFilters):
    """Filters of the jobs to cancel or delete, and where the next piece of them begins."""

    after: After = None


class JobList(BaseModel):
    """A page of jobs; `after=next_cursor` returns the next one.

    A filtered page can be short or empty while `has_more` is true: each request reads a bounded number of jobs.
    """

    object: Literal["list"] = "list"
    data: list[JobObject]
    has_more: bool
    next_cursor: str | None
    first_id: str | None = Field(description="The first job of this page.")
    last_id: str | None


class JobPiece(BaseModel):
    """The part of the jobs that one request has canceled or deleted.

    While `has_more` is true, the same request with `after=next_cursor` continues.
    """

    object: Literal["job_changes"] = "job_changes"
    ids: list[str] = Field(description="The jobs that this request has canceled, or deleted.")
    skipped: int = Field(description="Jobs that match and did not change: ended ones of a cancel, others of a delete.")
    has_more: bool
    next_cursor: str | None


_EXAMPLE = {"x-example-query": "?batch_id=nightly"}  # for the command of /docs: a filter is required
_PIECE = known_parameters(*JobPieceQuery.model_fields, prefix=_METADATA)


@router.get(
    "/v1/jobs",
    responses=problems(422, 503) | {200: {"model": JobList}},
    dependencies=[known_parameters(*JobListQuery.model_fields, prefix=_METADATA)],
)
async def list_jobs(request: Request, context: Context, query: Annotated[JobListQuery, Query()]) -> Response:
    """List jobs, by default newest first. `metadata.KEY=VALUE` selects jobs with that metadata."""
    jobs = _Selection.of(query, request, newest_first=query.order == "desc")
    async with SCANS.turn(context.tenant, 1) if jobs.is_filtered else contextlib.nullcontext():
        records, cursor = await jobs.page(context, query.after, min(query.limit, MAX_LIMIT))
    data = [job_object(record, context.base_url, sign=context.sign) for record in records]
    page = JobList(
        data=data,
        has_more=cursor is not None,
        next_cursor=cursor,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
    return Response(page.model_dump_json(), media_type="application/json")


@router.post("/v1/jobs:cancel", openapi_extra=_EXAMPLE, responses=problems(422, 503), dependencies=[_PIECE])
async def cancel_jobs(request: Request, context: Context, query: Annotated[JobPieceQuery, Query()]) -> JobPiece:
    """Cancel the jobs that match the filters, of which at least one is required: queued ones at once, running ones at
    their next step. A request handles a bounded number of jobs, newest first."""

    async def cancel(record: JobRecord) -> bool:
        if record.state.terminal:
            return False
        canceled = await context.services.queue.jobs.cancel(record.job.id)
        return canceled is not None and (canceled.state is State.CANCELED or canceled.cancel_requested)

    return await _change(context, _Selection.of(query, request), query.after, cancel, MAX_SCANNED)


@router.delete("/v1/jobs", openapi_extra=_EXAMPLE, responses=problems(422, 503), dependencies=[_PIECE])
async def delete_jobs(request: Request, context: Context, query: Annotated[JobPieceQuery, Query()]) -> JobPiece:
    """Delete the jobs that match the filters, of which at least one is required, and their images. Jobs that have not
    ended are skipped: cancel them first. A request handles a bounded number of jobs, newest first."""

    async def delete(record: JobRecord) -> bool:
        if not record.state.terminal:
            return False
        await context.services.storage.delete_prefix(f"jobs/{record.job.id}/")
        return await context.services.queue.jobs.forget(record.job.id)

    return await _change(context, _Selection.of(query, request), query.after, delete, MAX_DELETED)


async def _change(
    context: RequestContext,
    jobs: "_Selection",
    after: str | None,
    change: Callable[[JobRecord], Awaitable[bool]],
    limit: int,
) -> JobPiece:
    """Apply `change` to the next `limit` jobs of a selection, a few at a time."""
    if jobs.is_empty:
        raise InvalidRequest(
            "status: send at least one filter: status, model, batch_id, created_after, created_before or metadata.KEY",
            param="status",
        )
    async with SCANS.turn(context.tenant, 1):
        records, cursor = await jobs.page(context, after, limit)
        changed: list[bool] = []
        for start in range(0, len(records), _CONCURRENT):
            changed += await asyncio.gather(*map(change, records[start : start + _CONCURRENT]))
    ids = [record.job.id for record, done in zip(records, changed, strict=True) if done]
    return JobPiece(ids=ids, skipped=len(records) - len(ids), has_more=cursor is not None, next_cursor=cursor)


@dataclass(frozen=True)
class _Selection:
    """The filters of one request."""

    filters: JobFilters
    states: frozenset[State]
    metadata: dict[str, str]
    newest_first: bool

    @classmethod
    def of(cls, filters: JobFilters, request: Request, *, newest_first: bool = True) -> "_Selection":
        """Return the selection of a query, or raise `InvalidRequest`."""
        return cls(filters, _states(filters.status), _metadata(request.query_params.items()), newest_first)

    @property
    def is_filtered(self) -> bool:
        """Whether jobs must be read to find those that match: no index has their status, model and metadata."""
        return bool(self.states or self.filters.model is not None or self.metadata)

    @property
    def is_empty(self) -> bool:
        """Whether it has no filter, and every job of the tenant matches."""
        return not self.metadata and all(getattr(self.filters, name) is None for name in JobFilters.model_fields)

    def matches(self, record: JobRecord) -> bool:
        job = record.job
        return (
            (not self.states or record.state in self.states)
            and self.filters.model in (None, job.model)
            and self.metadata.items() <= job.metadata.items()
        )

    async def page(self, context: RequestContext, after: str | None, limit: int) -> tuple[list[JobRecord], str | None]:
        """Return up to `limit` jobs of the tenant and the next cursor; of filtered ones, `MAX_SCANNED` are read."""
        created_ms = (_ms(self.filters.created_after) or 0, _ms(self.filters.created_before) or math.inf)
        page: list[JobRecord] = []
        cursor, scanned = after, 0
        while True:
            records, cursor = await context.services.queue.jobs.page(
                context.tenant,
                batch_id=self.filters.batch_id,
                after=cursor,
                limit=SCAN_PAGE_SIZE if self.is_filtered else limit,
                created_ms=created_ms,
                newest_first=self.newest_first,
            )
            scanned += SCAN_PAGE_SIZE
            for record in filter(self.matches, records):
                page.append(record)
                if len(page) == limit:
                    return page, cursor if record is records[-1] else record.job.id
            if cursor is None or scanned >= MAX_SCANNED:
                return page, cursor


def _states(status: str | None) -> frozenset[State]:
    if status is None:
        return frozenset()
    try:
        return frozenset(State(name.strip()) for name in status.split(","))
    except ValueError:
        raise InvalidRequest(f"status must be one or more of: {', '.join(State)}", param="status") from None


def _metadata(params: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the metadata filter of a query's parameters."""
    metadata = {name.removeprefix(_METADATA): value for name, value in params if name.startswith(_METADATA)}
    if len(metadata) > 16:
        raise InvalidRequest("metadata: at most 16 keys", param="metadata")
    return metadata


def _ms(time: datetime | None) -> int | None:
    if time is None:
        return None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
