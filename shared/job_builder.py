"""Builds the job of a request: checks it, stores its input images, and resolves every default."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

from shared.config.adapters import Adapter, AdapterChoice, resolve_adapters, uploaded_ids
from shared.config.controls import Control, resolve_controls
from shared.config.destinations import resolve_destination
from shared.config.models_file import Catalog, ModelSpec, References
from shared.config.settings import Settings
from shared.errors import Faults, FetchRefused, InvalidRequest, first_of
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.request_images import Inputs, check_proportions, reference_faults, store_inputs
from shared.inputs.store import InputStore
from shared.job import InputRef, Job, OnDeadline, OutputFormat, Task, Webhook
from shared.queue import Queue, Submission
from shared.request import MAX_SEED, JobRequest, parse, task_of
from shared.runtime import tracing
from shared.runtime.clock import new_id, now_ms
from shared.signature import signature
from shared.storage import Storage
from shared.webhooks import EVENTS, TERMINAL_EVENTS

T = TypeVar("T")
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


def check_request(request: JobRequest, services: JobServices, tenant: str) -> Task:
    """Return the request's task, or raise `InvalidRequest` with all faults; fetches no image and stores nothing."""
    spec = services.catalog.get(request.model)
    faults = [*_delivery_faults(request, services), *reference_faults(request)]
    try:
        resolve_destination(request.output, tenant, services.settings.output_buckets)
    except InvalidRequest as error:
        faults.append(error)
    try:
        task = check_limits(request, spec)
        width, height = _default(request.width, spec.defaults.width), _default(request.height, spec.defaults.height)
        _max_batch_for(request.n, spec.id, width, height, services.catalog)
    except InvalidRequest as error:
        raise first_of([*faults, *error.faults]) from None
    if faults:
        raise first_of(faults)
    return task


def parse_request(
    body: Any, spec_of: Callable[[str], ModelSpec], services: JobServices | None = None
) -> tuple[JobRequest, ModelSpec]:
    """Return the job request of a decoded body and its model, or raise `InvalidRequest` with the faults of all fields.

    The model's limits, and those of `services`, are checked for the valid fields of a body with other faults.
    """
    try:
        request = parse(body)
        return request, spec_of(request.model)
    except InvalidRequest as error:
        raise first_of([*error.faults, *_faults_of_rest(body, error.faults, spec_of, services)]) from error


def _faults_of_rest(
    body: Any,
    faults: Sequence[InvalidRequest],
    spec_of: Callable[[str], ModelSpec],
    services: JobServices | None,
) -> Iterator[InvalidRequest]:
    """Yield the faults of the valid fields of a body with `faults`, as far as no other field decides about them."""
    invalid = {(fault.param or "").partition(".")[0] for fault in faults}
    if not isinstance(body, Mapping) or "model" in invalid:
        return
    rest = {"prompt": "-", **{name: value for name, value in body.items() if name not in invalid}}
    try:
        request = parse(rest)
        spec = spec_of(request.model)
    except InvalidRequest as error:
        yield from error.faults
        return
    if services is not None:
        yield from _delivery_faults(request, services)
    yield from reference_faults(request)
    yield from _field_faults(request, spec)


def parse_checked(
    body: Mapping[str, Any], spec_of: Callable[[str], ModelSpec], faults: Faults
) -> tuple[JobRequest, Task]:
    """Return the job request of a protocol's body, and its task; raises `InvalidRequest` with `faults`, which are those
    of the protocol's own fields, and every field that is invalid or that the model does not allow."""
    with faults.collected():
        request, spec = parse_request(body, spec_of)
        faults.found += reference_faults(request)
        if request.output is not None:
            message = "output: not supported by this protocol, whose responses have the results; use POST /v1/jobs"
            faults.found.append(InvalidRequest(message, param="output"))
        task = check_limits(request, spec)
    faults.check()
    return request, task


def _delivery_faults(request: JobRequest, services: JobServices) -> Iterator[InvalidRequest]:
    """Yield the faults of URLs that the service will call, and of `batch_id`."""
    if request.webhook is not None:
        try:
            FetchGuard(FetchRules.for_webhooks(services.settings)).check_url(request.webhook)
        except FetchRefused as error:
            yield InvalidRequest(f"webhook: {error.message}", param="webhook")
    for param, url in ({} if request.output is None else request.output.urls).items():
        try:
            FetchGuard(FetchRules.for_outputs(services.settings)).check_url(url)
        except FetchRefused as error:
            yield InvalidRequest(f"{param}: {error.message}", param=param)
    if request.batch_id is not None and is_reserved(request.batch_id):
        yield InvalidRequest("batch_id: ids of this form are reserved for /v1/batches", param="batch_id")


