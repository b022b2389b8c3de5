"""From what a client sends to a `Job`: the one place that validates it and resolves its defaults."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from shared.config.adapters import MOST_ADAPTERS, AdapterChoice, choose
from shared.config.models_file import MAX_FPS, MAX_INPUT_IMAGES, Catalog, ModelSpec, References
from shared.errors import InvalidRequest
from shared.job import InputRef, Job, OutputFormat, Priority, Task, Webhook
from shared.runtime.clock import new_id
from shared.tasks import Sent, task_of
from shared.webhooks import EVENTS, TERMINAL_EVENTS, JobEvent

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
MAX_SEED = 2**63 - 1
MAX_DEADLINE_S = 7 * 86_400
_IN_PLAIN_WORDS = {"extra_forbidden": "there is no such field", "model_type": "it must be a JSON object"}

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
    guidance_scale: Annotated[float | None, Field(strict=True, ge=0)] = None
    guidance_scale_2: Annotated[
        float | None,
        Field(strict=True, ge=0, description="Of a model's second denoiser, which does the less noisy steps."),
    ] = None
    scheduler: Annotated[str | None, Field(max_length=64)] = None
    adapters: Annotated[
        tuple[AdapterChoice, ...], Field(max_length=MOST_ADAPTERS, description="LoRA adapters to mix in.")
    ] = ()
    task: Annotated[
        Task | None, Field(description="Only needed where the model does several things with what is sent.")
    ] = None
    image: Annotated[
        str | None,
        Field(description="Start from this picture: an id of `POST /v1/inputs`, a data URL or an https URL."),
    ] = None
    images: Annotated[
        tuple[str, ...] | None,
        Field(min_length=1, max_length=MAX_INPUT_IMAGES, description="Several pictures to edit, in place of `image`."),
    ] = None
    mask: Annotated[
        str | None,
        Field(description="Where to repaint `image`: white, or what is transparent. Of its proportions."),
    ] = None
    last_image: Annotated[str | None, Field(description="The picture that a video from `image` ends with.")] = None
    strength: Annotated[
        float | None,
        Field(strict=True, gt=0, le=1, description="How far to leave `image` behind; with a mask, 1 unless told."),
    ] = None
    frames: Annotated[int | None, Field(strict=True, ge=1, description="Length of a video.")] = None
    fps: Annotated[int | None, Field(strict=True, ge=1, le=MAX_FPS, description="Frames a second of a video.")] = None
    layers: Annotated[
        int | None, Field(strict=True, ge=1, description="Pictures that a result is taken apart into, by some models.")
    ] = None
    reproducible: Annotated[bool, Field(strict=True, description="Same bits whatever the company.")] = False
    output_format: Annotated[
        OutputFormat | None, Field(description="Unset: png for pictures; videos are always mp4.")
    ] = None
    output_quality: Annotated[int, Field(strict=True, ge=1, le=100, description="JPEG, WebP and MP4.")] = 90
    embed_parameters: Annotated[
        bool, Field(strict=True, description="Write prompt, seed and the rest into the picture's metadata.")
    ] = False
    priority: Priority = Priority.STANDARD
    deadline_s: Annotated[
        float | None, Field(strict=True, gt=0, le=MAX_DEADLINE_S, description="Give up this many seconds from now.")
    ] = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(default_factory=dict)
    batch_id: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None
    webhook: Annotated[
        str | None, Field(max_length=2048, description="An https URL that is told when the job ends, in a signed POST.")
    ] = None
    webhook_events: Annotated[
        tuple[JobEvent, ...] | None,
        Field(min_length=1, description="What `webhook` is told of. Unset: how the job ends."),
    ] = None


def parse(body: Any) -> JobRequest:
    """Check one decoded JSON body; raises `InvalidRequest` that names the first field at fault."""
    return validated(JobRequest, body)


def validated(kind: type[Body], body: Any) -> Body:
    """Check a decoded JSON body of another kind, with the same words for what is at fault."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        fault = error.errors()[0]
        param = ".".join(str(part) for part in fault["loc"] if part != "[key]").rstrip(".") or None
        said = _IN_PLAIN_WORDS.get(fault["type"], fault["msg"])
        raise InvalidRequest(f"{param or 'body'}: {said}", param=param) from error


