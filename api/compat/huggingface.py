"""`/compat/huggingface/{model}`: the protocol of `huggingface_hub.InferenceClient`; waits for one image as bytes."""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api.compat.sync_calls import SyncCall, request_digest, submit, submit_with_key
from api.context import Context, RequestContext
from api.errors import TextProblem, for_error
from api.http.bodies import max_json_bytes, read_body, release_body
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import problems, request_body
from api.http.streaming import StreamedResponse, with_first_read
from api.submission import IdempotencyKey
from shared.config.models_file import Catalog
from shared.errors import FusequeueError, InvalidRequest
from shared.job import JobRecord, OutputFormat, Priority
from shared.job_builder import check_limits
from shared.request import JobRequest, parse, validated
from shared.runtime import strict_json

PREFIX = "/compat/huggingface"
_FORMATS = {kind.content_type: kind for kind in OutputFormat if kind is not OutputFormat.MP4}


class TargetSize(BaseModel):
    """`target_size` of `image_to_image`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    height: int


class InferenceRequest(BaseModel):
    """The body: the prompt in `inputs`, or an image as base64 with the prompt in `parameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Annotated[str, Field(min_length=1, description="Prompt; an image as base64 if parameters has a prompt.")]
    parameters: Annotated[dict[str, Any], Field(description="Job fields, by Hugging Face's names or ours.")] = {}
    options: Annotated[dict[str, Any] | None, Field(description="Accepted and ignored.")] = None


def parse_inference_request(body: Any, model: str, accept: str, catalog: Catalog) -> JobRequest:
    """Return the job request of a body; raises `InvalidRequest` with the invalid field. `accept` is a header."""
    inference = validated(InferenceRequest, body)
    values = {name: value for name, value in inference.parameters.items() if value is not None}
    for name in ("model", "image", "images", "batch_id"):
        if name in values:
            raise InvalidRequest(f"parameters.{name}: there is no such field", param=f"parameters.{name}")
    if "target_size" in values:
        values |= validated(TargetSize, values.pop("target_size")).model_dump()
    if "prompt" in values:
        values["image"] = f"data:;base64,{inference.inputs}"
    else:
        values["prompt"] = inference.inputs
    values.setdefault("priority", Priority.INTERACTIVE.value)
    values.setdefault("output_format", output_format(accept).value)
    request = parse({**values, "model": model})
    task = check_limits(request, catalog.get(model))
    if request.n != 1:
        raise InvalidRequest(f"n: a response has one image: {request.n}; send several requests", param="n")
    if task.makes_video:
        raise InvalidRequest(f"model {model!r} makes videos; use /v1/videos or /v1/jobs", param="model")
    return request


def output_format(accept: str) -> OutputFormat:
    """Return the first supported image format of the header `Accept`; default: PNG."""
    types = (part.partition(";")[0].strip() for part in accept.lower().split(","))
    return next((_FORMATS[kind] for kind in types if kind in _FORMATS), OutputFormat.PNG)


class TextErrorRoute(APIRoute):
    """Responds with `error` as text: `huggingface_hub` prints this field, which is an object in other protocols."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                response = await handler(request)
            except FusequeueError as error:
                response = for_error(request.scope, error)
            if response.media_type == "application/problem+json":
                problem = json.loads(bytes(response.body))
                response.body = json.dumps({**problem, "error": problem["detail"]}).encode()
                response.headers["content-length"] = str(len(response.body))
            return response

        return handle


router = APIRouter(prefix=PREFIX, tags=["Hugging Face"], route_class=TextErrorRoute)

_EXAMPLE = {"inputs": "a red circle on a blue ground, left", "parameters": {"seed": 7}}
_BODY = request_body("application/json", {"schema": InferenceRequest.model_json_schema(), "example": _EXAMPLE})
_ERRORS = problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504, model=TextProblem)
_RESPONSES = _ERRORS | {
    200: {
        "description": "The image, in the format of `Accept`.",
        "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post("/{model:path}", response_class=Response, openapi_extra=_BODY, responses=_RESPONSES)
async def make_image(request: Request, model: str, context: Context, key: IdempotencyKey = None) -> Response:
    """Generate or edit one image and wait for it: `text_to_image` and `image_to_image` of `InferenceClient(model=URL)`.
    The headers `x-job-id` and `x-seed` identify the job."""
    require_type(request, JSON_TYPES)
    job_id, digest = await _submit(request, model, context, key)
    release_body(request)

    async def build(record: JobRecord) -> StreamedResponse:
        image = record.artifacts[0]
        chunks = await with_first_read(context.services.storage.stream(image.key, 0, image.bytes), param="inputs")
        headers = {"Content-Length": str(image.bytes), "x-job-id": job_id, "x-seed": str(image.seed)}
        return StreamedResponse(chunks, media_type=image.content_type, headers={**headers, "Cache-Control": "no-store"})

    return await SyncCall(job_id, digest, context, has_key=key is not None).respond(request, build)


async def _submit(request: Request, model: str, context: RequestContext, key: str | None) -> tuple[str, str]:
    """Submit the job of a body, and return its id and digest. The body, up to 28 MB, is dropped before the job ends."""
    raw = await read_body(request, max_json_bytes(context.services.settings))
    accept = request.headers.get("accept", "")
    job_request = parse_inference_request(strict_json.decode(raw), model, accept, context.services.catalog)
    context.waiters.check()
    digest = request_digest(request, (raw,))
    if key is not None:
        return (await submit_with_key(job_request, context, digest, key)).record.job.id, digest
    return (await submit(job_request, context, digest)).id, digest
