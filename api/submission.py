"""The one way to submit a job: check the request, build its job, and put it into the queue.

The native routes and the calls of every other protocol use `submit`; bulk requests call `build_submission` for each
line and `submit_entries` for many lines at once.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, Header

from api.context import RequestContext, Services
from api.jobs import job_builder
from api.jobs.input_store import InputStore
from api.jobs.request import JobRequest
from api.jobs.resolve import is_reserved, parse_request, resolve
from shared.config.adapters import AdapterChoice, uploaded_ids
from shared.errors import Conflict, FusequeueError, InvalidRequest
from shared.job import InputRef, Job, JobRecord, State
from shared.queue import Submission, SubmitResult
from shared.runtime import metrics, tracing
from shared.runtime.clock import new_id, now_ms

RETRIED = frozenset((State.FAILED, State.CANCELED, State.EXPIRED))
"""The states of jobs that can be retried."""

RETRIED_AT_ONCE = 16
"""Retries that one script queues; their input images are looked up at the same time."""

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


async def submit_retries(jobs: Sequence[Job], services: Services) -> list[SubmitResult | FusequeueError]:
    """Queue a new job for each of some ended ones, and return the results in order; a repetition queues no more.

    One that waited for others waits for those of them that are retried here or before it, and have not ended. Ends with
    the jobs among which one is refused for now. Each of several has a trace of its own.
    """
    retry = _retry if len(jobs) == 1 else _retry_in_new_trace
    results: list[SubmitResult | FusequeueError] = []
    for start in range(0, len(jobs), RETRIED_AT_ONCE):
        piece, at_ms = jobs[start : start + RETRIED_AT_ONCE], now_ms()
        new_ids = {job.id: new_id("job", at_ms) for job in piece}
        try:
            entries = await asyncio.gather(*(retry(job, services, new_ids) for job in piece))
            results += await submit_entries(entries, services)
        except FusequeueError as error:
            results += [error] * len(piece)
        if any(isinstance(one, FusequeueError) and not isinstance(one, InvalidRequest) for one in results[start:]):
            break
    return results


async def _retry_in_new_trace(
    job: Job, services: Services, new_ids: Mapping[str, str]
) -> SubmissionOrReplay | FusequeueError:
    with tracing.new_trace("submit"):
        return await _retry(job, services, new_ids)


async def _earlier_retry(job_id: str, tenant: str, services: Services) -> SubmitResult | None:
    return await services.queue.jobs.submitted_before(tenant, _retry_key(job_id), None)


def _retry_key(job_id: str) -> str:
    return f"retry {job_id}"  # no client's key has a space


async def _parents_of_retry(job: Job, services: Services, new_ids: Mapping[str, str]) -> tuple[str, ...]:
    """Return the jobs for which a retry waits: parents that are queued again, and retries of parents, unless they have
    ended. `new_ids` are those of jobs retried together with it."""
    earlier = await asyncio.gather(*(_earlier_retry(parent, job.tenant, services) for parent in job.after))
    known = [*job.after, *(one.job_id for one in earlier if one is not None)]
    records = await services.queue.jobs.get_many(known)
    waits_for = [record.job.id for record in records if record is not None and not record.state.terminal]
    retried = zip(job.after, earlier, strict=True)
    return (*waits_for, *(new_ids[parent] for parent, one in retried if one is None and parent in new_ids))


async def _retry(job: Job, services: Services, new_ids: Mapping[str, str]) -> SubmissionOrReplay | FusequeueError:
    """Return a new job with the parameters of an ended one, the one that an earlier retry has queued, or why there is
    none: the model, an input image, an adapter or the place of its outputs is gone."""
    known = await _earlier_retry(job.id, job.tenant, services)
    if known is not None:
        return known
    if job.output is not None and job.output.put_urls:
        message = "output: the presigned URLs of the job are no longer known; submit it again with new ones"
        return InvalidRequest(message, param="output")
    is_counted = job.batch_id is not None and is_reserved(job.batch_id)  # its OpenAI batch has counted it
    changes: dict[str, object] = {
        "id": new_ids[job.id],
        "created_at_ms": now_ms(),
        "not_before_ms": None,
        "after": await _parents_of_retry(job, services, new_ids) if job.after else (),
        "batch_id": None if is_counted else job.batch_id,
        "trace": tracing.current(),
    }
    try:
        changes |= await _current_inputs(job, services)
        if uploaded_ids(job.adapters):
            choices = [AdapterChoice(id=one.id, scale=one.scale) for one in job.adapters]
            spec = services.catalog.get(job.model)
            changes["adapters"] = await job_builder.current_adapters(choices, spec, job.tenant, services.queue)
        return job_builder.make_submission(job.model_copy(update=changes), services.catalog, _retry_key(job.id))
    except InvalidRequest as error:
        return error


async def _current_inputs(job: Job, services: Services) -> dict[str, object]:
    """Return the fields of a job with input images, as they are stored now; raises `InputRejected`."""
    store = InputStore(job.tenant, services.queue, services.storage, services.settings, catalog=services.catalog)
    stored = {name: await store.resolve(ref.source or ref.id, name) for name, ref in job.inputs.items()}

    def of_field(*fields: str) -> tuple[InputRef, ...]:
        return tuple(ref for name, ref in stored.items() if name.partition(".")[0] in fields)

    names = ("mask", "last_image", "video", "face_video", "audio")
    single = {name: stored[name] for name in names if name in stored}
    return {"images": of_field("image", "images"), "control_images": of_field("controls"), **single}


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
