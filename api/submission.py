"""The one way to submit a job: check the request, build its job, and put it into the queue.

The native routes and every compat protocol call `submit`; bulk requests call `prepare` for each line and
`submit_prepared` for many lines at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header

from api.context import RequestContext, Services
from shared import job_builder
from shared.errors import Conflict, FusequeueError, InvalidRequest
from shared.job import JobRecord, State
from shared.queue import Submission, Submitted
from shared.request import JobRequest
from shared.runtime import metrics

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_running: set[asyncio.Task[list[Submitted | FusequeueError]]] = set()

Prepared = Submission | Submitted
"""A job ready for the queue, or the one that an earlier request with the same Idempotency-Key submitted."""


@dataclass(frozen=True)
class Idempotency:
    """A client's Idempotency-Key and the sha256 of the raw body; both None without a key."""

    key: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class AcceptedJob:
    """The record of an accepted job; `replayed` if its Idempotency-Key was used before."""

    record: JobRecord
    replayed: bool


_NO_KEY = Idempotency()


async def submit(
    request: JobRequest,
    context: RequestContext,
    idempotency: Idempotency = _NO_KEY,
    *,
    previews: int = 0,
    webhook_version: str | None = None,
) -> AcceptedJob:
    """Submit one job and return it, or raise why it was refused; see `build_job` for the options."""
    item = await prepare(request, context, idempotency, previews=previews, webhook_version=webhook_version)
    outcome = (await submit_prepared([item], context.services))[0]
    if isinstance(outcome, FusequeueError):
        raise outcome
    if isinstance(item, Submission) and not outcome.replayed:
        return AcceptedJob(JobRecord(job=item.job, state=State.QUEUED), replayed=False)
    record = await context.services.queue.jobs.get(outcome.job_id)
    if record is None:
        raise Conflict("the job of this Idempotency-Key has been deleted; use another key", param="Idempotency-Key")
    return AcceptedJob(record, replayed=True)


async def prepare(
    request: JobRequest,
    context: RequestContext,
    idempotency: Idempotency = _NO_KEY,
    *,
    previews: int = 0,
    webhook_version: str | None = None,
) -> Prepared:
    """Check a request and build its job, or raise `InvalidRequest`. Its input images are stored afterwards.

    A request with images whose Idempotency-Key is known is not built: nothing is fetched for a replay.
    """
    services = context.services
    task = job_builder.check_request(request, services)
    if idempotency.key is not None and request.image_values:
        known = await services.queue.jobs.submitted_before(context.tenant, idempotency.key, idempotency.fingerprint)
        if known is not None:
            metrics.submits.labels(request.model, "replayed").inc()
            return known
    job = await job_builder.build_job(
        request, task, context.tenant, services, previews=previews, webhook_version=webhook_version
    )
    return job_builder.queue_submission(job, services.catalog, idempotency.key, idempotency.fingerprint)


async def submit_prepared(
    items: Sequence[Prepared | FusequeueError], services: Services
) -> list[Submitted | FusequeueError]:
    """Put the prepared jobs into the queue by one script, and return the outcome of each item, in order.

    The script runs to its end even if the client disconnects: all jobs are queued or none.
    """
    submissions = [item for item in items if isinstance(item, Submission)]
    if not submissions:
        return [item for item in items if not isinstance(item, Submission)]
    task = asyncio.ensure_future(services.queue.jobs.submit(submissions))
    _running.add(task)
    task.add_done_callback(_running.discard)
    outcomes = await asyncio.shield(task)
    for submission, outcome in zip(submissions, outcomes, strict=True):
        metrics.submits.labels(submission.job.model, outcome_label(outcome)).inc()
    remaining = iter(outcomes)
    return [next(remaining) if isinstance(item, Submission) else item for item in items]


def outcome_label(outcome: Submitted | FusequeueError) -> str:
    """Return the metrics label of an outcome: `accepted`, `replayed` or an error code."""
    if isinstance(outcome, FusequeueError):
        return outcome.code
    return "replayed" if outcome.replayed else "accepted"


async def idempotency_key(
    key: Annotated[
        str | None, Header(alias="Idempotency-Key", description="1 to 255 visible ASCII characters; kept for a day.")
    ] = None,
) -> str | None:
    """Return the request's Idempotency-Key, or raise `InvalidRequest`."""
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest("Idempotency-Key must be 1 to 255 visible ASCII characters", param="Idempotency-Key")
    return key


IdempotencyKey = Annotated[str | None, Depends(idempotency_key)]


def idempotency(key: str | None, raw: bytes, line: int | None = None) -> Idempotency:
    """Return the idempotency of the body `raw`; each line of a bulk request has a separate key, by its number."""
    if key is None:
        return _NO_KEY
    return Idempotency(key if line is None else f"{key}:line:{line}", hashlib.sha256(raw).hexdigest())
