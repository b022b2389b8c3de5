"""From what a client sends to a `Job`: the one place that validates it and resolves its defaults."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from shared.catalog import Catalog, ModelSpec
from shared.clock import new_id
from shared.errors import InvalidRequest
from shared.job import InputRef, Job, OutputFormat, Priority, Task

T = TypeVar("T")
MAX_SEED = 2**63 - 1
MAX_DEADLINE_S = 7 * 86_400

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class JobRequest(BaseModel):
    """The body of `POST /v1/jobs`, and one line of `POST /v1/jobs:bulk`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={
            "examples": [
                {"model": "demo", "prompt": "a red circle on a blue ground, left"},
                {"model": "demo", "prompt": "a green square on a white ground, top", "seed": 7, "steps": 16, "n": 2},
            ]
        },
    )

    model: Annotated[str, Field(max_length=128, description="A model of `GET /v1/models`.")]
    prompt: Annotated[str, Field(min_length=1, max_length=100_000)]
    negative_prompt: Annotated[str | None, Field(max_length=100_000)] = None
    width: Annotated[int | None, Field(strict=True, ge=1, description="Pixels.")] = None
    height: Annotated[int | None, Field(strict=True, ge=1, description="Pixels.")] = None
    n: Annotated[int, Field(strict=True, ge=1, description="Pictures; picture i is made with seed + i.")] = 1
    seed: Annotated[int | None, Field(strict=True, ge=0, le=MAX_SEED, description="Unset: drawn, and told.")] = None
    steps: Annotated[
        int | None,
        Field(strict=True, ge=1, validation_alias=AliasChoices("steps", "num_inference_steps")),
    ] = None
    guidance_scale: Annotated[float | None, Field(ge=0)] = None
    scheduler: Annotated[str | None, Field(max_length=64)] = None
    image: Annotated[
        str | None,
        Field(description="Start from this picture: an id of `POST /v1/inputs`, a data URL or an https URL."),
    ] = None
    strength: Annotated[float | None, Field(gt=0, le=1, description="How far to leave `image` behind.")] = None
    reproducible: Annotated[bool, Field(strict=True, description="Same bits whatever the company.")] = False
    output_format: OutputFormat = OutputFormat.PNG
    output_quality: Annotated[int, Field(strict=True, ge=1, le=100, description="JPEG and WebP.")] = 90
    embed_parameters: Annotated[
        bool, Field(strict=True, description="Write prompt, seed and the rest into the picture's metadata.")
    ] = False
    priority: Priority = Priority.STANDARD
    deadline_s: Annotated[
        float | None, Field(gt=0, le=MAX_DEADLINE_S, description="Give up this many seconds from now.")
    ] = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(default_factory=dict)
    batch_id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None


def parse(body: Any) -> JobRequest:
    """Check one decoded JSON body; raises `InvalidRequest` that names the first field at fault."""
    try:
        return JobRequest.model_validate(body)
    except ValidationError as error:
        fault = error.errors()[0]
        param = ".".join(str(part) for part in fault["loc"]) or None
        raise InvalidRequest(f"{param or 'body'}: {fault['msg']}", param=param) from error


def resolve(request: JobRequest, catalog: Catalog, *, tenant: str, now_ms: int, image: InputRef | None = None) -> Job:
    """Return the job that `request` means, with every default filled in, or raise `InvalidRequest`.

    `image` is the stored input that `request.image` names; storing it is the caller's part.
    """
    spec = catalog.get(request.model)
    task = Task.TEXT_TO_IMAGE if request.image is None else Task.IMAGE_TO_IMAGE
    check_limits(request, spec, task)
    fallback = spec.defaults
    return Job(
        id=new_id("job", now_ms),
        tenant=tenant,
        created_at_ms=now_ms,
        priority=request.priority,
        deadline_at_ms=None if request.deadline_s is None else now_ms + round(request.deadline_s * 1000),
        metadata=request.metadata,
        batch_id=request.batch_id,
        model=spec.id,
        width=_or(request.width, fallback.width),
        height=_or(request.height, fallback.height),
        task=task,
        prompt=request.prompt,
        negative_prompt=_or(request.negative_prompt, fallback.negative_prompt),
        n=request.n,
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        steps=_or(request.steps, fallback.steps),
        guidance_scale=_or(request.guidance_scale, fallback.guidance_scale),
        scheduler=request.scheduler,
        strength=_or(request.strength, fallback.strength) if task is Task.IMAGE_TO_IMAGE else None,
        image=image,
        reproducible=request.reproducible,
        output_format=request.output_format,
        output_quality=request.output_quality,
        embed_parameters=request.embed_parameters,
    )


def check_limits(request: JobRequest, spec: ModelSpec, task: Task) -> None:
    """Raise `InvalidRequest` naming the first field that the model does not allow."""
    if task not in spec.tasks:
        raise InvalidRequest(f"model {spec.id!r} does not do {task.value}", param="image")
    if request.strength is not None and task is Task.TEXT_TO_IMAGE:
        raise InvalidRequest("strength needs an image to start from", param="strength")
    limits = spec.limits
    width, height = _or(request.width, spec.defaults.width), _or(request.height, spec.defaults.height)
    for param, side in (("width", width), ("height", height)):
        if not limits.min_side <= side <= limits.max_side:
            raise InvalidRequest(f"{param} must be {limits.min_side} to {limits.max_side}, not {side}", param=param)
        if side % limits.multiple_of:
            raise InvalidRequest(f"{param} must be a multiple of {limits.multiple_of}, not {side}", param=param)
    if width * height > limits.max_pixels:
        pixels = width * height
        raise InvalidRequest(f"width x height is at most {limits.max_pixels} pixels, not {pixels}", param="width")
    steps = _or(request.steps, spec.defaults.steps)
    if not limits.min_steps <= steps <= limits.max_steps:
        raise InvalidRequest(f"steps must be {limits.min_steps} to {limits.max_steps}, not {steps}", param="steps")
    if (request.guidance_scale or 0) > limits.max_guidance_scale:
        raise InvalidRequest(f"guidance_scale is at most {limits.max_guidance_scale}", param="guidance_scale")
    if request.n > limits.max_images:
        raise InvalidRequest(f"n is at most {limits.max_images} for model {spec.id!r}", param="n")
    _check_words(request, spec)


def _check_words(request: JobRequest, spec: ModelSpec) -> None:
    for param, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt or "")):
        if len(text) > spec.limits.max_prompt_chars:
            raise InvalidRequest(f"{param} is at most {spec.limits.max_prompt_chars} characters", param=param)
    if request.seed is not None and request.seed > MAX_SEED - request.n:
        raise InvalidRequest(f"seed is at most {MAX_SEED - request.n}", param="seed")
    if request.scheduler is not None and request.scheduler not in spec.schedulers:
        allowed = ", ".join(spec.schedulers) or "none but its own"
        raise InvalidRequest(f"scheduler must be one of: {allowed}", param="scheduler")


def _or(value: T | None, fallback: T) -> T:
    return fallback if value is None else value
