"""Builds the job of a request: checks it, stores its input images, and resolves every default."""

import re
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shared.config.adapters import resolve_adapters
from shared.config.controls import Control, resolve_controls
from shared.config.models_file import Catalog, ModelSpec, References
from shared.config.settings import Settings
from shared.errors import FetchRefused, InputRejected, InvalidRequest
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.store import InputStore
from shared.job import InputRef, Job, OutputFormat, Task, Webhook
from shared.queue import Queue, Submission
from shared.request import MAX_SEED, JobRequest, task_of
from shared.runtime.clock import new_id, now_ms
from shared.signature import signature
from shared.storage import Storage
from shared.webhooks import EVENTS, TERMINAL_EVENTS

T = TypeVar("T")
_LARGEST_FILES, _LARGEST_IMAGES = 4, 2  # of the largest size that a job can have, by bytes and by pixels
URLS_S = 30.0
"""Time for all image URLs of one request; a settings' limit keeps the timeout of one within it."""

_RESERVED_BATCH_ID = re.compile(r"batch_[0-9a-z]{26}")


class JobServices(Protocol):
    """What jobs are built with, in the API and in the chores."""

    @property
    def settings(self) -> Settings: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def queue(self) -> Queue: ...
    @property
    def storage(self) -> Storage: ...


@dataclass(frozen=True)
class Inputs:
    """The stored images of a request: those of `image` or `images`, its mask, its last image, its control images."""

    images: tuple[InputRef, ...] = ()
    mask: InputRef | None = None
    last_image: InputRef | None = None
    controls: tuple[InputRef, ...] = ()


def check_request(request: JobRequest, services: JobServices) -> Task:
    """Return the request's task, or raise `InvalidRequest`; fetches no image and stores nothing."""
    spec = services.catalog.get(request.model)
    if request.webhook is not None:
        try:
            FetchGuard(FetchRules.for_webhooks(services.settings)).check_url(request.webhook)
        except FetchRefused as error:
            raise InvalidRequest(f"webhook: {error.message}", param="webhook") from error
    if request.batch_id is not None and _RESERVED_BATCH_ID.fullmatch(request.batch_id):
        raise InvalidRequest("batch_id: ids of this form are reserved for /v1/batches", param="batch_id")
    task = check_limits(request, spec)
    width, height = _default(request.width, spec.defaults.width), _default(request.height, spec.defaults.height)
    _max_batch_for(request.n, spec.id, width, height, services.catalog)
    return task


def _max_batch_for(images: int, model: str, width: int, height: int, catalog: Catalog) -> int:
    """Return the largest batch of a model and size; raise `InvalidRequest` for a job that no batch can hold."""
    max_batch = catalog.for_size(model, width, height).max_batch
    if images > max_batch:
        raise InvalidRequest(f"n is at most {max_batch} for model {model!r} at {width}x{height}", param="n")
    return max_batch


async def build_job(
    request: JobRequest,
    task: Task,
    tenant: str,
    services: JobServices,
    *,
    previews: int = 0,
    webhook_version: str | None = None,
) -> Job:
    """Return the job of a checked request; its input images are fetched and stored first.

    `previews` is the number of previews of each image. With `webhook_version`, its webhook receives Replicate's
    predictions of this model version.
    """
    inputs = await _store_inputs(request, tenant, services)
    check_input_sizes(inputs, services.settings.max_input_bytes, services.settings.max_input_pixels)
    job = resolve_job(request, services.catalog.get(request.model), task, tenant=tenant, now_ms=now_ms(), inputs=inputs)
    if webhook_version is not None and job.webhook is not None:
        webhook = job.webhook.model_copy(update={"version": webhook_version})
        job = job.model_copy(update={"webhook": webhook})
    return job.model_copy(update={"previews": previews}) if previews else job


