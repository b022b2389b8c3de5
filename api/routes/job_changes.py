"""Routes that change one job: its priority and deadline, cancel, pause, resume, retry, delete."""

from typing import Any

import structlog
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api import strict_json
from api.context import JobContext, RequestContext
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import body_schema, job_responses, problems, request_body
from api.jobs.request import validated
from api.responses import existing_job, job_response
from api.retries import RETRIED, submit_retries
from shared.errors import Conflict, FusequeueError, InvalidRequest, StorageUnavailable
from shared.job import State
from shared.job_fields import MAX_DEADLINE_S, Priority
from shared.queue.maintenance.changes import JobUpdate

log = structlog.get_logger()

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


class JobUpdateRequest(BaseModel):
    """New values of a queued job; what is left out stays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    priority: Priority | None = None
    deadline_s: float | None = Field(
        None, strict=True, gt=0, le=MAX_DEADLINE_S, description="Seconds from now; null removes the deadline."
    )


UPDATE_BODY: dict[str, Any] = request_body(
    "application/json", {"schema": body_schema(JobUpdateRequest), "example": {"priority": "interactive"}}
)


async def read_update(request: Request) -> JobUpdate:
    """Return the new values in a body, or raise `InvalidRequest`."""
    require_type(request, JSON_TYPES)
    body = validated(JobUpdateRequest, strict_json.decode(await request.body()))
    has_deadline = "deadline_s" in body.model_fields_set
    if body.priority is None and not has_deadline:
        raise InvalidRequest("priority: nothing to change; send priority, deadline_s or both", param="priority")
    limit_ms = max(1, round(body.deadline_s * 1000)) if body.deadline_s is not None else 0
    return JobUpdate(body.priority, limit_ms if has_deadline else None)


@router.patch(
    "/{job_id}", openapi_extra=UPDATE_BODY, responses=job_responses(200) | problems(400, 404, 409, 413, 415, 422, 503)
)
async def update_job(job_id: str, request: Request, context: JobContext) -> Response:
    """Change the priority or the deadline of a queued job, which keeps its place by age. Others do not change (409).

    That of a job for later counts from now too, and is not before it is due; one that waits for other jobs gets none.
    """
    update = await read_update(request)
    record = await context.find_job(job_id)
    queue = context.services.queue
    if update.ends_early(record):
        message = "deadline_s: it would end before not_before, or counts from the end of the jobs in after"
        raise InvalidRequest(message, param="deadline_s")
    state: State | None = record.state
    if update.changes(record):
        (state,) = await queue.changes.update([job_id], update)
        if state is State.QUEUED:
            await context.log("update", job_id, detail=f"tenant {context.tenant}: {update.text}")
    if state is not State.QUEUED:
        existing_job(None if state is None else record, job_id)
        raise Conflict(f"job {job_id} is {state}; only queued jobs can be changed", param="id")
    return job_response(await context.job_object(existing_job(await queue.jobs.get(job_id), job_id)))


@router.post("/{job_id}/cancel", responses=job_responses(200) | problems(404, 422, 503))
async def cancel_job(job_id: str, context: JobContext) -> Response:
    """Cancel a job: a queued one at once, a running one at its next step. It then never succeeds.

    One that has ended does not change.
    """
    await context.find_job(job_id)
    record = existing_job(await context.services.queue.jobs.cancel(job_id), job_id)
    await context.log("cancel", job_id, detail=f"tenant {context.tenant}")
    return job_response(await context.job_object(record))


@router.post("/{job_id}/pause", responses=job_responses(200) | problems(404, 422, 503))
async def pause_job(job_id: str, context: JobContext) -> Response:
    """Pause a job until it is resumed: a queued one at once, a running one at its next step, with a checkpoint.

    It counts as queued, and its deadline passes on. One that is paused for as long as results are kept expires. One
    that has ended, or is to be canceled, does not change.
    """
    await context.find_job(job_id)
    record = existing_job(await context.services.queue.jobs.pause(job_id), job_id)
    await context.log("pause_job", job_id, detail=f"tenant {context.tenant}")
    return job_response(await context.job_object(record))


@router.post("/{job_id}/resume", responses=job_responses(200) | problems(404, 422, 503))
async def resume_job(job_id: str, context: JobContext) -> Response:
    """End the pause of a job: it goes on at its step, on any worker, with its place by age. Others do not change."""
    await context.find_job(job_id)
    record = existing_job(await context.services.queue.jobs.resume(job_id), job_id)
    await context.log("resume_job", job_id, detail=f"tenant {context.tenant}")
    return job_response(await context.job_object(record))


@router.post("/{job_id}/retry", status_code=202, responses=job_responses(202) | problems(404, 409, 422, 429, 503))
async def retry_job(job_id: str, context: JobContext) -> Response:
    """Queue a new job with the parameters of one that has failed, expired or was canceled, and return the new one.

    A repetition returns the same new job, with `Idempotent-Replayed: true`.
    """
    record = await context.find_job(job_id)
    if record.state not in RETRIED:
        raise Conflict(
            f"job {job_id} is {record.state.value}; only failed, canceled and expired jobs can be retried", param="id"
        )
    (result,) = await submit_retries([record.job], context.services)
    if isinstance(result, FusequeueError):
        raise result
    await context.log("retry", job_id, detail=f"tenant {context.tenant}: as {result.job_id}")
    new = await context.services.queue.jobs.get(result.job_id)
    if new is None:
        raise Conflict(f"job {job_id} was retried as {result.job_id}, which has been deleted; submit it again")
    headers = {"Location": context.job_url(result.job_id)}
    if result.replayed:
        headers["Idempotent-Replayed"] = "true"
    return job_response(await context.job_object(new), status=202, headers=headers)


@router.delete("/{job_id}", status_code=204, responses=problems(404, 409, 422, 503))
async def delete_job(job_id: str, context: JobContext) -> Response:
    """Delete a job that has ended, and its images; cancel other jobs first (409), also those that start from them."""
    record = await context.find_job(job_id)
    if not record.state.terminal:
        raise Conflict(f"job {job_id} is {record.state.value}; cancel it first", param="id")
    await delete_ended(job_id, context)
    await context.log("delete", job_id, detail=f"tenant {context.tenant}")
    return Response(status_code=204)


async def delete_ended(job_id: str, context: RequestContext) -> bool:
    """Delete a job that has ended, and its images; False if there is none. Raises `Conflict` while another needs it.

    The record goes first, so that no job can start from images that are being deleted. In an outage of the storage, a
    sweep deletes the images later.
    """
    if not await context.services.queue.jobs.forget(job_id):
        return False
    try:
        await context.services.storage.delete_prefix(f"jobs/{job_id}/")
    except StorageUnavailable as error:
        log.warning("images_not_deleted", job_id=job_id, error=error.message)
    return True
