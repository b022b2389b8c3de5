"""What `InferenceClient` sends, read as a job."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from shared.config.models_file import Catalog
from shared.errors import InvalidRequest
from shared.job import OutputFormat, Priority
from shared.job_builder import check_limits
from shared.request import JobRequest, parse, validated

_BY_TYPE = {kind.content_type: kind for kind in OutputFormat if kind is not OutputFormat.MP4}


class Side(BaseModel):
    """`target_size` of a picture from a picture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    height: int


class Inference(BaseModel):
    """The body: words in `inputs`, or a picture as base64 with the words in `parameters.prompt`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Annotated[str, Field(min_length=1, description="The prompt; a picture as base64 where parameters has one.")]
    parameters: Annotated[dict[str, Any], Field(description="Fields of a job, by Hugging Face's names or ours.")] = {}
    options: Annotated[dict[str, Any] | None, Field(description="Taken, and without a meaning here.")] = None


def request_of(body: Any, model: str, accept: str, catalog: Catalog) -> JobRequest:
    """Return the job that a decoded body asks of `model`, or raise `InvalidRequest` that names the field at fault.

    `accept` is the header of that name: the picture is of the first type in it that we make, else a PNG.
    """
    told = validated(Inference, body)
    sent = {name: value for name, value in told.parameters.items() if value is not None}
    for name in ("model", "image", "images", "batch_id"):
        if name in sent:
            raise InvalidRequest(f"parameters.{name}: there is no such field", param=f"parameters.{name}")
    if "target_size" in sent:
        sent |= validated(Side, sent.pop("target_size")).model_dump()
    if "prompt" in sent:
        sent["image"] = f"data:;base64,{told.inputs}"
    else:
        sent["prompt"] = told.inputs
    sent.setdefault("priority", Priority.INTERACTIVE.value)
    sent.setdefault("output_format", output_format(accept).value)
    request = parse({**sent, "model": model})
    task = check_limits(request, catalog.get(model))
    if request.n != 1:
        raise InvalidRequest("n: one picture is answered at a time; ask again for another", param="n")
    if task.makes_video:
        raise InvalidRequest(f"model {model!r} makes videos: ask /v1/videos, or /v1/jobs", param="model")
    return request


def output_format(accept: str) -> OutputFormat:
    """Return the first kind of picture that the header `Accept` names, PNG where it names none that we make."""
    for part in accept.lower().split(","):
        found = _BY_TYPE.get(part.partition(";")[0].strip())
        if found is not None:
            return found
    return OutputFormat.PNG