def make_submission(
    job: Job, catalog: Catalog, idempotency_key: str | None = None, fingerprint: str | None = None
) -> Submission:
    """Return the job with its queue parameters, the argument of `queue.jobs.submit`.

    Raises `InvalidRequest` for a job that no batch can hold: its size can follow from its images.
    """
    return Submission(
        job=job,
        signature=signature(job),
        window_ms=catalog.get(job.model).window_ms,
        max_batch=_max_batch_for(job.slots, job.model, job.width, job.height, catalog),
        idempotency_key=idempotency_key,
        fingerprint=fingerprint,
    )


async def _store_inputs(request: JobRequest, tenant: str, services: JobServices) -> Inputs:
    """Store the images of a request, one after the other so that only one is in memory."""
    rules = FetchRules.for_inputs(services.settings)
    guard = FetchGuard(rules, tenant=tenant, until_s=time.monotonic() + URLS_S)
    store = InputStore(tenant, services.queue, services.storage, services.settings, guard)
    return Inputs(
        images=tuple([await store.resolve(value, param) for param, value in request.image_values.items()]),
        mask=None if request.mask is None else await store.resolve(request.mask, "mask"),
        last_image=None if request.last_image is None else await store.resolve(request.last_image, "last_image"),
        controls=tuple(
            [await store.resolve(one.image, f"controls.{at}.image") for at, one in enumerate(request.controls)]
        ),
    )


def check_input_sizes(inputs: Inputs, max_bytes: int, max_pixels: int) -> None:
    """Raise `InputRejected` for images that together take a worker too much memory or time.

    It holds the files of all jobs of a batch, and decodes 10 megapixels a second on a busy machine.
    """
    refs = [ref for ref in (*inputs.images, inputs.mask, inputs.last_image, *inputs.controls) if ref is not None]
    totals = (
        ("bytes", sum(ref.bytes for ref in refs), _LARGEST_FILES * max_bytes),
        ("pixels", sum(ref.width * ref.height for ref in refs), _LARGEST_IMAGES * max_pixels),
    )
    for unit, total, most in totals:
        if total > most:
            raise InputRejected(f"the images have {total} {unit} in total; at most {most} are allowed", param="images")


def check_limits(request: JobRequest, spec: ModelSpec) -> Task:
    """Return the request's task, or raise `InvalidRequest` naming the first field that the model does not allow."""
    task = task_of(request, spec)
    count, most = len(request.image_values), spec.limits.max_input_images
    if count > most:
        raise InvalidRequest(f"images: model {spec.id!r} takes at most {most}, not {count}", param="images")
    if task is Task.IMAGE_TO_VIDEO:
        if spec.limits.last_image == "refused" and request.last_image is not None:
            raise InvalidRequest(f"last_image: model {spec.id!r} takes none", param="last_image")
        if spec.limits.last_image == "needed" and request.last_image is None:
            raise InvalidRequest(f"last_image: model {spec.id!r} needs one", param="last_image")
    _check_size(request, spec)
    _check_numbers(request, spec)
    resolve_adapters(request.adapters, spec.adapter, spec.limits.max_adapters)
    _controls(request, spec, task)
    _check_text_and_sampling(request, spec)
    _check_task_fields(request, spec, task)
    if request.webhook_events is not None and request.webhook is None:
        raise InvalidRequest("webhook_events needs a webhook", param="webhook_events")
    return task


def _check_size(request: JobRequest, spec: ModelSpec) -> None:
    limits = spec.limits
    width, height = _default(request.width, spec.defaults.width), _default(request.height, spec.defaults.height)
    for param, side in (("width", width), ("height", height)):
        if not limits.min_side <= side <= limits.max_side:
            raise InvalidRequest(f"{param} must be {limits.min_side} to {limits.max_side}, not {side}", param=param)
        if side % limits.multiple_of:
            raise InvalidRequest(f"{param} must be a multiple of {limits.multiple_of}, not {side}", param=param)
    pixels = width * height
    if pixels > limits.max_pixels:
        raise InvalidRequest(f"width x height is at most {limits.max_pixels} pixels, not {pixels}", param="width")


