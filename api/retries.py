"""Retries: new jobs with the parameters of ended ones, from their inputs as they are now."""

import asyncio
from collections.abc import Mapping, Sequence

from api.context import Services
from api.jobs import job_builder
from api.jobs.input_store import InputStore
from api.jobs.resolve import is_reserved
from api.submission import SubmissionOrReplay, submit_entries
from shared.artifact_ref import ArtifactRef
from shared.config.adapters import AdapterChoice, uploaded_ids
from shared.errors import FusequeueError, InputRejected, InvalidRequest
from shared.job import InputRef, Job, State
from shared.queue import SubmitResult
from shared.runtime import tracing
from shared.runtime.clock import new_id, now_ms

RETRIED = frozenset((State.FAILED, State.CANCELED, State.EXPIRED))
"""The states of jobs that can be retried."""

RETRIED_AT_ONCE = 16
"""Retries that one script queues; their input images are looked up at the same time."""


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
        changes |= await _current_inputs(job, services, new_ids)
        if uploaded_ids(job.adapters):
            choices = [AdapterChoice(id=one.id, scale=one.scale) for one in job.adapters]
            spec = services.catalog.get(job.model)
            changes["adapters"] = await job_builder.current_adapters(choices, spec, job.tenant, services.queue)
        return job_builder.make_submission(job.model_copy(update=changes), services.catalog, _retry_key(job.id))
    except InvalidRequest as error:
        return error


async def _current_inputs(job: Job, services: Services, new_ids: Mapping[str, str]) -> dict[str, object]:
    """Return the fields of a job with input images, as they are stored now or as retries of their sources will make
    them; raises `InputRejected`."""
    store = InputStore(job.tenant, services.queue, services.storage, services.settings, catalog=services.catalog)
    stored = {name: await _current_input(ref, name, store, services, new_ids) for name, ref in job.inputs.items()}

    def of_field(*fields: str) -> tuple[InputRef, ...]:
        return tuple(ref for name, ref in stored.items() if name.partition(".")[0] in fields)

    names = ("mask", "last_image", "video", "face_video", "audio")
    single = {name: stored[name] for name in names if name in stored}
    return {"images": of_field("image", "images"), "control_images": of_field("controls"), **single}


async def _current_input(
    ref: InputRef, name: str, store: InputStore, services: Services, new_ids: Mapping[str, str]
) -> InputRef:
    """Return an input of a retry: of a source that is retried with it or was before, the artifact of that retry."""
    if ref.source is None:
        stored = await store.resolve(ref.id, name)
        return stored.model_copy(update={"copy_of": ref.copy_of})
    earlier = await _earlier_retry(ref.source.job, store.tenant, services)
    if earlier is None and ref.source.job in new_ids:
        return ref.model_copy(update={"source": _artifact_of(new_ids[ref.source.job], ref.source)})
    try:
        return await store.resolve(ref.source, name)
    except InputRejected:
        if earlier is None:
            raise
        return await store.resolve(_artifact_of(earlier.job_id, ref.source), name)


def _artifact_of(job_id: str, source: ArtifactRef) -> ArtifactRef:
    return source.model_copy(update={"job": job_id})
