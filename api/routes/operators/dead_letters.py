"""Routes of dead letters: list, read, redrive and purge them, one or all that match filters."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.context import CallerDep, Context, ServicesDep
from api.http.lists import MAX_LIMIT, TIME_SCHEMA, After, Limit, Order, epoch_ms, known_parameters
from api.http.openapi import problems
from api.jobs.job_object import JobObject, iso, job_object
from shared.config.catalog import Catalog
from shared.errors import InvalidRequest, NotFound
from shared.queue import DeadLetter
from shared.queue.maintenance.actions import Action
from shared.queue.maintenance.dead_letters import LetterFilter

router = APIRouter(prefix="/v1", tags=["operations"])

MAX_CHANGED = 200  # dead letters that one request reads
_CONCURRENT = 8


class LetterFilters(BaseModel):
    """Which dead letters are meant; all filters must match."""

    tenant: str | None = Field(None, max_length=64, description="Whose job it is.")
    model: str | None = Field(None, max_length=128)
    reason: str | None = Field(None, max_length=64, examples=["worker_lost"])
    at_after: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; inclusive.", json_schema_extra=TIME_SCHEMA
    )
    at_before: datetime | None = Field(
        None, description="ISO 8601 or epoch seconds; exclusive.", json_schema_extra=TIME_SCHEMA
    )

    def filter(self, catalog: Catalog) -> LetterFilter:
        model = None if self.model is None else catalog.id_of(self.model)
        return LetterFilter(self.tenant, model, self.reason, epoch_ms(self.at_after), epoch_ms(self.at_before))


class LetterListQuery(LetterFilters):
    """Filters and paging of a list."""

    after: After = None
    limit: Limit = 20
    order: Order = "desc"


class MatchingLettersQuery(LetterFilters):
    """Filters of the dead letters to change, and where the next piece of them begins."""

    dry_run: bool = Field(False, description="Change nothing: return what would change.")
    after: After = None


class DeadLetterObject(BaseModel):
    """A dead letter; `job` is null for a queue entry that could not be read."""

    id: str
    object: Literal["dead_letter"] = "dead_letter"
    at: str | None = Field(description="When it became a dead letter.")
    reason: str
    detail: str
    tenant: str | None = Field(description="Whose job it is; null without a job.")
    job: JobObject | None


class DeadLetterList(BaseModel):
    """A page of dead letters. A filtered page can be short or empty while `has_more` is true."""

    object: Literal["list"] = "list"
    data: list[DeadLetterObject]
    has_more: bool
    next_cursor: str | None


class LetterPiece(BaseModel):
    """The part of the dead letters that one request has changed.

    While `has_more` is true, the same request with `after=next_cursor` continues.
    """

    object: Literal["dead_letter_changes"] = "dead_letter_changes"
    ids: list[str] = Field(description="The dead letters that this request has changed, or would change.")
    skipped: int = Field(description="Those that match and are not changed: without a job, there is none to redrive.")
    dry_run: bool = Field(description="Whether nothing was changed.")
    has_more: bool
    next_cursor: str | None


_MATCHING = known_parameters(*MatchingLettersQuery.model_fields)
MatchingQuery = Annotated[MatchingLettersQuery, Query()]


@router.get(
    "/dead-letters", responses=problems(422, 503), dependencies=[known_parameters(*LetterListQuery.model_fields)]
)
async def list_dead_letters(context: Context, query: Annotated[LetterListQuery, Query()]) -> DeadLetterList:
    """List dead letters, by default newest first."""
    letters, cursor = await context.services.queue.dead_letters.page(
        query.after,
        min(query.limit, MAX_LIMIT),
        newest_first=query.order == "desc",
        matching=query.filter(context.services.catalog),
    )
    return DeadLetterList(
        data=[_letter_object(letter, context.base_url) for letter in letters],
        has_more=cursor is not None,
        next_cursor=cursor,
    )


@router.post("/dead-letters:redrive", responses=problems(422, 503), dependencies=[_MATCHING])
async def redrive_dead_letters(services: ServicesDep, caller: CallerDep, query: MatchingQuery) -> LetterPiece:
    """Queue the jobs of the dead letters that match the filters, of which at least one is required, with their attempts
    reset. A request handles a bounded number of dead letters, oldest first."""
    redrive = services.queue.dead_letters.redrive
    return await _change(services, caller, query, "redrive", lambda letter: letter.record is not None, redrive)


@router.post("/dead-letters:purge", responses=problems(422, 503), dependencies=[_MATCHING])
async def purge_dead_letters(services: ServicesDep, caller: CallerDep, query: MatchingQuery) -> LetterPiece:
    """Delete the dead letters that match the filters, of which at least one is required, and the records of their jobs.
    A request handles a bounded number of dead letters, oldest first."""
    return await _change(services, caller, query, "purge", lambda letter: True, services.queue.dead_letters.purge)


@router.get("/dead-letters/{letter_id}", responses=problems(404, 503))
async def get_dead_letter(letter_id: str, context: Context) -> DeadLetterObject:
    """Read one dead letter."""
    letter = await context.services.queue.dead_letters.get(letter_id)
    if letter is None:
        raise _no_letter(letter_id)
    return _letter_object(letter, context.base_url)


@router.post("/dead-letters/{letter_id}/redrive", status_code=204, responses=problems(404, 503))
async def redrive_dead_letter(letter_id: str, context: Context, caller: CallerDep) -> Response:
    """Queue the job again with its attempts reset; an entry without a job cannot be redriven (404)."""
    queue = context.services.queue
    if not await queue.dead_letters.redrive(letter_id):
        raise _no_letter(letter_id)
    await queue.actions.record(Action("redrive", letter_id, caller.key_id or ""))
    return Response(status_code=204)


@router.delete("/dead-letters/{letter_id}", status_code=204, responses=problems(404, 503))
async def purge_dead_letter(letter_id: str, context: Context, caller: CallerDep) -> Response:
    """Delete a dead letter and the record of its job."""
    queue = context.services.queue
    if not await queue.dead_letters.purge(letter_id):
        raise _no_letter(letter_id)
    await queue.actions.record(Action("purge", letter_id, caller.key_id or ""))
    return Response(status_code=204)


async def _change(
    services: ServicesDep,
    caller: CallerDep,
    query: MatchingLettersQuery,
    name: str,
    affects: Callable[[DeadLetter], bool],
    change: Callable[[str], Awaitable[bool]],
) -> LetterPiece:
    """Change the next dead letters that match, a few at a time, or return those that would change."""
    matching = query.filter(services.catalog)
    if matching == LetterFilter():
        raise InvalidRequest(
            "reason: send at least one filter: tenant, model, reason, at_after or at_before", param="reason"
        )
    letters, cursor = await services.queue.dead_letters.page(
        query.after, MAX_CHANGED, newest_first=False, matching=matching
    )
    ids = [letter.id for letter in letters if affects(letter)]
    if not query.dry_run:
        done: list[bool] = []
        for start in range(0, len(ids), _CONCURRENT):
            done += await asyncio.gather(*map(change, ids[start : start + _CONCURRENT]))
        ids = [letter_id for letter_id, is_done in zip(ids, done, strict=True) if is_done]
    if ids and not query.dry_run:
        filters = query.model_dump(mode="json", include=set(LetterFilters.model_fields), exclude_none=True)
        detail = ", ".join(f"{field}={value}" for field, value in filters.items())
        await services.queue.actions.record(Action(name, "dead letters", caller.key_id or "", len(ids), detail))
    return LetterPiece(
        ids=ids,
        skipped=len(letters) - len(ids),
        dry_run=query.dry_run,
        has_more=cursor is not None,
        next_cursor=cursor,
    )


def _no_letter(letter_id: str) -> NotFound:
    return NotFound(f"there is no dead letter {letter_id[:64]}, or it has no job", param="id")


def _letter_object(letter: DeadLetter, base_url: str) -> DeadLetterObject:
    record = letter.record
    return DeadLetterObject(
        id=letter.id,
        at=iso(letter.at_ms),
        reason=letter.reason,
        detail=letter.detail,
        tenant=None if record is None else record.job.tenant,
        job=None if record is None else job_object(record, base_url),
    )