def _check_numbers(request: JobRequest, spec: ModelSpec) -> None:
    limits, steps = spec.limits, _default(request.steps, spec.defaults.steps)
    if not limits.min_steps <= steps <= limits.max_steps:
        raise InvalidRequest(f"steps must be {limits.min_steps} to {limits.max_steps}, not {steps}", param="steps")
    for param, scale in (("guidance_scale", request.guidance_scale), ("guidance_scale_2", request.guidance_scale_2)):
        if (scale or 0) > limits.max_guidance_scale:
            raise InvalidRequest(f"{param} is at most {limits.max_guidance_scale}", param=param)
    if request.guidance_scale_2 is not None and spec.defaults.guidance_scale_2 is None:
        raise InvalidRequest(f"model {spec.id!r} has no second denoiser to guide", param="guidance_scale_2")
    if request.n > limits.max_images:
        raise InvalidRequest(f"n is at most {limits.max_images} for model {spec.id!r}", param="n")


def _check_text_and_sampling(request: JobRequest, spec: ModelSpec) -> None:
    for param, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt or "")):
        if len(text) > spec.limits.max_prompt_chars:
            raise InvalidRequest(f"{param} is at most {spec.limits.max_prompt_chars} characters", param=param)
    if request.seed is not None and request.seed > MAX_SEED - request.n:
        raise InvalidRequest(f"seed is at most {MAX_SEED - request.n}", param="seed")
    if request.scheduler is not None and request.scheduler not in spec.schedulers:
        allowed = ", ".join(spec.schedulers) or "none but the model's default"
        raise InvalidRequest(f"scheduler must be one of: {allowed}", param="scheduler")
    if request.step_cache is not None and not spec.step_cache.allows(request.step_cache):
        allowed = ", ".join(("off", *spec.step_cache.allowed))
        raise InvalidRequest(f"step_cache: model {spec.id!r} allows: {allowed}", param="step_cache")


def _check_task_fields(request: JobRequest, spec: ModelSpec, task: Task) -> None:
    limits = spec.limits
    if request.fps is not None and not task.makes_video:
        raise InvalidRequest(f"{task.value} makes no video", param="fps")
    if request.output_format is not None and (request.output_format is OutputFormat.MP4) != task.makes_video:
        allowed = "mp4" if task.makes_video else "png, jpeg or webp"
        raise InvalidRequest(f"output_format must be {allowed} for {task.value}", param="output_format")
    if request.frames is not None and not limits.allows_frames(request.frames):
        rule = f"1 to {limits.max_frames}"
        if limits.frames_multiple > 1:
            rule += f", a multiple of {limits.frames_multiple} plus 1"
        raise InvalidRequest(f"frames must be {rule}, not {request.frames}", param="frames")
    if request.layers is not None and (task.makes_video or request.layers > limits.max_layers):
        rule = f"at most {limits.max_layers}" if limits.max_layers and not task.makes_video else "not for this model"
        raise InvalidRequest(f"layers: {rule}", param="layers")


