"""`/compat/huggingface/{model}`: the protocol of `huggingface_hub.InferenceClient`; waits for one image or sound."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api import strict_json
from api.context import Context, RequestContext
from api.http.bodies import max_json_bytes, read_body, release_body
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import operation_ids, problems, request_body
from api.http.streaming import StreamedResponse, count_response, with_first_read
from api.jobs.request import JobRequest, valid_fields, validated
from api.jobs.resolve import parse_checked
from api.protocols.adapter_names import LoraWeight, adapters_of
from api.protocols.sync_calls import RequestDigest, SyncCall, request_digest, submit, submit_with_key
from api.protocols.text_errors import TextProblem
from api.submission import IdempotencyKey
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.errors import Faults, InvalidRequest
from shared.job_fields import Priority
from shared.job_record import JobRecord
from shared.tasks import DEFAULT_FORMATS, Medium, OutputFormat

PREFIX = "/compat/huggingface"
NEEDS_PROMPT = "parameters.prompt: missing; an image in `inputs` needs a prompt, as in image_to_image(image, prompt)"
_ENCODED_IMAGE = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD", "data:image/")
"""How PNG, JPEG, WebP and GIF files begin in base64."""

_FORMATS = {
    medium: {kind.content_type: kind for kind in OutputFormat if kind.content_type.startswith(f"{medium.value}/")}
    for medium in (Medium.IMAGE, Medium.AUDIO)
}


class TargetSize(BaseModel):
    """`target_size` of `image_to_image`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    height: int


class Loras(BaseModel):
    """`loras`, as clients of fal's models send them through Hugging Face's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loras: tuple[LoraWeight, ...]


class InferenceRequest(BaseModel):
    """The body: the prompt in `inputs`, or an image as base64 with the prompt in `parameters`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Annotated[str, Field(min_length=1, description="Prompt; an image as base64 if parameters has a prompt.")]
    parameters: Annotated[dict[str, Any], Field(description="Job fields, by Hugging Face's names or ours.")] = {}
    options: Annotated[dict[str, Any] | None, Field(description="Accepted and ignored.")] = None


def parse_inference_request(body: Any, model: str, accept: str, catalog: Catalog) -> JobRequest:
    """Return the job request of a body; raises `InvalidRequest` with all invalid fields. `accept` is a header."""
    spec = catalog.get(model)
    if all(task.makes_video for task in spec.tasks):
        raise _makes_videos(model)
    if not isinstance(body, dict):
        raise InvalidRequest("body: it must be a JSON object")
    faults = Faults()
    inference = valid_fields(InferenceRequest, body, faults, {"inputs": "-"})
    values = {name: value for name, value in inference.parameters.items() if value is not None}
    for name in ("model", "image", "images", "batch_id"):
        if values.pop(name, None) is not None:
            message = f"parameters.{name}: there is no such field"
            faults.found.append(InvalidRequest(message, param=f"parameters.{name}"))
    if "target_size" in values:
        size = values.pop("target_size")
        with faults.collected():
            values |= validated(TargetSize, size).model_dump()
    if "loras" in values:
        with faults.collected():
            values["adapters"] = _adapters(values, spec)
    if "prompt" in values:
        is_url = inference.inputs.startswith("data:")
        values["image"] = inference.inputs if is_url else f"data:;base64,{inference.inputs}"
    elif inference.inputs.startswith(_ENCODED_IMAGE):
        faults.found.append(InvalidRequest(NEEDS_PROMPT, param="parameters.prompt"))
        values["prompt"] = "-"
    else:
        values["prompt"] = inference.inputs
    values.setdefault("priority", Priority.INTERACTIVE.value)
    medium = Medium.AUDIO if all(task.makes_audio for task in spec.tasks) else Medium.IMAGE
    values.setdefault("output_format", output_format(accept, medium).value)
    if isinstance(values.get("n"), int) and values["n"] > 1:
        message = f"n: a response has one result: {values['n']}; send several requests"
        faults.found.append(InvalidRequest(message, param="n"))
    request, task = parse_checked({**values, "model": model}, catalog.get, faults)
    if task.makes_video:
        raise _makes_videos(model)
    return request


