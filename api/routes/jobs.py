"""One job: submit, read, cancel, delete."""

from __future__ import annotations

import contextlib
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from api import submission, waiting
from api.bodies import JSON_TYPES, require_type
from api.context import Services
from api.http.openapi import job_answers, json_body, problems
from api.idempotency import Key, once
from api.responses import find, job_answer, of_replay, placed, still_there
from api.visit import Context
from shared.errors import Conflict, FusequeueError, Unavailable
from shared.job import JobRecord, State
from shared.protocols.native import job_object
from shared.queue import Submission, Submitted

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Prefer = Annotated[str | None, Header(description="`wait=n`: answer 200 if the job ends within n seconds.")]
Wait = Annotated[
    float | None,
    Query(ge=0, allow_inf_nan=False, description="Answer when the job has ended, at the latest after so many seconds."),
]


@router.post(
    "",
    status_code=202,
    openapi_extra=json_body(),
    responses=job_answers(200, 202) | problems(400, 404, 408, 409, 413, 415, 422, 429, 503),
)
async def submit_job(request: Request, context: Context, key: Key = None, prefer: Prefer = None) -> Response:
    """Submit a job. It is kept once this answers; with `Prefer: wait=n` the answer may be the finished job."""
    services = context.services
    require_type(request, JSON_TYPES)
    raw = await request.body()
    item = await submission.submission(raw, context.tenant, services, once(key, raw))
    outcome = item if isinstance(item, Submitted) else (await submission.submit([item], services))[0]
    if isinstance(outcome, FusequeueError):
        raise outcome
    headers = {"Location": f"{context.base_url}/v1/jobs/{outcome.job_id}"}
    if outcome.replayed:
        headers["Idempotent-Replayed"] = "true"
    wait_s = waiting.preferred_wait_s(prefer, services.settings.max_wait_s)
    if wait_s is not None:
        headers["Preference-Applied"] = f"wait={wait_s:.0f}"
    record = await _after_submit(item, outcome, wait_s, services)
    status = 200 if record.state.terminal else 202
    return job_answer(
        job_object(record, context.base_url, await placed(record, services), sign=context.sign),
        status=status,
        headers=headers,
    )


async def _after_submit(
    item: Submission | Submitted, outcome: Submitted, wait_s: float | None, services: Services
) -> JobRecord:
    """Return the job as it stands after the wait; the job is accepted, so what is unavailable now is no error."""
    if outcome.replayed or isinstance(item, Submitted):
        fresh = of_replay(await services.queue.jobs.get(outcome.job_id))
    else:
        fresh = JobRecord(job=item.job, state=State.QUEUED)
    if fresh.state.terminal or not wait_s:
        return fresh
    with contextlib.suppress(Unavailable):
        await waiting.until_terminal(outcome.job_id, wait_s, services)
        return await services.queue.jobs.get(outcome.job_id) or fresh
    return fresh


@router.get("/{job_id}", responses=job_answers(200, 304) | problems(404, 422, 503))
async def get_job(
    job_id: str, context: Context, wait: Wait = None, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Read a job; while it has not ended, `Retry-After` says when to ask again."""
    services = context.services
    record = await find(job_id, context)
    if wait and not record.state.terminal:
        await waiting.until_terminal(job_id, min(wait, services.settings.max_wait_s), services)
        record = still_there(await services.queue.jobs.get(job_id), job_id)
    return job_answer(
        job_object(record, context.base_url, await placed(record, services), sign=context.sign),
        if_none_match=if_none_match,
    )


@router.post("/{job_id}/cancel", responses=job_answers(200) | problems(404, 503))
async def cancel_job(job_id: str, context: Context) -> Response:
    """Cancel a job: at once while it waits, at its next step while it runs; one that has ended stays as it is."""
    await find(job_id, context)
    record = still_there(await context.services.queue.jobs.cancel(job_id), job_id)
    return job_answer(job_object(record, context.base_url, await placed(record, context.services), sign=context.sign))


@router.delete("/{job_id}", status_code=204, responses=problems(404, 409, 503))
async def delete_job(job_id: str, context: Context) -> Response:
    """Delete a job that has ended, its pictures first; one that has not must be canceled before (409)."""
    record = await find(job_id, context)
    if not record.state.terminal:
        raise Conflict(f"job {job_id} is {record.state.value}; cancel it first", param="id")
    await context.services.storage.delete_prefix(f"jobs/{job_id}/")
    await context.services.queue.jobs.forget(job_id)
    return Response(status_code=204)
