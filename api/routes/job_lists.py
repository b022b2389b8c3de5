"""The list of jobs, and the filters that select jobs in it and for changes."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.context import OF_TENANT, ListContext, RequestContext
from api.http.lists import MAX_LIMIT, SCANS, TIME_SCHEMA, After, Limit, Order, epoch_ms, known_parameters
from api.http.openapi import problems
from api.jobs.job_object import JobObject, job_object
from shared.config.catalog import Catalog
from shared.errors import InvalidRequest
from shared.job import State
from shared.job_fields import GROUP_NAME, JobId
from shared.job_record import JobRecord

router = APIRouter(tags=["jobs"])

SCAN_PAGE_SIZE = 100  # jobs read at once for a filtered list
MAX_SCANNED = 1_000  # jobs read by one request with filters
METADATA = "metadata."


class JobFilters(BaseModel):
    """Which jobs of the tenant are meant; all filters must match."""

    status: str | None = Field(None, max_length=128, description="One or more states, separated by commas.")
    model: str | None = Field(None, max_length=128)
    batch_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    group: str | None = Field(None, pattern=GROUP_NAME)
    parent: JobId | None = Field(
        None,
        description="A job that they wait or waited for, or whose result they start from; at most the 10,000 last "
        "ones, while that job is kept.",
    )
    prompt: str | None = Field(None, min_length=1, max_length=200, description="A part of the prompt, in any case.")
    created_after: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; inclusive.", json_schema_extra=TIME_SCHEMA
    )
    created_before: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; exclusive.", json_schema_extra=TIME_SCHEMA
    )


class JobListQuery(JobFilters):
    """Filters and paging of a list."""

    tenant: str | None = Field(None, max_length=64, description=OF_TENANT)
    after: After = None
    limit: Limit = 20
    order: Order = "desc"


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


@router.get(
    "/v1/jobs",
    responses=problems(422, 503) | {200: {"model": JobList}},
    dependencies=[known_parameters(*JobListQuery.model_fields, prefix=METADATA)],
)
async def list_jobs(request: Request, context: ListContext, query: Annotated[JobListQuery, Query()]) -> Response:
    """List jobs, by default newest first. `metadata.KEY=VALUE` selects jobs with that metadata."""
    jobs = Selection.of(query, request, context.services.catalog, newest_first=query.order == "desc")
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


@dataclass(frozen=True)
class Selection:
    """The filters of one request."""

    filters: JobFilters
    states: frozenset[State]
    metadata: dict[str, str]
    newest_first: bool

    @classmethod
    def of(cls, filters: JobFilters, request: Request, catalog: Catalog, *, newest_first: bool = True) -> "Selection":
        """Return the selection of a query, or raise `InvalidRequest`."""
        if filters.model is not None:
            filters = filters.model_copy(update={"model": catalog.id_of(filters.model)})
        return cls(filters, _states(filters.status), _metadata(request.query_params.items()), newest_first)

    @property
    def is_filtered(self) -> bool:
        """Whether jobs must be read to find those that match: no index has their status, model, prompt, metadata, nor
        two of their batch, their group and their parent."""
        filters = self.filters
        indexed = sum(one is not None for one in (filters.batch_id, filters.group, filters.parent))
        return bool(self.states or filters.model is not None or filters.prompt or self.metadata or indexed > 1)

    @property
    def is_empty(self) -> bool:
        """Whether it has no filter, and every job of the tenant matches."""
        return not self.metadata and all(getattr(self.filters, name) is None for name in JobFilters.model_fields)

    @property
    def text(self) -> str:
        """The filters, for the action log."""
        fields = self.filters.model_dump(mode="json", include=set(JobFilters.model_fields), exclude_none=True)
        pairs = {**fields, **{f"{METADATA}{name}": value for name, value in self.metadata.items()}}
        return ", ".join(f"{name}={value}" for name, value in pairs.items())

    def matches(self, record: JobRecord) -> bool:
        job = record.job
        return (
            (not self.states or record.state in self.states)
            and self.filters.model in (None, job.model)
            and self.filters.batch_id in (None, job.batch_id)
            and self.filters.group in (None, job.group)
            and self.filters.parent in (None, *job.predecessors)
            and (self.filters.prompt or "").casefold() in job.prompt.casefold()
            and self.metadata.items() <= job.metadata.items()
        )

    async def page(
        self, context: RequestContext, after: str | None, limit: int, *, end_ms: float = math.inf
    ) -> tuple[list[JobRecord], str | None]:
        """Return up to `limit` jobs of the tenant, created before `end_ms`, and the next cursor; of filtered ones,
        `MAX_SCANNED` are read."""
        first_ms, last_ms = epoch_ms(self.filters.created_after), epoch_ms(self.filters.created_before)
        created_ms = (first_ms or 0, end_ms if last_ms is None else min(last_ms, end_ms))
        page: list[JobRecord] = []
        cursor, scanned = after, 0
        while True:
            records, cursor = await context.services.queue.jobs.page(
                context.tenant,
                batch_id=self.filters.batch_id,
                group=self.filters.group,
                parent=self.filters.parent,
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
    metadata = {name.removeprefix(METADATA): value for name, value in params if name.startswith(METADATA)}
    if len(metadata) > 16:
        raise InvalidRequest("metadata: at most 16 keys", param="metadata")
    return metadata
