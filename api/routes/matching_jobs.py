"""Routes that change all jobs that match filters, piece by piece: cancel, pause, resume, update, retry, delete."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field

from api.context import OF_TENANT, ChangeContext, MatchingContext
from api.http.lists import SCANS, After, known_parameters
from api.http.openapi import problems
from api.retries import RETRIED, submit_retries
from api.routes.job_changes import UPDATE_BODY, delete_ended, read_update
from api.routes.job_lists import MAX_SCANNED, METADATA, JobFilters, Selection
from api.submission import IdempotencyKey, idempotency, reserved_id
from shared.errors import Conflict, FusequeueError, InvalidRequest
from shared.job_record import JobRecord
from shared.queue.records import SubmitResult
from shared.runtime.clock import now_ms

router = APIRouter(tags=["jobs"])

MAX_RETRIED = 200  # jobs retried by one request: each looks for its input images
MAX_DELETED = 100  # jobs deleted by one request: each takes several calls of the storage
_CONCURRENT = 8


class MatchingJobsQuery(JobFilters):
    """Filters of the jobs to change, and where the next piece of them begins."""

    tenant: str | None = Field(None, max_length=64, description=OF_TENANT)
    dry_run: bool = Field(False, description="Change nothing: return what would change.")
    after: After = None


class JobPiece(BaseModel):
    """The part of the jobs that one request has changed.

    While `has_more` is true, the same request with `after=next_cursor` continues.
    """

    object: Literal["job_changes"] = "job_changes"
    ids: list[str] = Field(description="The jobs that this request has changed, or would change.")
    skipped: int = Field(description="Jobs that match and are not changed, such as ended ones of a cancel.")
    dry_run: bool = Field(description="Whether nothing was changed.")
    has_more: bool
    next_cursor: str | None


class RetryPiece(JobPiece):
    """The part of the jobs that one request has retried."""

    new_ids: dict[str, str] = Field(description="The new jobs, by the ids of those retried.")


class _Applied(NamedTuple):
    """The ids of the jobs changed; `left` is the first job that is left to the next request."""

    ids: list[str]
    left: JobRecord | None = None


@dataclass(frozen=True)
class _Change:
    """What to do to the jobs that match."""

    name: str
    affects: Callable[[JobRecord], bool]
    apply: Callable[[list[JobRecord]], Awaitable[_Applied]]
    most: int
    newest_first: bool = True
    makes_jobs: bool = False
    detail: str = ""


_KNOWN = known_parameters(*MatchingJobsQuery.model_fields, prefix=METADATA)
MatchingQuery = Annotated[MatchingJobsQuery, Query()]


@router.post("/v1/jobs:cancel", responses=problems(422, 503), dependencies=[_KNOWN])
async def cancel_jobs(request: Request, context: MatchingContext, query: MatchingQuery) -> JobPiece:
    """Cancel the jobs that match the filters, of which at least one is required: queued ones at once, running ones at
    their next step. A request handles a bounded number of jobs, newest first."""

    async def cancel(records: list[JobRecord]) -> _Applied:
        ids = [record.job.id for record in records]
        return _chosen(ids, await context.services.queue.changes.cancel(ids))

    change = _Change("cancel", lambda record: not record.state.terminal, cancel, MAX_SCANNED)
    return await _change(request, context, query, change)


@router.post("/v1/jobs:pause", responses=problems(422, 503), dependencies=[_KNOWN])
async def pause_jobs(request: Request, context: MatchingContext, query: MatchingQuery) -> JobPiece:
    """Pause the jobs that match the filters, of which at least one is required: queued ones at once, running ones at
    their next step. A request handles a bounded number of jobs, newest first: of those queued, the last to start."""

    async def pause(records: list[JobRecord]) -> _Applied:
        ids = [record.job.id for record in records]
        return _chosen(ids, await context.services.queue.changes.pause(ids))

    def affects(record: JobRecord) -> bool:
        return not record.state.terminal and not record.cancel_requested and record.paused_at_ms is None

    change = _Change("pause_jobs", affects, pause, MAX_SCANNED)
    return await _change(request, context, query, change)


@router.post("/v1/jobs:resume", responses=problems(422, 503), dependencies=[_KNOWN])
async def resume_jobs(request: Request, context: MatchingContext, query: MatchingQuery) -> JobPiece:
    """End the pauses of the jobs that match the filters, of which at least one is required. A request handles a bounded
    number of jobs, oldest first."""

    async def resume(records: list[JobRecord]) -> _Applied:
        ids = [record.job.id for record in records]
        return _chosen(ids, await context.services.queue.changes.resume(ids))

    def affects(record: JobRecord) -> bool:
        return not record.state.terminal and record.paused_at_ms is not None

    change = _Change("resume_jobs", affects, resume, MAX_SCANNED, newest_first=False)
    return await _change(request, context, query, change)


@router.post(
    "/v1/jobs:update",
    openapi_extra=UPDATE_BODY,
    responses=problems(400, 409, 413, 415, 422, 503),
    dependencies=[_KNOWN],
)
async def update_jobs(request: Request, context: MatchingContext, query: MatchingQuery) -> JobPiece:
    """Change the priority or the deadline of the queued jobs that match the filters, of which at least one is required.
    A request handles a bounded number of jobs, oldest first: they keep their order. Jobs for later that would end
    before they are due are skipped."""
    update = await read_update(request)

    def affects(record: JobRecord) -> bool:
        return update.changes(record) and not update.ends_early(record)

    async def apply(records: list[JobRecord]) -> _Applied:
        ids = [record.job.id for record in records]
        states = await context.services.queue.changes.update(ids, update)
        return _chosen(ids, [state == "queued" for state in states])

    change = _Change("update", affects, apply, MAX_SCANNED, newest_first=False, detail=update.text)
    return await _change(request, context, query, change)


@router.post("/v1/jobs:retry", responses=problems(422, 429, 503), dependencies=[_KNOWN])
async def retry_jobs(
    request: Request, context: MatchingContext, query: MatchingQuery, key: IdempotencyKey = None
) -> RetryPiece:
    """Queue new jobs with the parameters of the failed, canceled and expired jobs that match the filters, of which at
    least one is required; those created before the first request, oldest first. A request handles a bounded number of
    jobs. One that is refused (429) has queued none; where the queue is full after some, the response has those, and
    `next_cursor`. A repetition returns the same new jobs. With an Idempotency-Key it retries none of them, even if they
    have failed since: send one where the response can be lost. Jobs with `after` wait for the retries of those jobs.
    Jobs whose model or input image is gone, and those with presigned URLs, are skipped."""
    new_ids: dict[str, str] = {}

    async def retry(records: list[JobRecord]) -> _Applied:
        results = await submit_retries([record.job for record in records], context.services)
        handled = handled_retries(results)
        for record, result in zip(records[:handled], results[:handled], strict=True):
            if not isinstance(result, FusequeueError):
                new_ids[record.job.id] = result.job_id
        return _Applied(list(new_ids), records[handled] if handled < len(records) else None)

    change = _Change(
        "retry", lambda record: record.state in RETRIED, retry, MAX_RETRIED, newest_first=False, makes_jobs=True
    )
    piece = await _change(request, context, query, change, key)
    return RetryPiece(**piece.model_dump(), new_ids=new_ids)


def handled_retries(results: Sequence[SubmitResult | FusequeueError]) -> int:
    """Return how many retries come before the first one that is refused for now; raises the refusal if no job is new.

    A refused request that had queued jobs would retry them too when it is repeated.
    """
    for handled, result in enumerate(results):
        if isinstance(result, FusequeueError) and not isinstance(result, InvalidRequest):
            if not handled and all(isinstance(one, FusequeueError) or one.replayed for one in results):
                raise result
            return handled
    return len(results)


@router.delete("/v1/jobs", responses=problems(422, 503), dependencies=[_KNOWN])
async def delete_jobs(request: Request, context: MatchingContext, query: MatchingQuery) -> JobPiece:
    """Delete the jobs that match the filters, of which at least one is required, and their images. Jobs that have not
    ended are skipped, and those from which others start: cancel them first. A request handles a bounded number of jobs,
    newest first."""

    async def unless_needed(record: JobRecord) -> bool:
        try:
            return await delete_ended(record.job.id, context)
        except Conflict:
            return False

    async def delete(records: list[JobRecord]) -> _Applied:
        done: list[bool] = []
        for start in range(0, len(records), _CONCURRENT):
            piece = records[start : start + _CONCURRENT]
            done += await asyncio.gather(*(unless_needed(record) for record in piece))
        return _chosen([record.job.id for record in records], done)

    change = _Change("delete", lambda record: record.state.terminal, delete, MAX_DELETED)
    return await _change(request, context, query, change)


async def _change(
    request: Request, context: ChangeContext, query: MatchingJobsQuery, change: _Change, key: str | None = None
) -> JobPiece:
    """Apply a change to the next jobs that match, or return what it would change."""
    jobs = Selection.of(query, request, context.services.catalog, newest_first=change.newest_first)
    if jobs.is_empty:
        raise InvalidRequest(
            "status: send at least one filter: status, model, batch_id, group, parent, prompt, created_after, "
            "created_before or metadata.KEY",
            param="status",
        )
    after, end_ms = await _piece_after(query, jobs, context, key) if change.makes_jobs else (query.after, math.inf)
    async with SCANS.turn(context.tenant, 1):
        records, cursor = await jobs.page(context, after, change.most, end_ms=end_ms)
        affected = [record for record in records if change.affects(record)]
        would = _Applied([record.job.id for record in affected])
        ids, left = would if query.dry_run else await change.apply(affected)
    if left is not None:
        records = records[: records.index(left)]
        cursor = records[-1].job.id if records else after or ""
    if ids and not query.dry_run:
        detail = ", ".join(filter(None, (change.detail, jobs.text)))
        await context.log(change.name, f"tenant {context.tenant}", len(ids), detail)
    return JobPiece(
        ids=ids,
        skipped=len(records) - len(ids),
        dry_run=query.dry_run,
        has_more=cursor is not None,
        next_cursor=f"{cursor}:{end_ms}" if cursor is not None and change.makes_jobs else cursor,
    )


async def _piece_after(
    query: MatchingJobsQuery, jobs: Selection, context: ChangeContext, key: str | None
) -> tuple[str | None, int]:
    """Return the last job of the piece before, and the end of the jobs of all pieces: the time of the first request.

    The new jobs can match too: if they fail at once, a retry without an end would retry them for ever. The end is that
    of an earlier request with the same Idempotency-Key.
    """
    job_id, _, end = (query.after or "").partition(":")
    if end.isdecimal() or query.dry_run:
        return job_id or None, int(end) if end.isdecimal() else now_ms()
    first = await reserved_id(idempotency(key, f"retry {jobs.text}".encode()), str(now_ms()), context)
    return job_id or None, int(first)


def _chosen(ids: Sequence[str], chosen: Sequence[bool]) -> _Applied:
    return _Applied([job_id for job_id, is_chosen in zip(ids, chosen, strict=True) if is_chosen])
