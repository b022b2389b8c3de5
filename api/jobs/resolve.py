"""The job of a request: `resolve` returns it with every default chosen, or raises all faults of the request.

It reads nothing from Redis or storage: `api.jobs.job_builder` adds the stored images and the uploaded adapters.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from api.jobs.adapter_fetches import source_faults
from api.jobs.model_limits import (
    chosen_controls,
    chosen_refiner_start,
    chosen_scheduler,
    field_faults,
    given_or,
    image_faults,
    kept_images,
    task_faults,
)
from api.jobs.request import JobRequest, parse, task_of
from api.jobs.request_images import reference_faults
from shared.config.adapters import resolve_adapters
from shared.config.catalog import Catalog
from shared.config.controls import Control
from shared.config.destinations import resolve_destination
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import Faults, FetchRefused, InvalidRequest, first_of
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import Job, Webhook
from shared.job_fields import SENT_FIELDS
from shared.runtime import clock
from shared.start_times import due_ms
from shared.tasks import DEFAULT_FORMATS, OutputFormat, Task
from shared.webhooks import EVENTS, TERMINAL_EVENTS

_RESERVED_BATCH_ID = re.compile(r"batch_[0-9a-z]{26}")


class ResolverServices(Protocol):
    """What requests are checked with, in the API and in the chores."""

    @property
    def settings(self) -> Settings: ...
    @property
    def catalog(self) -> Catalog: ...


def resolve(request: JobRequest, services: ResolverServices, tenant: str, submitted_at_ms: int | None = None) -> Job:
    """Return the job of a request without its images and its uploaded adapters, or raise `InvalidRequest` with all
    faults. It is submitted now, unless an earlier time is given."""
    faults = Faults()
    faults.found += [*_delivery_faults(request, services), *reference_faults(request)]
    output, spec = None, services.catalog.get(request.model)
    with faults.collected():
        output = resolve_destination(request.output, tenant, services.settings.output_buckets)
    with faults.collected():
        job = resolve_for_model(request, spec, tenant, clock.now_ms() if submitted_at_ms is None else submitted_at_ms)
        max_batch_for(job, services.catalog)
    faults.check()
    return job.model_copy(update={"output": output})


def resolve_for_model(request: JobRequest, spec: ModelSpec, tenant: str, now_ms: int) -> Job:
    """Like `resolve`, with the faults of fields that the model does not allow only, and without the destination."""
    faults = Faults()
    try:
        task = task_of(request, spec)
    except InvalidRequest as error:
        raise first_of([error, *field_faults(request, spec)]) from None
    faults.found += image_faults(request, spec, task)
    controls: tuple[Control, ...] = ()
    with faults.collected():
        controls = chosen_controls(request, spec, task)
    faults.found += [*field_faults(request, spec), *task_faults(request, spec, task)]
    faults.check()
    defaults = spec.defaults
    scheduler = chosen_scheduler(request, spec)
    steps = given_or(request.steps, defaults.steps) if scheduler.values is None else len(scheduler.values)
    return Job(
        **{name: getattr(request, name) for name in SENT_FIELDS}
        | {"model": spec.id}  # the request can have an alias
        | {"n": kept_images(request)}
        | {"extra": {**defaults.extra, **(request.extra or {})} if defaults.extra else request.extra}
        | own_fields(request, spec, tenant, now_ms),
        **_task_fields(request, spec, task),
        task=task,
        webhook=_webhook(request),
        width=0 if task.makes_audio else given_or(request.width, defaults.width),
        height=0 if task.makes_audio else given_or(request.height, defaults.height),
        steps=steps,
        scheduler=scheduler.name,
        scheduler_options=scheduler.options,
        guidance_scale=given_or(request.guidance_scale, defaults.guidance_scale),
        guidance_scale_2=given_or(request.guidance_scale_2, defaults.guidance_scale_2),
        step_cache=spec.step_cache.schedule_of(request.step_cache),
        refiner_start=chosen_refiner_start(request, spec, task, steps),
        adapters=resolve_adapters(request.adapters, spec.adapter, spec.limits.max_adapters),
        mixed_fields=_mixed_fields(spec, request.reproducible),
        control_ids=tuple(control.id for control in controls if control.kind != "structure"),
        controls=controls,
    )


def own_fields(request: JobRequest, spec: ModelSpec, tenant: str, now_ms: int) -> dict[str, Any]:
    """Return the fields in which requests of one template differ: no other field of the job depends on them."""
    return {
        "id": clock.new_id("job", now_ms),
        "tenant": tenant,
        "created_at_ms": now_ms,
        "priority": request.priority,
        "time_limit_ms": None if request.deadline_s is None else round(request.deadline_s * 1000),
        "not_before_ms": None if request.not_before is None else due_ms(request.not_before, now_ms),
        "after": tuple(dict.fromkeys(request.after)),
        "metadata": request.metadata,
        "batch_id": request.batch_id,
        "prompt": request.prompt,
        "prompt_2": request.prompt_2,
        "negative_prompt": given_or(request.negative_prompt, spec.defaults.negative_prompt),
        "seed": secrets.randbelow(2**32) if request.seed is None else request.seed,
    }


def _mixed_fields(spec: ModelSpec, reproducible: bool) -> tuple[str, ...]:
    """Return the fields in which batch mates of a job can differ."""
    # Padding to the size of another job would change the last bits.
    return tuple(name for name in spec.mixed_fields if not (reproducible and name == "size"))


def _webhook(request: JobRequest) -> Webhook | None:
    if request.webhook is None:
        return None
    events = TERMINAL_EVENTS if request.webhook_events is None else request.webhook_events
    return Webhook(url=request.webhook, states=tuple(EVENTS[event] for event in events))


def _task_fields(request: JobRequest, spec: ModelSpec, task: Task) -> dict[str, Any]:
    """Return the fields of the job that only some tasks have."""
    defaults = spec.defaults
    values: dict[str, Any] = {"output_format": request.output_format or DEFAULT_FORMATS[task.medium]}
    if task.upscales:
        values["upscale_factor"] = given_or(request.upscale_factor, next(iter(spec.upscale_factors), None))
    if task.has_strength and request.denoising_start is None:
        values["strength"] = given_or(request.strength, 1.0 if task is Task.INPAINT else defaults.strength)
    if task.makes_video:
        values["frames"] = given_or(request.frames, spec.usual_frames)
        values["fps"] = given_or(request.fps, defaults.fps)
    elif task.makes_audio:
        values["duration_s"] = given_or(request.duration_s, spec.usual_duration_s)
    else:
        values["layers"] = given_or(request.layers, defaults.layers)
    return values


def max_batch_for(job: Job, catalog: Catalog) -> int:
    """Return the largest batch of a job's model and size; raises `InvalidRequest` if none can hold the job."""
    max_batch = catalog.for_size(job.model, job.width, job.height).max_batch
    if job.slots > max_batch:
        param = "n" if job.best_of is None else "best_of.candidates"
        message = f"{param} is at most {max_batch} for model {job.model!r} at {job.width}x{job.height}"
        raise InvalidRequest(message, param=param)
    return max_batch


