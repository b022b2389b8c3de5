"""Builds the jobs of requests: what `resolve` returns, with their images, which are stored, and uploaded adapters."""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol

from cachetools import LRUCache

from api.jobs.adapter_fetches import AdapterFetcher
from api.jobs.input_store import InputStore
from api.jobs.model_limits import own_faults
from api.jobs.request import JobRequest
from api.jobs.request_images import Inputs, check_proportions, store_inputs
from api.jobs.request_video import check_face_video, fields_of_video
from api.jobs.resolve import ResolverServices, is_reserved, max_batch_for, own_fields
from shared.config.adapters import Adapter, AdapterChoice, resolve_adapters, uploaded_ids
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.errors import Faults, InvalidRequest
from shared.job import InputRef, Job
from shared.job_fields import MAX_DURATION_S, MAX_PARENTS
from shared.model_inputs import extra_faults
from shared.queue import Queue, Submission
from shared.runtime import tracing
from shared.runtime.clock import new_id, now_ms
from shared.signature import signature
from shared.storage import Storage
from shared.tasks import Task

MAX_TEMPLATES = 1024


class JobServices(ResolverServices, Protocol):
    """What jobs are built with, in the API and in the chores."""

    @property
    def queue(self) -> Queue: ...
    @property
    def storage(self) -> Storage: ...


async def build_job(
    resolved: Job,
    request: JobRequest,
    services: JobServices,
    *,
    base_url: str,
    previews: int = 0,
    webhook_version: str | None = None,
) -> Job:
    """Return the job that `resolve` has returned for a request with its images and adapters, which are fetched and
    stored first.

    Images can be artifacts below `base_url`. `previews` is the number of previews of each image. With
    `webhook_version`, its webhook receives Replicate's predictions of this model version.
    """
    tenant, spec = resolved.tenant, services.catalog.get(request.model)
    if resolved.extra:
        described = await services.queue.model_inputs.of(spec)
        faults = Faults()
        if described is not None:  # else its worker checks them
            faults.found += extra_faults(resolved.extra, described, resolved.task, spec.id)
        faults.check()
    fetcher = AdapterFetcher(tenant, spec, services.queue, services.storage, services.settings)
    choices = await fetcher.resolve(request.adapters) if request.fetches_adapters else request.adapters
    adapters = await current_adapters(choices, spec, tenant, services.queue)
    store = InputStore(
        tenant, services.queue, services.storage, services.settings, base_url=base_url, catalog=services.catalog
    )
    job = with_inputs(resolved, request, spec, await store_inputs(request, store))
    check_parents(job)
    webhook = job.webhook
    if webhook_version is not None and webhook is not None:
        webhook = webhook.model_copy(update={"version": webhook_version})
    changes: dict[str, Any] = {
        "adapters": adapters,
        "webhook": webhook,
        "previews": previews,
        "trace": tracing.current(),
    }
    if request.references or request.fetches_adapters:  # jobs are listed by time, and a fetch can take minutes
        at_ms = now_ms()
        changes |= {"id": new_id("job", at_ms), "created_at_ms": at_ms}
    return job.model_copy(update=changes)


def check_parents(job: Job) -> None:
    """Raise `InvalidRequest` for a job that waits for too many others."""
    if len(job.parents) > MAX_PARENTS:
        param = "after" if job.after else next(iter(job.inputs))
        message = f"{param}: the job waits for {len(job.parents)} others, with those that make its inputs"
        raise InvalidRequest(f"{message}; at most {MAX_PARENTS} are allowed", param=param)


def with_inputs(resolved: Job, request: JobRequest, spec: ModelSpec, inputs: Inputs) -> Job:
    """Return a job with its stored images; raises `InvalidRequest` if its mask and image differ in proportions, and for
    latents that the model does not take."""
    check_proportions(inputs)
    changes: dict[str, Any] = {
        "images": inputs.images,
        "mask": inputs.mask,
        "last_image": inputs.last_image,
        "control_images": inputs.controls,
        "video": inputs.video,
        "face_video": inputs.face_video,
        "audio": inputs.audio,
    }
    if inputs.audio is not None and request.duration_s is None:
        changes["duration_s"] = _duration_of(inputs.audio, spec)
    if inputs.audio is not None and resolved.task is Task.AUDIO_INPAINT:
        seconds = changes.get("duration_s", resolved.duration_s)
        changes["repaint_end_s"] = _repaint_end_of(request, seconds or 0.0)
    if resolved.task is Task.EDIT:
        sizes = (spec.references.size_for(image.width, image.height) for image in inputs.images)
        changes["reference_sizes"] = tuple(sizes)
    if inputs.video is not None:
        changes |= fields_of_video(inputs.video, resolved, request, spec)
    if inputs.face_video is not None:
        check_face_video(inputs.face_video, resolved.model_copy(update=changes), spec)
    if inputs.images and inputs.images[0].is_latents:
        width, height = _size_of_latents(inputs.images[0], resolved, request, spec)
        changes |= {"width": width, "height": height}
    elif request.width is None and request.height is None:
        shown = (*inputs.images, inputs.video)
        first = inputs.video if inputs.face_video is not None else next(iter(shown), None)  # its poses are of that size
        size = None if first is None else _size_like(first, resolved, spec)
        if first is not None and size is not None and not spec.limits.allows_size(*size):
            raise _upscaled_fault(spec, first, size)
        changes |= {} if size is None else {"width": size[0], "height": size[1]}
    return resolved.model_copy(update=changes)