def is_reserved(batch_id: str) -> bool:
    """Return whether it has the form of the ids of OpenAI batches."""
    return _RESERVED_BATCH_ID.fullmatch(batch_id) is not None


def _max_batch_for(images: int, model: str, width: int, height: int, catalog: Catalog) -> int:
    """Return the largest batch of a model and size; raise `InvalidRequest` for a job that no batch can hold."""
    max_batch = catalog.for_size(model, width, height).max_batch
    if images > max_batch:
        raise InvalidRequest(f"n is at most {max_batch} for model {model!r} at {width}x{height}", param="n")
    return max_batch


@dataclass(frozen=True)
class Submitter:
    """The tenant of a job, and the base URL of the artifacts that it can name as images."""

    tenant: str
    base_url: str


async def build_job(
    request: JobRequest,
    task: Task,
    submitter: Submitter,
    services: JobServices,
    *,
    previews: int = 0,
    webhook_version: str | None = None,
) -> Job:
    """Return the job of a checked request; its input images are fetched and stored first.

    `previews` is the number of previews of each image. With `webhook_version`, its webhook receives Replicate's
    predictions of this model version.
    """
    tenant, spec = submitter.tenant, services.catalog.get(request.model)
    adapters = await current_adapters(request.adapters, spec, tenant, services.queue)
    store = InputStore(tenant, services.queue, services.storage, services.settings, base_url=submitter.base_url)
    output = resolve_destination(request.output, tenant, services.settings.output_buckets)
    inputs = await store_inputs(request, store)
    job = resolve_job(request, spec, task, tenant=tenant, now_ms=now_ms(), inputs=inputs)
    if webhook_version is not None and job.webhook is not None:
        webhook = job.webhook.model_copy(update={"version": webhook_version})
        job = job.model_copy(update={"webhook": webhook})
    return job.model_copy(
        update={"previews": previews, "output": output, "adapters": adapters, "trace": tracing.current()}
    )


async def current_adapters(
    choices: Sequence[AdapterChoice], spec: ModelSpec, tenant: str, queue: Queue
) -> tuple[Adapter, ...]:
    """Return the adapters of a job; raises `InvalidRequest` for one that neither the model nor its tenant has."""
    found = await queue.adapters.get_many(tenant, uploaded_ids(choices, spec.adapter))
    usable = spec.adapters_refused is None
    uploaded = {one.id: one for one in found if one is not None and one.model == spec.id and usable}
    return resolve_adapters(choices, spec.adapter, spec.limits.max_adapters, uploaded)


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


def check_limits(request: JobRequest, spec: ModelSpec) -> Task:
    """Return the request's task, or raise `InvalidRequest` with every field that the model does not allow."""
    try:
        task = task_of(request, spec)
    except InvalidRequest as error:
        raise first_of([error, *_field_faults(request, spec)]) from None
    faults = chain(_image_faults(request, spec, task), _field_faults(request, spec), _task_faults(request, spec, task))
    if found := list(faults):
        raise first_of(found)
    return task


def _field_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    """Yield the faults of fields that are wrong whatever the others say."""
    yield from chain(_size_faults(request, spec), _number_faults(request, spec), _sampling_faults(request, spec))
    try:
        resolve_adapters(request.adapters, spec.adapter, spec.limits.max_adapters)
    except InvalidRequest as error:
        yield error


def _image_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    count, most = len(request.image_values), spec.limits.max_input_images
    if count > most:
        yield InvalidRequest(f"images: model {spec.id!r} takes at most {most}, not {count}", param="images")
    if task is Task.IMAGE_TO_VIDEO:
        if spec.limits.last_image == "refused" and request.last_image is not None:
            yield InvalidRequest(f"last_image: model {spec.id!r} takes none", param="last_image")
        if spec.limits.last_image == "needed" and request.last_image is None:
            yield InvalidRequest(f"last_image: model {spec.id!r} needs one", param="last_image")
    try:
        _controls(request, spec, task)
    except InvalidRequest as error:
        yield error


def _size_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    limits = spec.limits
    width, height = _default(request.width, spec.defaults.width), _default(request.height, spec.defaults.height)
    for param, side in (("width", width), ("height", height)):
        if not limits.min_side <= side <= limits.max_side:
            yield InvalidRequest(f"{param} must be {limits.min_side} to {limits.max_side}, not {side}", param=param)
        elif side % limits.multiple_of:
            yield InvalidRequest(f"{param} must be a multiple of {limits.multiple_of}, not {side}", param=param)


