"""Routes for dead letters: jobs whose attempts all failed, and queue entries that could not be read."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.context import Context
from api.http.openapi import problems
from shared.errors import NotFound
from shared.protocols.native import JobObject, iso, job_object
from shared.queue import DeadLetter

router = APIRouter(prefix="/v1/dead-letters", tags=["operations"])


class DeadLetterObject(BaseModel):
    """A dead letter; `job` is null for a queue entry that could not be read."""

    id: str
    object: Literal["dead_letter"] = "dead_letter"
    at: str | None = Field(description="When it became a dead letter.")
    reason: str
    detail: str
    job: JobObject | None


class DeadLetterList(BaseModel):
    object: Literal["list"] = "list"
    data: list[DeadLetterObject]
    has_more: bool
    next_cursor: str | None


@router.get("", responses=problems(422, 503))
async def list_dead_letters(
    context: Context,
    after: Annotated[str | None, Query(max_length=128, description="`next_cursor` of the previous page.")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> DeadLetterList:
    """List dead letters, newest first."""
    letters, cursor = await context.services.queue.dead_letters.page(after, limit)
    return DeadLetterList(
        data=[_object(letter, context.base_url) for letter in letters], has_more=cursor is not None, next_cursor=cursor
    )


@router.get("/{letter_id}", responses=problems(404, 503))
async def get_dead_letter(letter_id: str, context: Context) -> DeadLetterObject:
    """Read one dead letter."""
    letter = await context.services.queue.dead_letters.get(letter_id)
    if letter is None:
        raise _not_found(letter_id)
    return _object(letter, context.base_url)


@router.post("/{letter_id}/redrive", status_code=204, responses=problems(404, 503))
async def redrive_dead_letter(letter_id: str, context: Context) -> Response:
    """Queue the job again with its attempts reset; an entry without a job cannot be redriven (404)."""
    if not await context.services.queue.dead_letters.redrive(letter_id):
        raise _not_found(letter_id)
    return Response(status_code=204)


@router.delete("/{letter_id}", status_code=204, responses=problems(404, 503))
async def purge_dead_letter(letter_id: str, context: Context) -> Response:
    """Delete a dead letter and the record of its job."""
    if not await context.services.queue.dead_letters.purge(letter_id):
        raise _not_found(letter_id)
    return Response(status_code=204)


def _not_found(letter_id: str) -> NotFound:
    return NotFound(f"there is no dead letter {letter_id[:64]}, or it has no job", param="id")


def _object(letter: DeadLetter, base_url: str) -> DeadLetterObject:
    job = None if letter.record is None else job_object(letter.record, base_url)
    return DeadLetterObject(id=letter.id, at=iso(letter.at_ms), reason=letter.reason, detail=letter.detail, job=job)
