"""Answers that carry a job."""

from __future__ import annotations

import contextlib
import hashlib
import re

from starlette.responses import Response

from api.context import Services
from api.visit import RequestContext
from shared.errors import Conflict, NotFound, Unavailable
from shared.job import JobRecord, State
from shared.protocols.native import JobObject
from shared.queue import QueuePosition

_JOB_ID = re.compile(r"job_[0-9a-hjkmnp-tv-z]{26}")
MAX_RETRY_AFTER_S = 30


async def find(job_id: str, context: RequestContext) -> JobRecord:
    """Return the tenant's job in one round trip, or raise `NotFound`: another tenant's job is none."""
    record = await context.services.queue.jobs.get(job_id) if _JOB_ID.fullmatch(job_id) else None
    if record is None or record.job.tenant != context.tenant:
        raise NotFound(f"there is no job {job_id[:64]}, or no longer", param="id")
    return record


async def placed(record: JobRecord, services: Services) -> QueuePosition | None:
    """Return where a waiting job stands; a place that cannot be read is no reason to fail."""
    if record.state is not State.QUEUED:
        return None
    with contextlib.suppress(Unavailable):
        return await services.queue_positions.of(record.job.id)
    return None


def job_answer(
    shown: JobObject, *, status: int = 200, if_none_match: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Return the answer that shows a job: with its ETag, when to ask again, or 304 where the client has it already."""
    body = shown.model_dump_json().encode()
    told = {
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Cache-Control": "private, no-cache",
        **(headers or {}),
    }
    if not shown.status.terminal:
        told["Retry-After"] = str(retry_after_s(shown))
    if if_none_match is not None and matches(if_none_match, told["ETag"]):
        return Response(status_code=304, headers=told)
    return Response(body, status, told, "application/json")


def retry_after_s(shown: JobObject) -> int:
    """Return when it is worth asking again: soon for a job that runs, by its ETA for one that waits."""
    eta_s = shown.queue.eta_s if shown.queue is not None else None
    return 1 if eta_s is None else max(1, min(MAX_RETRY_AFTER_S, round(eta_s)))


def still_there(record: JobRecord | None, job_id: str) -> JobRecord:
    """Return the record of a job that was there a moment ago, or raise `NotFound`."""
    if record is None:
        raise NotFound(f"job {job_id} has just been deleted", param="id")
    return record


def of_replay(record: JobRecord | None) -> JobRecord:
    """Return the record of a replayed submit, or raise `Conflict` where that job has been deleted since."""
    if record is None:
        raise Conflict(
            "the job made with this Idempotency-Key has been deleted; use another key", param="Idempotency-Key"
        )
    return record


def matches(if_none_match: str, etag: str) -> bool:
    """Return whether the header `If-None-Match` names what has this ETag."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