def _adapters(values: dict[str, Any], spec: ModelSpec) -> list[dict[str, Any]]:
    """Return the adapters of `loras`, which are taken out of the parameters; raises `InvalidRequest`."""
    sent = validated(Loras, {"loras": values.pop("loras")})
    if "adapters" in values:
        raise InvalidRequest("loras: send either loras or adapters", param="loras")
    return adapters_of(sent.loras, spec)


def _makes_videos(model: str) -> InvalidRequest:
    return InvalidRequest(f"model {model!r} makes videos; use /v1/videos or /v1/jobs", param="model")


def output_format(accept: str, medium: Medium = Medium.IMAGE) -> OutputFormat:
    """Return the first supported format of the header `Accept`, by default PNG or WAV."""
    types, formats = (part.partition(";")[0].strip() for part in accept.lower().split(",")), _FORMATS[medium]
    return next((formats[kind] for kind in types if kind in formats), DEFAULT_FORMATS[medium])


router = APIRouter(prefix=PREFIX, tags=["Hugging Face"], generate_unique_id_function=operation_ids("huggingface"))

_EXAMPLE = {"inputs": "a red circle on a blue ground, left", "parameters": {"seed": 7}}
_BODY = request_body("application/json", {"schema": InferenceRequest.model_json_schema(), "example": _EXAMPLE})
_ERRORS = problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504, model=TextProblem)
_RESPONSES = _ERRORS | {
    200: {
        "description": "The image or sound, in the format of `Accept`.",
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ("image/*", "audio/*")},
    }
}


@router.post("/{model:path}", response_class=Response, openapi_extra=_BODY, responses=_RESPONSES)
async def make_image(request: Request, model: str, context: Context, key: IdempotencyKey = None) -> Response:
    """Generate one image or sound and wait for it: `text_to_image`, `image_to_image` and, for sounds of any kind,
    `text_to_speech` of `InferenceClient(model=URL)`.
    The headers `x-job-id` and `x-seed` identify the job; `x-warning` names fields without effect."""
    if request.headers.get("content-type", "").startswith("image/"):  # the client's form of an image by itself
        raise InvalidRequest(NEEDS_PROMPT, param="parameters.prompt")
    require_type(request, JSON_TYPES)
    job_id, digest, replayed = await _submit(request, model, context, key)
    release_body(request)

    async def build(record: JobRecord) -> StreamedResponse:
        image = record.artifacts[0]
        count_response(request, image.bytes)
        chunks = await with_first_read(context.services.storage.stream(image.key, 0, image.bytes), param="inputs")
        headers = {"Content-Length": str(image.bytes), "x-job-id": job_id, "x-seed": str(image.seed)}
        if record.warnings:
            message = "; ".join(warning.message for warning in record.warnings)
            headers["x-warning"] = message.encode("ascii", "replace").decode()  # it quotes prompts
        if replayed:
            headers["Idempotent-Replayed"] = "true"
        return StreamedResponse(chunks, media_type=image.content_type, headers={**headers, "Cache-Control": "no-store"})

    return await SyncCall(job_id, digest, context).respond(request, build)


async def _submit(
    request: Request, model: str, context: RequestContext, key: str | None
) -> tuple[str, RequestDigest, bool]:
    """Submit the job of a body, and return its id, the digests of the request, and whether it is a replay.

    The body, up to 28 MB, is dropped before the job ends.
    """
    raw = await read_body(request, max_json_bytes(context.services.settings))
    accept = request.headers.get("accept", "")
    job_request = parse_inference_request(strict_json.decode(raw), model, accept, context.services.catalog)
    context.waiters.check()
    digest = request_digest(request, (raw,))
    if key is not None:
        accepted = await submit_with_key(job_request, context, digest, key)
        return accepted.record.job.id, digest, accepted.replayed
    return (await submit(job_request, context, digest)).id, digest, False
