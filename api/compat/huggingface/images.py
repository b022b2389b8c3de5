"""`/compat/huggingface/{model}`: one picture in one call, as bytes. It is a job like any other, waited for by the
request that made it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from api.compat.huggingface.inference_request import Inference, request_of
from api.compat.sync_calls import SyncCall, request_digest, submit
from api.context import Context
from api.errors import for_error
from api.http.body_limits import JSON_TYPES, require_type
from api.http.openapi import problems
from api.http.streaming import StreamedResponse, with_first_read
from shared.errors import FusequeueError
from shared.job import JobRecord
from shared.runtime import strict_json

PREFIX = "/compat/huggingface"
OVERHEAD_BYTES = 256 * 1024
"""What a body holds beside its picture."""


class Told(APIRoute):
    """Tells errors in words: where ours have an object, `huggingface_hub` shows what it finds in `error`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                answer = await handle(request)
            except FusequeueError as error:
                answer = for_error(request.scope, error)
            return _in_words(answer) if answer.media_type == "application/problem+json" else answer

        return handled


router = APIRouter(prefix=PREFIX, tags=["Hugging Face"], route_class=Told)

_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": Inference.model_json_schema(),
            "example": {"inputs": "a red circle on a blue ground, left", "parameters": {"seed": 7}},
        }
    },
}
_ANSWERS = problems(400, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504) | {
    200: {
        "description": "The picture, of the kind that `Accept` names.",
        "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/{model:path}", openapi_extra={"requestBody": _BODY}, responses=_ANSWERS)
async def make_picture(request: Request, model: str, context: Context) -> Response:
    """Make one picture from words, or from a picture and words, and wait for it: what `InferenceClient(model=URL)` asks
    with `text_to_image` and `image_to_image`. The headers `x-job-id` and `x-seed` tell of which job it is."""
    require_type(request, JSON_TYPES)
    raw = await request.body()
    asked = request_of(strict_json.decode(raw), model, request.headers.get("accept", ""), context.services.catalog)
    context.services.waiters.check()
    digest = request_digest(request, (raw,))
    job_id = (await submit(asked, context, digest)).id

    async def picture(record: JobRecord) -> StreamedResponse:
        found = record.artifacts[0]
        pieces = await with_first_read(context.services.storage.stream(found.key, 0, found.bytes), param="inputs")
        told = {"Content-Length": str(found.bytes), "x-job-id": job_id, "x-seed": str(found.seed)}
        return StreamedResponse(pieces, media_type=found.content_type, headers={**told, "Cache-Control": "no-store"})

    return await SyncCall(job_id, context.tenant, digest, context.services).respond(request, picture)


def _in_words(answer: Response) -> Response:
    """Return a problem with its `error` as the text that people are shown."""
    body = json.loads(bytes(answer.body))
    headers = {name: value for name, value in answer.headers.items() if name not in ("content-length", "content-type")}
    return Response(
        json.dumps({**body, "error": body["detail"]}),
        answer.status_code,
        headers,
        media_type="application/problem+json",
    )
