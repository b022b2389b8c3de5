"""Builds the job of a request: checks it, stores its input images, and resolves every default."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Protocol

from cachetools import LRUCache

from shared.config.adapters import Adapter, AdapterChoice, resolve_adapters, uploaded_ids
from shared.config.destinations import resolve_destination
from shared.config.models_file import Catalog, ModelSpec, References
from shared.config.settings import Settings
from shared.errors import Faults, FetchRefused, InvalidRequest, first_of
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.model_limits import check_limits, chosen_controls, field_faults, given_or, own_faults
from shared.inputs.request_images import Inputs, check_proportions, reference_faults, store_inputs
from shared.inputs.store import InputStore
from shared.job import InputRef, Job, Webhook
from shared.job_fields import SENT_FIELDS, OutputFormat, Task
from shared.queue import Queue, Submission
from shared.request import JobRequest, parse
from shared.runtime import tracing
from shared.runtime.clock import new_id, now_ms
from shared.signature import signature
from shared.storage import Storage
from shared.webhooks import EVENTS, TERMINAL_EVENTS

_RESERVED_BATCH_ID = re.compile(r"batch_[0-9a-z]{26}")
MAX_TEMPLATES = 1024


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
        width, height = given_or(request.width, spec.defaults.width), given_or(request.height, spec.defaults.height)
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
    yield from field_faults(request, spec)


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


def make_submission(job: Job, catalog: Catalog, idempotency_key: str | None = None) -> Submission:
    """Return the job with its queue parameters, the argument of `queue.jobs.submit`.

    Raises `InvalidRequest` for a job that no batch can hold: its size can follow from its images.
    """
    return Submission(
        job=job,
        signature=signature(job),
        window_ms=catalog.get(job.model).window_ms,
        max_batch=_max_batch_for(job.slots, job.model, job.width, job.height, catalog),
        idempotency_key=idempotency_key,
    )


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
        **{name: getattr(request, name) for name in SENT_FIELDS} | _own_fields(request, spec, tenant, now_ms),
        webhook=_webhook(request),
        width=width,
        height=height,
        task=task,
        steps=given_or(request.steps, defaults.steps),
        guidance_scale=given_or(request.guidance_scale, defaults.guidance_scale),
        guidance_scale_2=given_or(request.guidance_scale_2, defaults.guidance_scale_2),
        step_cache=spec.step_cache.schedule_of(request.step_cache),
        adapters=resolve_adapters(request.adapters, spec.adapter, spec.limits.max_adapters),
        mixed_fields=_mixed_fields(spec, request.reproducible),
        images=inputs.images,
        mask=inputs.mask,
        last_image=inputs.last_image,
        control_ids=tuple(choice.id for choice in request.controls),
        controls=chosen_controls(request, spec, task),
        control_images=inputs.controls,
        **_task_fields(request, spec, task, inputs),
    )


def _own_fields(request: JobRequest, spec: ModelSpec, tenant: str, now_ms: int) -> dict[str, Any]:
    """Return the fields in which requests of one template differ: no other field of the job depends on them."""
    return {
        "id": new_id("job", now_ms),
        "tenant": tenant,
        "created_at_ms": now_ms,
        "priority": request.priority,
        "time_limit_ms": None if request.deadline_s is None else round(request.deadline_s * 1000),
        "metadata": request.metadata,
        "batch_id": request.batch_id,
        "prompt": request.prompt,
        "negative_prompt": given_or(request.negative_prompt, spec.defaults.negative_prompt),
        "seed": secrets.randbelow(2**32) if request.seed is None else request.seed,
    }


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
    return given_or(request.width, defaults.width), given_or(request.height, defaults.height)


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
        values["strength"] = given_or(request.strength, 1.0 if task is Task.INPAINT else defaults.strength)
    if task is Task.EDIT:
        sizes = (spec.references.size_for(image.width, image.height) for image in inputs.images)
        values["reference_sizes"] = tuple(sizes)
    if task.makes_video:
        values["frames"] = given_or(request.frames, spec.usual_frames)
        values["fps"] = given_or(request.fps, defaults.fps)
        values["output_format"] = OutputFormat.MP4
    else:
        values["layers"] = given_or(request.layers, defaults.layers)
    return values


_OWN = frozenset({"prompt", "negative_prompt", "seed", "priority", "deadline_s", "metadata", "batch_id"})
_WITHOUT_TEMPLATE = ("image", "images", "mask", "last_image", "controls", "output", "webhook", "webhook_events")
_shared_fields = attrgetter(*sorted(set(JobRequest.model_fields) - _OWN - set(_WITHOUT_TEMPLATE)))
_fields_without_template = attrgetter(*_WITHOUT_TEMPLATE)
_UNSET = tuple(JobRequest.model_fields[name].default for name in _WITHOUT_TEMPLATE)


class JobTemplates:
    """Submissions of checked requests, by all their fields but those of one job, such as its prompt and seed.

    A client sends thousands of requests that differ in those only. The job of a request like an earlier one is a copy
    of the earlier job with the request's own fields, in a third of the time. Images, webhooks, other destinations and
    uploaded adapters can be gone later: their requests have no template.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._submissions: LRUCache[tuple[Any, ...], Submission] = LRUCache(MAX_TEMPLATES)

    def submission(self, request: JobRequest, tenant: str, previews: int) -> Submission | None:
        """Return the submission of a request like an earlier one; None for a new kind and for one with faults."""
        template = self._submissions.get(_key(request)) if _can_have_template(request) else None
        if template is None:
            return None
        spec = self._catalog.get(request.model)
        if any(own_faults(request, spec)) or (request.batch_id is not None and is_reserved(request.batch_id)):
            return None
        own = _own_fields(request, spec, tenant, now_ms()) | {"previews": previews, "trace": tracing.current()}
        return replace(template, job=template.job.model_copy(update=own))

    def keep(self, request: JobRequest, submission: Submission) -> None:
        """Keep what was built for a checked request without a key, if it can be a template."""
        if _can_have_template(request) and not uploaded_ids(submission.job.adapters):
            self._submissions[_key(request)] = submission


def _can_have_template(request: JobRequest) -> bool:
    return bool(_fields_without_template(request) == _UNSET)


def _key(request: JobRequest) -> tuple[Any, ...]:
    return (*_shared_fields(request), request.deadline_s is None)