def _number_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    limits, steps = spec.limits, _default(request.steps, spec.defaults.steps)
    if not limits.min_steps <= steps <= limits.max_steps:
        yield InvalidRequest(f"steps must be {limits.min_steps} to {limits.max_steps}, not {steps}", param="steps")
    for param, scale in (("guidance_scale", request.guidance_scale), ("guidance_scale_2", request.guidance_scale_2)):
        if (scale or 0) > limits.max_guidance_scale:
            yield InvalidRequest(f"{param} is at most {limits.max_guidance_scale}", param=param)
    if request.guidance_scale_2 is not None and spec.defaults.guidance_scale_2 is None:
        yield InvalidRequest(f"model {spec.id!r} has no second denoiser to guide", param="guidance_scale_2")
    if request.n > limits.max_images:
        yield InvalidRequest(f"n is at most {limits.max_images} for model {spec.id!r}", param="n")


def _sampling_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    for param, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt or "")):
        if len(text) > spec.limits.max_prompt_chars:
            yield InvalidRequest(f"{param} is at most {spec.limits.max_prompt_chars} characters", param=param)
    if request.seed is not None and request.seed > MAX_SEED - request.n:
        yield InvalidRequest(f"seed is at most {MAX_SEED - request.n}", param="seed")
    if request.scheduler is not None and request.scheduler not in spec.schedulers:
        allowed = ", ".join(spec.schedulers) or "none but the model's default"
        yield InvalidRequest(f"scheduler must be one of: {allowed}", param="scheduler")
    if request.step_cache is not None and not spec.step_cache.allows(request.step_cache):
        allowed = ", ".join(("off", *spec.step_cache.allowed))
        yield InvalidRequest(f"step_cache: model {spec.id!r} allows: {allowed}", param="step_cache")


def _task_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of fields that depend on others."""
    limits = spec.limits
    pixels = _default(request.width, spec.defaults.width) * _default(request.height, spec.defaults.height)
    if pixels > limits.max_pixels:
        yield InvalidRequest(f"width x height is at most {limits.max_pixels} pixels, not {pixels}", param="width")
    if request.webhook_events is not None and request.webhook is None:
        yield InvalidRequest("webhook_events needs a webhook", param="webhook_events")
    if request.deadline_s is None and request.on_deadline is not OnDeadline.EXPIRE:
        yield InvalidRequest("on_deadline needs a deadline_s", param="on_deadline")
    if request.fps is not None and not task.makes_video:
        yield InvalidRequest(f"{task.value} makes no video", param="fps")
    if request.output_format is not None and (request.output_format is OutputFormat.MP4) != task.makes_video:
        allowed = "mp4" if task.makes_video else "png, jpeg or webp"
        yield InvalidRequest(f"output_format must be {allowed} for {task.value}", param="output_format")
    if request.frames is not None and not limits.allows_frames(request.frames):
        rule = f"1 to {limits.max_frames}"
        if limits.frames_multiple > 1:
            rule += f", a multiple of {limits.frames_multiple} plus 1"
        yield InvalidRequest(f"frames must be {rule}, not {request.frames}", param="frames")
    if request.layers is not None and (task.makes_video or request.layers > limits.max_layers):
        rule = f"at most {limits.max_layers}" if limits.max_layers and not task.makes_video else "not for this model"
        yield InvalidRequest(f"layers: {rule}", param="layers")
    layers = 0 if task.makes_video else _default(request.layers, spec.defaults.layers)
    if request.output is not None and (fault := request.output.fault(outputs=request.n * max(1, layers))):
        yield InvalidRequest(f"output: {fault}", param="output")


def resolve_job(
    request: JobRequest, spec: ModelSpec, task: Task, *, tenant: str, now_ms: int, inputs: Inputs | None = None
) -> Job:
    """Return the job of a checked request with every default resolved; raises `InvalidRequest` for a bad mask size.

    Uploaded adapters are left out.
    """
    inputs, defaults = inputs or Inputs(), spec.defaults
    check_proportions(inputs)
    width, height = _size(request, spec, task, inputs.images)
    return Job(
        id=new_id("job", now_ms),
        tenant=tenant,
        created_at_ms=now_ms,
        priority=request.priority,
        time_limit_ms=None if request.deadline_s is None else round(request.deadline_s * 1000),
        on_deadline=request.on_deadline,
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