@dataclass(frozen=True)
class Inputs:
    """The stored pictures that a request names: those of `image` or `images`, and the others."""

    images: tuple[InputRef, ...] = ()
    mask: InputRef | None = None
    last_image: InputRef | None = None


def resolve(request: JobRequest, catalog: Catalog, *, tenant: str, now_ms: int, inputs: Inputs | None = None) -> Job:
    """Return the job that `request` means, with every default filled in, or raise `InvalidRequest`.

    `inputs` are the stored pictures that the request names; storing them is the caller's part.
    """
    spec = catalog.get(request.model)
    task = check(request, spec)
    inputs = inputs or Inputs()
    check_proportions(inputs)
    fallback = spec.defaults
    width, height = _size(request, spec, task, inputs.images)
    return Job(
        id=new_id("job", now_ms),
        tenant=tenant,
        created_at_ms=now_ms,
        priority=request.priority,
        deadline_at_ms=None if request.deadline_s is None else now_ms + round(request.deadline_s * 1000),
        metadata=request.metadata,
        batch_id=request.batch_id,
        webhook=_webhook(request),
        model=spec.id,
        width=width,
        height=height,
        task=task,
        prompt=request.prompt,
        negative_prompt=_or(request.negative_prompt, fallback.negative_prompt),
        n=request.n,
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        steps=_or(request.steps, fallback.steps),
        guidance_scale=_or(request.guidance_scale, fallback.guidance_scale),
        guidance_scale_2=_or(request.guidance_scale_2, fallback.guidance_scale_2),
        scheduler=request.scheduler,
        adapters=choose(request.adapters, spec.adapter, spec.limits.max_adapters),
        mixed_fields=spec.mixed_fields,
        reproducible=request.reproducible,
        output_quality=request.output_quality,
        embed_parameters=request.embed_parameters,
        **_of_task(request, spec, task),
        **_of_inputs(inputs, spec, task),
    )


def _webhook(request: JobRequest) -> Webhook | None:
    if request.webhook is None:
        return None
    names = TERMINAL_EVENTS if request.webhook_events is None else request.webhook_events
    return Webhook(url=request.webhook, states=tuple(EVENTS[name] for name in names))


def _of_task(request: JobRequest, spec: ModelSpec, task: Task) -> dict[str, Any]:
    """Return the fields of the job that only some tasks have."""
    fallback = spec.defaults
    values: dict[str, Any] = {"output_format": request.output_format or OutputFormat.PNG}
    if task.has_strength:
        values["strength"] = _or(request.strength, 1.0 if task is Task.INPAINT else fallback.strength)
    if task.makes_video:
        values["frames"] = _or(request.frames, spec.usual_frames)
        values["fps"] = _or(request.fps, fallback.fps)
        values["output_format"] = OutputFormat.MP4
    else:
        values["layers"] = _or(request.layers, fallback.layers)
    return values


def _of_inputs(inputs: Inputs, spec: ModelSpec, task: Task) -> dict[str, Any]:
    values: dict[str, Any] = {"images": inputs.images, "mask": inputs.mask, "last_image": inputs.last_image}
    if task is Task.EDIT:
        sizes = (spec.references.size_for(image.width, image.height) for image in inputs.images)
        values["reference_sizes"] = tuple(sizes)
    return values


def _size(request: JobRequest, spec: ModelSpec, task: Task, images: tuple[InputRef, ...]) -> tuple[int, int]:
    """Return width and height; an edited picture keeps the proportions of the first one unless the client says more."""
    own = spec.defaults
    if task is Task.EDIT and images and request.width is None and request.height is None:
        limits = spec.limits
        area = References(pixels=own.width * own.height, multiple_of=limits.multiple_of, enlarge=True)
        width, height = area.size_for(images[0].width, images[0].height)
        if limits.allows_size(width, height):
            return width, height
    return _or(request.width, own.width), _or(request.height, own.height)


