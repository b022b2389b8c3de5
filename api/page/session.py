"""Routes for the page itself: what its key allows, and jobs with previews."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from api import strict_json
from api.context import JOBS_SCOPE, CallerDep, Context, ServicesDep
from api.http.bodies import max_json_bytes, read_body, release_body
from api.http.middleware import JSON_TYPES, require_type
from api.jobs.request import JobRequest
from api.responses import job_response
from api.submission import IdempotencyKey, idempotency, parse_job, submit
from shared.auth import Scope
from shared.job_fields import SENT_FIELDS, ChosenFields

router = APIRouter(prefix="/page", include_in_schema=False)

_OF_OWN_RULES = {
    *("model", "prompt", "negative_prompt", "step_cache", "frames", "fps", "layers"),
    *("on_deadline", "not_before", "after", "on_parent_failure", "metadata", "batch_id", "group"),
}
SAME_FIELDS: dict[str, Any] = {
    name: JobRequest.model_fields[name].default
    for name in (*ChosenFields.model_fields, *SENT_FIELDS)
    if name not in _OF_OWN_RULES
}
"""Fields that a request for a job like another repeats as they are, with the values that it can leave out."""

PREVIEWS = 6
"""Previews of each image: as many decodes of small latents, in forwards of the VAE that batch mates share."""


class Session(BaseModel):
    """The caller of the page, and `SAME_FIELDS`. Without keys it may do everything."""

    has_key: bool
    tenant: str
    scopes: tuple[Scope, ...]
    namespace: str
    max_input_bytes: int
    same_fields: dict[str, Any]


@router.get("/session")
async def get_session(caller: CallerDep, services: ServicesDep) -> Session:
    """Return what the caller may do."""
    return Session(
        has_key=caller.has_key,
        tenant=caller.tenant,
        scopes=tuple(sorted(Scope if caller.scopes is None else caller.scopes)),
        namespace=services.settings.namespace,
        max_input_bytes=services.settings.max_input_bytes,
        same_fields=SAME_FIELDS,
    )


@router.post("/jobs", dependencies=[JOBS_SCOPE])
async def submit_job_with_previews(request: Request, context: Context, key: IdempotencyKey = None) -> Response:
    """Submit a job as `POST /v1/jobs` does, with previews of its images."""
    require_type(request, JSON_TYPES)
    raw = await read_body(request, max_json_bytes(context.services.settings))
    body = parse_job(strict_json.decode(raw), context.services)
    accepted = await submit(body, context, idempotency(key, raw), previews=PREVIEWS)
    del raw  # an image in it takes megabytes
    release_body(request)
    return job_response(await context.job_object(accepted.record), status=202)