def parse_request(
    body: Any, spec_of: Callable[[str], ModelSpec], services: ResolverServices | None = None
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
    services: ResolverServices | None,
) -> Iterator[InvalidRequest]:
    """Yield the faults of the valid fields of a body with `faults`, as far as no other field decides about them."""
    invalid = {(fault.param or "").partition(".")[0] for fault in faults}
    if not isinstance(body, Mapping) or "model" in invalid:
        return
    rest = {name: value for name, value in body.items() if name not in invalid}
    try:
        request = parse(rest)
        spec = spec_of(request.model)
    except InvalidRequest as error:
        yield from error.faults
        return
    if services is not None:
        yield from _delivery_faults(request, services)
    yield from reference_faults(request)
    yield from (fault for fault in field_faults(request, spec) if fault.param not in invalid)


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
        if request.output_format is OutputFormat.LATENT:
            message = "output_format: latent is not supported by this protocol; use POST /v1/jobs"
            faults.found.append(InvalidRequest(message, param="output_format"))
        if spec.makes_meshes:
            message = f"model: {spec.id!r} makes meshes, which this protocol does not return; use POST /v1/jobs"
            faults.found.append(InvalidRequest(message, param="model"))
        task = resolve_for_model(request, spec, tenant="", now_ms=0).task
    faults.check()
    return request, task


def _delivery_faults(request: JobRequest, services: ResolverServices) -> Iterator[InvalidRequest]:
    """Yield the faults of URLs that the service will call, and of `batch_id`."""
    yield from source_faults(request.adapters, services.settings)
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
