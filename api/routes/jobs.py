"""Routes of one job: submit and read it."""

import contextlib
import re
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from api import strict_json
from api.context import JOB_ID, Context, ReadContext, direct_context
from api.http.bodies import max_json_bytes, read_body, release_body
from api.http.direct_routes import DirectRoute, route_of
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import job_responses, json_body, problems
from api.responses import existing_job, job_response
from api.submission import IdempotencyKey, idempotency, idempotency_key, parse_job, submit
from api.waiting import preferred_wait_s
from shared.errors import Unavailable

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
reads = APIRouter(prefix="/v1/jobs", tags=["jobs"])

Prefer = Annotated[str | None, Header(description="`wait=n`: respond with 200 if the job ends within n seconds.")]
Wait = Annotated[
    float | None,
    Query(ge=0, allow_inf_nan=False, description="Wait for the job to end, at most this many seconds."),
]


@router.post(
    "",
    status_code=202,
    openapi_extra=json_body(),
    responses=job_responses(200, 202) | problems(400, 404, 408, 409, 413, 415, 422, 429, 503),
)
async def submit_job(request: Request, context: Context, key: IdempotencyKey = None, prefer: Prefer = None) -> Response:
    """Submit a job. It is stored before the response; with `Prefer: wait=n` the response can be the finished job."""
    require_type(request, JSON_TYPES)
    raw = await read_body(request, max_json_bytes(context.services.settings))
    accepted = await submit(parse_job(strict_json.decode(raw), context.services), context, idempotency(key, raw))
    del raw  # an image in it takes megabytes, and the response can wait
    release_body(request)
    record = accepted.record
    headers = {"Location": context.job_url(record.job.id)}
    if accepted.replayed:
        headers["Idempotent-Replayed"] = "true"
    wait_s = preferred_wait_s(prefer, context.services.settings.max_wait_s)
    if wait_s is not None:
        headers["Preference-Applied"] = f"wait={wait_s:.0f}"
        with contextlib.suppress(Unavailable):  # the job is stored: without Redis only the wait ends
            if wait_s and not record.state.terminal:
                await context.waiters.until_terminal(record.job.id, wait_s)
                record = await context.services.queue.jobs.get(record.job.id) or record
    status = 200 if record.state.terminal else 202
    return job_response(await context.job_object(record), status=status, headers=headers)


@reads.get("/{job_id}", responses=job_responses(200, 304) | problems(404, 422, 503))
async def get_job(
    job_id: str, context: ReadContext, wait: Wait = None, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Read a job. Until it has ended, `Retry-After` says when to poll again."""
    services = context.services
    record = await context.find_job(job_id)
    if wait and not record.state.terminal:
        await context.waiters.until_terminal(job_id, min(wait, services.settings.max_wait_s))
        record = existing_job(await services.queue.jobs.get(job_id), job_id)
    return job_response(await context.job_object(record), if_none_match=if_none_match)


async def _submit_directly(request: Request) -> Response:
    context = await direct_context(request)
    key = await idempotency_key(request.headers.get("idempotency-key"))
    return await submit_job(request, context, key, request.headers.get("prefer"))


async def _get_directly(request: Request) -> Response:
    context = await direct_context(request)
    job_id = str(request.scope["path"]).rpartition("/")[2]
    return await get_job(job_id, context, None, request.headers.get("if-none-match"))


DIRECT = (
    DirectRoute(route_of(router, submit_job), re.compile("/v1/jobs"), _submit_directly),
    DirectRoute(route_of(reads, get_job), re.compile(f"/v1/jobs/{JOB_ID.pattern}"), _get_directly),
)
"""Clients send these routes' requests far more often than others; see docs/design/request-cost.md."""