def check_proportions(inputs: Inputs) -> None:
    """Raise `InvalidRequest` unless mask and picture are of the same proportions: both are cut to the job's size."""
    if inputs.mask is None or not inputs.images:
        return
    mask, image = inputs.mask, inputs.images[0]
    # A pixel's worth either way: a mask made at another scale is rounded.
    rounding = max(image.width, image.height, mask.width, mask.height)
    if abs(mask.width * image.height - mask.height * image.width) > rounding:
        raise InvalidRequest(
            f"mask is {mask.width}x{mask.height}, and the image {image.width}x{image.height}: "
            "they must be of the same proportions",
            param="mask",
        )


def sent(request: JobRequest) -> Sent:
    """Return what tells the request's task."""
    if request.image is not None and request.images is not None:
        raise InvalidRequest("images: send either image or images, not both", param="images")
    return Sent(
        images=len(request.images) if request.images is not None else int(request.image is not None),
        field="images" if request.images is not None else "image",
        mask=request.mask is not None,
        last_image=request.last_image is not None,
        strength=request.strength is not None,
        frames=request.frames is not None,
    )


def check(request: JobRequest, spec: ModelSpec) -> Task:
    """Return the request's task, or raise `InvalidRequest` naming the first field that the model does not allow."""
    given = sent(request)
    task = task_of(given, spec, request.task)
    if given.images > spec.limits.max_input_images:
        most = spec.limits.max_input_images
        raise InvalidRequest(f"images: model {spec.id!r} takes at most {most}, not {given.images}", param="images")
    if task is Task.IMAGE_TO_VIDEO:
        _check_last_image(request, spec)
    check_limits(request, spec)
    _check_output(request, spec, task)
    if request.webhook_events is not None and request.webhook is None:
        raise InvalidRequest("webhook_events needs a webhook to tell", param="webhook_events")
    return task


def _check_last_image(request: JobRequest, spec: ModelSpec) -> None:
    wrong = "refused" if request.last_image is not None else "needed"
    if spec.limits.last_image == wrong:
        words = "takes none" if wrong == "refused" else "needs one"
        raise InvalidRequest(f"last_image: model {spec.id!r} {words}", param="last_image")


def check_limits(request: JobRequest, spec: ModelSpec) -> None:
    """Raise `InvalidRequest` naming the first size or number that the model does not allow."""
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
    for param, scale in (("guidance_scale", request.guidance_scale), ("guidance_scale_2", request.guidance_scale_2)):
        if (scale or 0) > limits.max_guidance_scale:
            raise InvalidRequest(f"{param} is at most {limits.max_guidance_scale}", param=param)
    if request.guidance_scale_2 is not None and spec.defaults.guidance_scale_2 is None:
        raise InvalidRequest(f"model {spec.id!r} has no second denoiser to guide", param="guidance_scale_2")
    if request.n > limits.max_images:
        raise InvalidRequest(f"n is at most {limits.max_images} for model {spec.id!r}", param="n")
    choose(request.adapters, spec.adapter, limits.max_adapters)
    _check_words(request, spec)


def _check_output(request: JobRequest, spec: ModelSpec, task: Task) -> None:
    limits, wants_video = spec.limits, request.output_format is OutputFormat.MP4
    if request.fps is not None and not task.makes_video:
        raise InvalidRequest(f"{task.value} makes no video", param="fps")
    if request.output_format is not None and wants_video != task.makes_video:
        allowed = "mp4" if task.makes_video else "png, jpeg or webp"
        raise InvalidRequest(f"output_format: {task.value} gives {allowed}", param="output_format")
    if request.frames is not None and not limits.allows_frames(request.frames):
        rule = f"1 to {limits.max_frames}"
        if limits.frames_multiple > 1:
            rule += f", a multiple of {limits.frames_multiple} and one more"
        raise InvalidRequest(f"frames must be {rule}, not {request.frames}", param="frames")
    if request.layers is not None and (task.makes_video or request.layers > limits.max_layers):
        words = f"at most {limits.max_layers}" if limits.max_layers and not task.makes_video else "not for this model"
        raise InvalidRequest(f"layers: {words}", param="layers")


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
