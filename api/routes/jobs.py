"""Routes of jobs: submit, read, list, cancel, delete."""

import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.context import Context, RequestContext
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import job_responses, json_body, problems
from api.responses import existing_job, job_response
from api.submission import IdempotencyKey, idempotency, parse_job, submit
from api.waiting import preferred_wait_s
from shared.errors import Conflict, InvalidRequest, Unavailable
from shared.job import JobRecord, State
from shared.protocols.native import JobObject, job_object
from shared.runtime import strict_json
from shared.runtime.shares import SharedPool, SharedTurns

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

MAX_LIMIT = 100
SCAN_PAGE_SIZE = 100  # jobs read at once for a filtered list
MAX_SCANNED = 1_000  # jobs read for one page of a filtered list
_METADATA = "metadata."
# A filtered list takes up to 0.2 s of the process: of 64 at once from one tenant, others waited for 4 s.
_scans = SharedTurns(SharedPool("filtered_lists", 8), max_waiting=64, timeout_s=20.0)

Prefer = Annotated[str | None, Header(description="`wait=n`: respond with 200 if the job ends within n seconds.")]
Wait = Annotated[
    float | None,
    Query(ge=0, allow_inf_nan=False, description="Wait for the job to end, at most this many seconds."),
]


@router.post(
    "",
    status_code=202,
    openapi_extra=json_body(),
    responses=job_responses(200, 202) | problems(400, 404, 408, 409, 413, 415, 422, 429, 503),
)
async def submit_job(request: Request, context: Context, key: IdempotencyKey = None, prefer: Prefer = None) -> Response:
    """Submit a job. It is stored before the response; with `Prefer: wait=n` the response can be the finished job."""
    require_type(request, JSON_TYPES)
    raw = await request.body()
    accepted = await submit(parse_job(strict_json.decode(raw), context.services), context, idempotency(key, raw))
    record = accepted.record
    headers = {"Location": context.job_url(record.job.id)}
    if accepted.replayed:
        headers["Idempotent-Replayed"] = "true"
    wait_s = preferred_wait_s(prefer, context.services.settings.max_wait_s)
    if wait_s is not None:
        headers["Preference-Applied"] = f"wait={wait_s:.0f}"
        with contextlib.suppress(Unavailable):  # the job is stored: without Redis only the wait ends
            if wait_s and not record.state.terminal:
                await context.waiters.until_terminal(record.job.id, wait_s)
                record = await context.services.queue.jobs.get(record.job.id) or record
    status = 200 if record.state.terminal else 202
    return job_response(await context.job_object(record), status=status, headers=headers)


@router.get("/{job_id}", responses=job_responses(200, 304) | problems(404, 422, 503))
async def get_job(
    job_id: str, context: Context, wait: Wait = None, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Read a job. Until it has ended, `Retry-After` says when to poll again."""
    services = context.services
    record = await context.find_job(job_id)
    if wait and not record.state.terminal:
        await context.waiters.until_terminal(job_id, min(wait, services.settings.max_wait_s))
        record = existing_job(await services.queue.jobs.get(job_id), job_id)
    return job_response(await context.job_object(record), if_none_match=if_none_match)


@router.post("/{job_id}/cancel", responses=job_responses(200) | problems(404, 503))
async def cancel_job(job_id: str, context: Context) -> Response:
    """Cancel a job: a queued one at once, a running one at its next step. It then never succeeds.

    One that has ended does not change.
    """
    await context.find_job(job_id)
    record = existing_job(await context.services.queue.jobs.cancel(job_id), job_id)
    return job_response(await context.job_object(record))


@router.delete("/{job_id}", status_code=204, responses=problems(404, 409, 503))
async def delete_job(job_id: str, context: Context) -> Response:
    """Delete a job that has ended, and its images; cancel other jobs first (409)."""
    record = await context.find_job(job_id)
    if not record.state.terminal:
        raise Conflict(f"job {job_id} is {record.state.value}; cancel it first", param="id")
    await context.services.storage.delete_prefix(f"jobs/{job_id}/")
    await context.services.queue.jobs.forget(job_id)
    return Response(status_code=204)


_TIME_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number"}]}


class ListQuery(BaseModel):
    """Filters and paging of a list."""

    status: str | None = Field(None, max_length=128, description="One or more states, separated by commas.")
    model: str | None = Field(None, max_length=128)
    batch_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    created_after: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; inclusive.", json_schema_extra=_TIME_SCHEMA
    )
    created_before: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; exclusive.", json_schema_extra=_TIME_SCHEMA
    )
    after: str | None = Field(None, max_length=128, description="`next_cursor` of the previous page.")
    limit: int = Field(20, ge=1, le=MAX_LIMIT)


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


@router.get("", responses=problems(422, 503) | {200: {"model": JobList}})
async def list_jobs(request: Request, context: Context, query: Annotated[ListQuery, Query()]) -> Response:
    """List jobs, newest first. `metadata.KEY=VALUE` selects jobs with that metadata."""
    metadata = _metadata(request.query_params.multi_items())
    async with _scans.turn(context.tenant, 1) if _is_filtered(query, metadata) else contextlib.nullcontext():
        records, cursor = await _page(query, metadata, context)
    data = [job_object(record, context.base_url, sign=context.sign) for record in records]
    page = JobList(
        data=data,
        has_more=cursor is not None,
        next_cursor=cursor,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )
    return Response(page.model_dump_json(), media_type="application/json")


def _is_filtered(query: ListQuery, metadata: dict[str, str]) -> bool:
    return query.status is not None or query.model is not None or bool(metadata)


async def _page(
    query: ListQuery, metadata: dict[str, str], context: RequestContext
) -> tuple[list[JobRecord], str | None]:
    """Return up to `limit` jobs and the next cursor.

    No index serves status, model and metadata: with these filters, at most `MAX_SCANNED` jobs are read.
    """
    states, filtered = _states(query.status), _is_filtered(query, metadata)
    page: list[JobRecord] = []
    cursor, scanned = query.after, 0
    while True:
        records, cursor = await context.services.queue.jobs.page(
            context.tenant,
            batch_id=query.batch_id,
            after=cursor,
            limit=SCAN_PAGE_SIZE if filtered else query.limit,
            created_after_ms=_ms(query.created_after),
            created_before_ms=_ms(query.created_before),
        )
        scanned += SCAN_PAGE_SIZE
        for record in records:
            job = record.job
            if (
                (not states or record.state in states)
                and query.model in (None, job.model)
                and metadata.items() <= job.metadata.items()
            ):
                page.append(record)
                if len(page) == query.limit:
                    return page, cursor if record is records[-1] else job.id
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
    """Return the metadata filter, or raise `InvalidRequest` for unknown and repeated parameters of the query."""
    metadata: dict[str, str] = {}
    seen: set[str] = set()
    for name, value in params:
        if name in seen:
            raise InvalidRequest(f"{name[:64]}: sent twice", param=name)
        seen.add(name)
        if name.startswith(_METADATA):
            metadata[name.removeprefix(_METADATA)] = value
        elif name not in ListQuery.model_fields:
            raise InvalidRequest(f"{name[:64]}: there is no such parameter", param=name)
    if len(metadata) > 16:
        raise InvalidRequest("metadata: at most 16 keys", param="metadata")
    return metadata


def _ms(time: datetime | None) -> int | None:
    if time is None:
        return None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
