"""The one way to submit a job: check the request, build its job, and put it into the queue.

The native routes and the calls of every other protocol use `submit`; bulk requests call `build_submission` for each
line and `submit_entries` for many lines at once.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, Header

from api.context import RequestContext, Services
from api.jobs import job_builder
from api.jobs.request import JobRequest
from api.jobs.resolve import parse_request, resolve
from shared.errors import Conflict, FusequeueError, InvalidRequest
from shared.job import State
from shared.job_record import JobRecord
from shared.queue import Submission, SubmitResult
from shared.runtime import metrics, tracing

_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_pending_submits: set[asyncio.Task[list[SubmitResult | FusequeueError]]] = set()

SubmissionOrReplay = Submission | SubmitResult
"""A job ready for the queue, or the one that an earlier request with the same Idempotency-Key submitted."""


def parse_job(body: Any, services: Services) -> JobRequest:
    """Return the job request of a decoded JSON body, or raise `InvalidRequest` with the faults of all its fields."""
    return parse_request(body, services.catalog.get, services)[0]


@dataclass(frozen=True)
class Idempotency:
    """What a repeated request is recognized by: a client's Idempotency-Key and the sha256 of the raw body, or without a
    key the digest of a request that waits for its job."""

    key: str | None = None
    fingerprint: str | None = None
    sync_call: str | None = None

    def of(self, submission: Submission) -> Submission:
        """Return the submission of such a request."""
        return replace(submission, idempotency_key=self.key, fingerprint=self.fingerprint, sync_call=self.sync_call)


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
    entry = await build_submission(request, context, idempotency, previews=previews, webhook_version=webhook_version)
    result = entry if isinstance(entry, SubmitResult) else await _submit_grouped(entry, context.services)
    model = context.services.catalog.get(request.model).id
    tracing.set_attributes({"fusequeue.job.id": result.job_id, "fusequeue.model": model})
    if isinstance(entry, Submission) and not result.replayed:
        if result.position is not None:
            context.services.queue_positions.keep(result.job_id, result.position)
        waits = result.position is None and (entry.job.not_before_ms is not None or bool(entry.job.parents))
        queued = JobRecord(job=entry.job, state=State.QUEUED, waits=waits, deadline_at_ms=result.deadline_at_ms)
        return AcceptedJob(queued, replayed=False)
    record = await context.services.queue.jobs.get(result.job_id)
    if record is None:
        raise Conflict(
            f"the job of this Idempotency-Key has been deleted: {result.job_id}; use another key for another job",
            param="Idempotency-Key",
        )
    return AcceptedJob(record, replayed=True)


async def _submit_grouped(submission: Submission, services: Services) -> SubmitResult:
    """Put a job into the queue, in one script with others that arrive meanwhile; raises why it was refused."""
    result = await services.submits.call(submission)
    metrics.submits.labels(submission.job.model, result_label(result)).inc()
    if isinstance(result, FusequeueError):
        raise result
    return result


async def build_submission(
    request: JobRequest,
    context: RequestContext,
    idempotency: Idempotency = _NO_KEY,
    *,
    previews: int = 0,
    webhook_version: str | None = None,
) -> SubmissionOrReplay:
    """Check the request, store its input images and build its job, or raise `InvalidRequest`.

    A request that names something to fetch and whose Idempotency-Key is known is not built.
    """
    services = context.services
    await services.learned_models.refresh()
    like_earlier = services.job_templates.submission(request, context.tenant, previews)
    if like_earlier is not None:
        return idempotency.of(like_earlier)
    resolved = resolve(request, services, context.tenant)
    if idempotency.key is not None and (request.references or request.fetches_adapters):
        known = await services.queue.jobs.submitted_before(context.tenant, idempotency.key, idempotency.fingerprint)
        if known is not None:
            metrics.submits.labels(resolved.model, "replayed").inc()
            return known
    job = await job_builder.build_job(
        resolved,
        request,
        services,
        base_url=context.base_url,
        previews=previews,
        webhook_version=webhook_version,
    )
    submission = job_builder.make_submission(job, services.catalog)
    services.job_templates.keep(request, submission)
    return idempotency.of(submission)


async def submit_entries(
    entries: Sequence[SubmissionOrReplay | FusequeueError], services: Services
) -> list[SubmitResult | FusequeueError]:
    """Put the submissions into the queue in one script, and return the result of each entry, in order.

    The script ends even if the client disconnects.
    """
    submissions = [entry for entry in entries if isinstance(entry, Submission)]
    if not submissions:
        return [entry for entry in entries if not isinstance(entry, Submission)]
    task = asyncio.ensure_future(services.queue.jobs.submit(submissions))
    _pending_submits.add(task)
    task.add_done_callback(_pending_submits.discard)
    results = await asyncio.shield(task)
    models = (submission.job.model for submission in submissions)
    for labels, count in Counter(zip(models, map(result_label, results), strict=True)).items():
        metrics.submits.labels(*labels).inc(count)
    remaining = iter(results)
    return [next(remaining) if isinstance(entry, Submission) else entry for entry in entries]


def result_label(result: SubmitResult | FusequeueError) -> str:
    """Return the metrics label of a result: `accepted`, `replayed` or an error code."""
    if isinstance(result, FusequeueError):
        return result.code
    return "replayed" if result.replayed else "accepted"


async def reserved_id(idempotency: Idempotency, object_id: str, context: RequestContext) -> str:
    """Return the id for a new object: that of the earlier request with the same Idempotency-Key, else `object_id`.

    An object with an earlier id exists, unless it was deleted or its creation was interrupted: then create it again.
    """
    if idempotency.key is None:
        return object_id
    jobs = context.services.queue.jobs
    return await jobs.reserve_key(context.tenant, idempotency.key, idempotency.fingerprint or "", object_id)


async def idempotency_key(
    key: Annotated[
        str | None, Header(alias="Idempotency-Key", description="1 to 255 visible ASCII characters; kept for a day.")
    ] = None,
) -> str | None:
    """Return the request's Idempotency-Key, or raise `InvalidRequest`."""
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest("Idempotency-Key must be 1 to 255 visible ASCII characters", param="Idempotency-Key")
    return key


IdempotencyKey = Annotated[str | None, Depends(idempotency_key)]


def idempotency(key: str | None, raw: bytes, line: int | None = None) -> Idempotency:
    """Return the key and fingerprint of the body `raw`; each line of a bulk request has a key with its number."""
    if key is None:
        return _NO_KEY
    return Idempotency(key if line is None else f"{key}:line:{line}", hashlib.sha256(raw).hexdigest())
