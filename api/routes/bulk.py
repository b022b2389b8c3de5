"""Many jobs in one request."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.bodies import NDJSON_TYPES, require_type
from api.bulk import BulkResponse, BulkSubmit
from api.http.openapi import ndjson_body, problems
from api.idempotency import Key
from api.visit import Context

router = APIRouter(tags=["jobs"])

_EXAMPLE = """{"line":1,"id":"job_01ja3v5c8zq3m7x2r4t6w8y0ab","replayed":false,"url":"http://127.0.0.1:8000/v1/jobs/job_01..."}
{"line":2,"error":{"code":"invalid_request","message":"n is at most 8","param":"n","status":422,"retryable":false}}
"""


@router.post(
    "/v1/jobs:bulk",
    openapi_extra=ndjson_body(),
    responses=problems(415, 422)
    | {
        200: {
            "description": "One result a line, in order, while the lines are still coming in. Blank lines have none.",
            "content": {"application/x-ndjson": {"schema": {"type": "string"}, "example": _EXAMPLE}},
        }
    },
)
async def submit_bulk(request: Request, context: Context, key: Key = None) -> Response:
    """Submit a job a line. A bad line gets an error that names its field, and the others go through.

    With an `Idempotency-Key`, a request that is sent again enqueues nothing twice: a line counts as the same by
    its number.
    """
    require_type(request, NDJSON_TYPES)
    settings = context.services.settings
    work = BulkSubmit(context, key)
    return BulkResponse(
        request.stream(), work, max_lines=settings.max_bulk_lines, max_line_bytes=settings.max_body_bytes
    )