def _size_like(source: InputRef, resolved: Job, spec: ModelSpec) -> tuple[int, int] | None:
    """Return width and height of a job that follow from an image or a video, None for the model's default."""
    return spec.size_like(resolved.task, source.width, source.height, resolved.upscale_factor)


def _upscaled_fault(spec: ModelSpec, source: InputRef, size: tuple[int, int]) -> InvalidRequest:
    """Return the fault of an image or a video whose upscaled size the model does not make."""
    param, (width, height) = "video" if source.is_video else "image", size
    limits = f"sides of {spec.limits.min_side} to {spec.limits.max_side} and {spec.limits.max_pixels} pixels"
    message = f"{param}: {source.width}x{source.height} becomes {width}x{height}, and model {spec.id!r} makes {limits}"
    return InvalidRequest(f"{message}; send another {param}, or width and height of the result", param=param)


def _duration_of(audio: InputRef, spec: ModelSpec) -> float:
    """Return the seconds of a result that follows from a sound, or raise `InvalidRequest` if they are too many."""
    seconds, most = audio.duration_s or 0.0, spec.limits.max_duration_s or MAX_DURATION_S
    if seconds > most:
        message = (
            f"audio: {seconds:g} seconds; model {spec.id!r} makes at most {most:g}: send a duration_s for its start"
        )
        raise InvalidRequest(message, param="audio")
    return max(seconds, spec.limits.min_duration_s)


def _repaint_end_of(request: JobRequest, seconds: float) -> float | None:
    """Return where the part that is made anew ends in a sound, or raise `InvalidRequest` if it begins after it."""
    if (start := request.repaint_start_s or 0.0) >= seconds:
        message = f"repaint_start_s: {start:g}; the sound has {seconds:g} seconds"
        raise InvalidRequest(message, param="repaint_start_s")
    return None if request.repaint_end_s is None else min(request.repaint_end_s, seconds)


def _size_of_latents(latents: InputRef, job: Job, request: JobRequest, spec: ModelSpec) -> tuple[int, int]:
    """Return width and height of the image that latents stand for, or raise `InvalidRequest` if the job takes none."""
    with_nets = any(control.kind == "controlnet" for control in job.controls)
    if job.task is not Task.IMAGE_TO_IMAGE or not spec.takes_part("denoising_start", job.task, with_nets=with_nets):
        what = f"{job.task.value} with control nets" if with_nets else job.task.value
        raise InvalidRequest(f"image: model {spec.id!r} takes no latents for {what}", param="image")
    width, height = (side * spec.latent_scale for side in (latents.width, latents.height))
    if not spec.limits.allows_size(width, height):
        raise InvalidRequest(f"image: model {spec.id!r} does not make {width}x{height}, as the latents", param="image")
    for param, side in (("width", width), ("height", height)):
        if getattr(request, param) not in (None, side):
            raise InvalidRequest(f"{param} must be {side}, as the latents are of {width}x{height}", param=param)
    return width, height


async def current_adapters(
    choices: Sequence[AdapterChoice], spec: ModelSpec, tenant: str, queue: Queue
) -> tuple[Adapter, ...]:
    """Return the adapters of a job; raises `InvalidRequest` for one that neither the model nor its tenant has."""
    found = await queue.adapters.get_many(tenant, uploaded_ids(choices))
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
        max_batch=max_batch_for(job, catalog),
        idempotency_key=idempotency_key,
    )


_OWN = frozenset(
    {
        *("prompt", "prompt_2", "negative_prompt", "seed"),
        *("priority", "deadline_s", "not_before", "after", "metadata", "batch_id"),
    }
)
_IMAGES = ("image", "images", "mask", "last_image", "video", "face_video", "controls", "audio")
_WITHOUT_TEMPLATE = (*_IMAGES, "extra", "output", "webhook", "webhook_events")
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
        template = self._submissions.get(self._key(request)) if _can_have_template(request) else None
        if template is None:
            return None
        spec = self._catalog.get(request.model)
        if any(own_faults(request, spec)) or (request.batch_id is not None and is_reserved(request.batch_id)):
            return None
        own = own_fields(request, spec, tenant, now_ms()) | {"previews": previews, "trace": tracing.current()}
        return replace(template, job=template.job.model_copy(update=own))

    def keep(self, request: JobRequest, submission: Submission) -> None:
        """Keep what was built for a checked request without a key, if it can be a template."""
        if _can_have_template(request) and not uploaded_ids(submission.job.adapters):
            self._submissions[self._key(request)] = submission

    def _key(self, request: JobRequest) -> tuple[Any, ...]:
        return (self._catalog.version, *_shared_fields(request), request.deadline_s is None)


def _can_have_template(request: JobRequest) -> bool:
    return bool(_fields_without_template(request) == _UNSET)