def resolve_job(
    request: JobRequest, spec: ModelSpec, task: Task, *, tenant: str, now_ms: int, inputs: Inputs | None = None
) -> Job:
    """Return the job of a checked request with every default resolved; raises `InvalidRequest` for a bad mask size."""
    inputs, defaults = inputs or Inputs(), spec.defaults
    _check_proportions(inputs)
    width, height = _size(request, spec, task, inputs.images)
    return Job(
        id=new_id("job", now_ms),
        tenant=tenant,
        created_at_ms=now_ms,
        priority=request.priority,
        time_limit_ms=None if request.deadline_s is None else round(request.deadline_s * 1000),
        metadata=request.metadata,
        batch_id=request.batch_id,
        webhook=_webhook(request),
        model=spec.id,
        width=width,
        height=height,
        task=task,
        prompt=request.prompt,
        negative_prompt=_default(request.negative_prompt, defaults.negative_prompt),
        n=request.n,
        seed=secrets.randbelow(2**32) if request.seed is None else request.seed,
        steps=_default(request.steps, defaults.steps),
        guidance_scale=_default(request.guidance_scale, defaults.guidance_scale),
        guidance_scale_2=_default(request.guidance_scale_2, defaults.guidance_scale_2),
        scheduler=request.scheduler,
        step_cache=spec.step_cache.schedule_of(request.step_cache),
        adapters=resolve_adapters(request.adapters, spec.adapter, spec.limits.max_adapters),
        mixed_fields=_mixed_fields(spec, request.reproducible),
        reproducible=request.reproducible,
        output_quality=request.output_quality,
        embed_parameters=request.embed_parameters,
        images=inputs.images,
        mask=inputs.mask,
        last_image=inputs.last_image,
        control_ids=tuple(choice.id for choice in request.controls),
        controls=_controls(request, spec, task),
        control_images=inputs.controls,
        **_task_fields(request, spec, task, inputs),
    )


def _controls(request: JobRequest, spec: ModelSpec, task: Task) -> tuple[Control, ...]:
    return resolve_controls(request.controls, spec.control, spec.limits.max_controls, task)


def _mixed_fields(spec: ModelSpec, reproducible: bool) -> tuple[str, ...]:
    """Return the fields in which batch mates of a job can differ."""
    # Padding to the size of another job would change the last bits.
    return tuple(name for name in spec.mixed_fields if not (reproducible and name == "size"))


def _check_proportions(inputs: Inputs) -> None:
    """Raise `InvalidRequest` unless mask and image have the same proportions: both are cropped to the job's size."""
    if inputs.mask is None or not inputs.images:
        return
    mask, image = inputs.mask, inputs.images[0]
    # One pixel of tolerance: the sides of a mask made at another scale are rounded.
    tolerance = max(image.width, image.height, mask.width, mask.height)
    if abs(mask.width * image.height - mask.height * image.width) > tolerance:
        raise InvalidRequest(
            f"mask is {mask.width}x{mask.height} and the image {image.width}x{image.height}; "
            "they must have the same proportions",
            param="mask",
        )


def _size(request: JobRequest, spec: ModelSpec, task: Task, images: tuple[InputRef, ...]) -> tuple[int, int]:
    """Return width and height; by default, an edited image keeps the proportions of the first input."""
    defaults = spec.defaults
    if task is Task.EDIT and images and request.width is None and request.height is None:
        area = References(pixels=defaults.width * defaults.height, multiple_of=spec.limits.multiple_of, enlarge=True)
        width, height = area.size_for(images[0].width, images[0].height)
        if spec.limits.allows_size(width, height):
            return width, height
    return _default(request.width, defaults.width), _default(request.height, defaults.height)


def _webhook(request: JobRequest) -> Webhook | None:
    if request.webhook is None:
        return None
    events = TERMINAL_EVENTS if request.webhook_events is None else request.webhook_events
    return Webhook(url=request.webhook, states=tuple(EVENTS[event] for event in events))


def _task_fields(request: JobRequest, spec: ModelSpec, task: Task, inputs: Inputs) -> dict[str, Any]:
    """Return the fields of the job that only some tasks have."""
    defaults = spec.defaults
    values: dict[str, Any] = {"output_format": request.output_format or OutputFormat.PNG}
    if task.has_strength:
        values["strength"] = _default(request.strength, 1.0 if task is Task.INPAINT else defaults.strength)
    if task is Task.EDIT:
        sizes = (spec.references.size_for(image.width, image.height) for image in inputs.images)
        values["reference_sizes"] = tuple(sizes)
    if task.makes_video:
        values["frames"] = _default(request.frames, spec.usual_frames)
        values["fps"] = _default(request.fps, defaults.fps)
        values["output_format"] = OutputFormat.MP4
    else:
        values["layers"] = _default(request.layers, defaults.layers)
    return values


def _default(value: T | None, default: T) -> T:
    return default if value is None else value
