"""What a model allows of a request: its sizes, numbers and options, and what its task needs."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TypeVar

from api.jobs.request import JobRequest
from shared.config.adapters import resolve_adapters
from shared.config.controls import Control, resolve_controls
from shared.config.model_spec import ModelSpec
from shared.config.noise_schedulers import misfit, most_steps
from shared.config.refiners import NONE
from shared.config.scheduler_choices import SchedulerChoice, choice_of, meanings, named_choice, option_faults
from shared.errors import InvalidRequest
from shared.job_fields import MAX_DURATION_S, MAX_SEED, PARTS, OnDeadline
from shared.runtime.clock import now_ms
from shared.start_times import MAX_WAIT_S, due_ms
from shared.tasks import Medium, OutputFormat, Task

T = TypeVar("T")

_OUTPUT_FORMATS: Mapping[Medium, str] = {
    Medium.IMAGE: "png, jpeg or webp",
    Medium.VIDEO: "mp4",
    Medium.AUDIO: "wav, flac, mp3 or opus",
    Medium.MESH: "glb",
}
"""As errors name them: latents are not offered, as few models give them."""

_NOT_OF_MESHES = ("width", "height", "negative_prompt", "prompt_2", "scheduler", "scheduler_options", *PARTS)


def field_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    """Yield the faults of fields that are wrong whatever the others say."""
    yield from chain(_prompt_faults(request, spec), _size_faults(request, spec), _number_faults(request, spec))
    yield from chain(_text_faults(request, spec), _time_faults(request))
    yield from _sampling_faults(request, spec)
    for name in sorted((request.extra or {}).keys() - set(spec.extra)):
        named = f"its inputs are {', '.join(spec.extra)}" if spec.extra else "it takes none"
        yield InvalidRequest(f"extra.{name}: model {spec.id!r} does not allow it; {named}", param=f"extra.{name}")
    try:
        resolve_adapters(request.adapters, spec.adapter, spec.limits.max_adapters)
    except InvalidRequest as error:
        yield error


def image_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of the number of images, and of a last one."""
    count, most = len(request.image_values), spec.limits.max_input_images
    if count > most:
        yield InvalidRequest(f"images: model {spec.id!r} takes at most {most}, not {count}", param="images")
    if task is Task.IMAGE_TO_VIDEO:
        if spec.limits.last_image == "refused" and request.last_image is not None:
            yield InvalidRequest(f"last_image: model {spec.id!r} takes none", param="last_image")
        if spec.limits.last_image == "needed" and request.last_image is None:
            yield InvalidRequest(f"last_image: model {spec.id!r} needs one", param="last_image")


def _size_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    limits = spec.limits
    width, height = given_or(request.width, spec.defaults.width), given_or(request.height, spec.defaults.height)
    for param, side in (("width", width), ("height", height)):
        if not limits.min_side <= side <= limits.max_side:
            yield InvalidRequest(f"{param} must be {limits.min_side} to {limits.max_side}, not {side}", param=param)
        elif side % limits.multiple_of:
            yield InvalidRequest(f"{param} must be a multiple of {limits.multiple_of}, not {side}", param=param)


def _number_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    limits, steps = spec.limits, given_or(request.steps, spec.defaults.steps)
    if not limits.min_steps <= steps <= limits.max_steps:
        yield InvalidRequest(f"steps must be {limits.min_steps} to {limits.max_steps}, not {steps}", param="steps")
    for param in ("guidance_scale", "guidance_scale_2", "true_cfg_scale"):
        if (getattr(request, param) or 0) > limits.max_guidance_scale:
            yield InvalidRequest(f"{param} is at most {limits.max_guidance_scale}", param=param)
    if (request.max_sequence_length or 0) > limits.max_sequence_length:
        message = f"max_sequence_length is at most {limits.max_sequence_length} for model {spec.id!r}"
        yield InvalidRequest(message, param="max_sequence_length")
    if request.guidance_scale_2 is not None and spec.defaults.guidance_scale_2 is None:
        yield InvalidRequest(f"model {spec.id!r} has no second denoiser to guide", param="guidance_scale_2")
    if request.n > limits.max_images:
        yield InvalidRequest(f"n is at most {limits.max_images} for model {spec.id!r}", param="n")
    if request.best_of is not None and request.best_of.candidates > limits.max_images:
        message = f"best_of.candidates is at most {limits.max_images} for model {spec.id!r}"
        yield InvalidRequest(message, param="best_of.candidates")


def own_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    """Yield the faults of the prompts, the seed and the time, on which no other field depends."""
    yield from chain(_prompt_faults(request, spec), _text_faults(request, spec), _time_faults(request))


def _prompt_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    is_optional = spec.makes_meshes or spec.upscales or "redux" in _control_kinds(request, spec)
    if not request.prompt and not is_optional:
        is_empty = "prompt" in request.model_fields_set
        yield InvalidRequest("prompt: it is empty" if is_empty else "prompt: Field required", param="prompt")
    if request.prompt and spec.makes_meshes:
        yield InvalidRequest(f"prompt: model {spec.id!r} takes none", param="prompt")


def _text_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    texts = {"prompt": request.prompt, "negative_prompt": request.negative_prompt, "prompt_2": request.prompt_2}
    for param, text in texts.items():
        if text is not None and len(text) > spec.limits.max_prompt_chars:
            most = f"{spec.limits.max_prompt_chars} characters for model {spec.id!r}"
            yield InvalidRequest(f"{param} is at most {most}, not {len(text)}", param=param)
    images = request.n if request.best_of is None else request.best_of.candidates
    if request.seed is not None and request.seed > MAX_SEED - images:
        yield InvalidRequest(f"seed is at most {MAX_SEED - images}", param="seed")


def _time_faults(request: JobRequest) -> Iterator[InvalidRequest]:
    now = now_ms()
    if request.not_before is not None and due_ms(request.not_before, now) > now + 1000 * MAX_WAIT_S:
        yield InvalidRequest(f"not_before is at most {MAX_WAIT_S // 86_400} days from now", param="not_before")


def _sampling_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    is_chosen = request.scheduler is not None or request.scheduler_options is not None
    if is_chosen or spec.facts.unusable_schedulers:
        yield from _scheduler_faults(request, spec)
    choice, steps = chosen_scheduler(request, spec), given_or(request.steps, spec.defaults.steps)
    name = choice.name or spec.own_scheduler.class_name
    most = most_steps(name, spec.own_scheduler, choice.spacing) if choice.values is None else None
    if most is not None and steps > most:
        yield InvalidRequest(f"steps: {name} has at most {most} on model {spec.id!r}, not {steps}", param="steps")
    if request.step_cache is not None and not spec.step_cache.allows(request.step_cache):
        allowed = ", ".join(("off", *spec.step_cache.allowed))
        yield InvalidRequest(f"step_cache: model {spec.id!r} allows: {allowed}", param="step_cache")


def chosen_scheduler(request: JobRequest, spec: ModelSpec) -> SchedulerChoice:
    """Return the scheduler of a request, or the model's default; an object without a name means the model's own."""
    own = spec.own_scheduler
    asked = given_or(request.scheduler, spec.defaults.scheduler)
    choice = choice_of(asked, request.scheduler_options, own.is_flow)
    if choice.name is None and request.scheduler is not None:
        return choice.model_copy(update={"name": own.class_name})
    return choice


def _scheduler_faults(request: JobRequest, spec: ModelSpec) -> Iterator[InvalidRequest]:
    own, choice = spec.own_scheduler, chosen_scheduler(request, spec)
    if choice.name is not None and (reason := _why_refused(choice.name, choice, spec)) is not None:
        allowed = ", ".join(spec.usable_schedulers)
        remedy = f"it must be one of: {allowed}" if allowed else _remedy_without_others(spec)
        yield InvalidRequest(f"scheduler: {reason}; {remedy}", param="scheduler")
        return
    unusable = spec.facts.unusable_options
    lacking = (f"{option!r} {unusable[option]}" for option in choice.given if option in unusable)
    for fault in (*option_faults(choice, own), *lacking):
        yield InvalidRequest(f"scheduler: {fault}", param="scheduler")
    if choice.values is not None:
        steps = len(choice.values)
        if request.steps not in {None, steps}:
            yield InvalidRequest(f"steps: the scheduler lists {steps}", param="steps")
        elif not spec.limits.min_steps <= steps <= spec.limits.max_steps:
            limits = f"{spec.limits.min_steps} to {spec.limits.max_steps}"
            yield InvalidRequest(f"scheduler lists {steps} steps; they must be {limits}", param="scheduler")


def _remedy_without_others(spec: ModelSpec) -> str:
    """Return what helps where no scheduler can be chosen: nothing that a client sends, if the default is unusable."""
    default = choice_of(spec.defaults.scheduler, None, spec.own_scheduler.is_flow)
    if default.name is None or _why_refused(default.name, default, spec) is None:
        return "send none, for the model's default"
    return (
        f"{default.name} is the default of model {spec.id!r}, so the operator must install what it needs, or change it"
    )


def _why_refused(name: str, choice: SchedulerChoice, spec: ModelSpec) -> str | None:
    """Return why requests cannot choose the scheduler `name` with the options of `choice`, None if they can."""
    own = spec.own_scheduler
    default = choice_of(spec.defaults.scheduler, None, own.is_flow).name
    for unusable, reason in spec.facts.unusable_schedulers.items():
        unusable_choice = named_choice(unusable, own.is_flow)
        if unusable_choice.name == name and unusable_choice.given.items() <= choice.given.items():
            return reason
    known = frozenset[str]().union(
        *(meanings(one) for one in (own.class_name, default, *spec.fitting_schedulers.values()) if one)
    )
    if known & meanings(name):
        return None
    return misfit(name, own.is_flow) or f"model {spec.id!r} does not list {name}"


def task_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of fields that depend on others."""
    limits = spec.limits
    pixels = given_or(request.width, spec.defaults.width) * given_or(request.height, spec.defaults.height)
    yield from _audio_faults(request, spec, task)
    if pixels > limits.max_pixels:
        yield InvalidRequest(f"width x height is at most {limits.max_pixels} pixels, not {pixels}", param="width")
    for param, unset in (("mask_blur", 0), ("mask_padding", None)):
        if getattr(request, param) != unset and request.mask is None:
            yield InvalidRequest(f"{param} needs a mask", param=param)
    yield from _upscale_faults(request, spec, task)
    yield from _part_faults(request, spec, task)
    yield from _refiner_faults(request, spec, task)
    yield from _candidate_faults(request, spec, task)
    yield from _mesh_faults(request, task)
    if request.webhook_events is not None and request.webhook is None:
        yield InvalidRequest("webhook_events needs a webhook", param="webhook_events")
    if request.deadline_s is None and request.on_deadline is not OnDeadline.EXPIRE:
        yield InvalidRequest("on_deadline needs a deadline_s", param="on_deadline")
    if request.fps is not None and not task.makes_video:
        yield InvalidRequest(f"{task.value} makes no video", param="fps")
    elif request.fps is not None and request.fps != (limits.fps or request.fps):
        yield InvalidRequest(f"fps: videos of model {spec.id!r} have {limits.fps}, not {request.fps}", param="fps")
    if request.output_format is not None and request.output_format.medium is not task.medium:
        allowed = _OUTPUT_FORMATS[task.medium]
        yield InvalidRequest(f"output_format must be {allowed} for {task.value}", param="output_format")
    elif request.output_format is OutputFormat.LATENT and not _gives_latents(spec, task):
        allowed = _OUTPUT_FORMATS[task.medium]
        message = f"output_format: model {spec.id!r} gives no latents for {task.value}; use {allowed}"
        yield InvalidRequest(message, param="output_format")
    if request.frames is not None and not limits.allows_frames(request.frames):
        rule = f"{limits.min_frames} to {limits.max_frames}"
        if limits.frames_multiple > 1:
            rule += f", a multiple of {limits.frames_multiple} plus 1"
        yield InvalidRequest(f"frames must be {rule}, not {request.frames}", param="frames")
    if request.layers is not None and (task.medium is not Medium.IMAGE or request.layers > limits.max_layers):
        takes_layers = limits.max_layers and task.medium is Medium.IMAGE
        rule = f"at most {limits.max_layers}" if takes_layers else "not for this model"
        yield InvalidRequest(f"layers: {rule}", param="layers")
    layers = given_or(request.layers, spec.defaults.layers) if task.medium is Medium.IMAGE else 0
    if request.output is not None and (fault := request.output.fault(outputs=kept_images(request) * max(1, layers))):
        yield InvalidRequest(f"output: {fault}", param="output")


def _upscale_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of an upscale factor, and of sides that a model does not make by it; its worker finds them in a
    model whose factors are not known yet."""
    factor, known = request.upscale_factor, spec.upscale_factors
    if factor is not None and not task.upscales:
        yield InvalidRequest(f"upscale_factor: {task.value} takes none", param="upscale_factor")
    elif factor is not None and known and factor not in known:
        allowed = ", ".join(f"{one:g}" for one in known)
        message = f"upscale_factor: model {spec.id!r} takes {allowed}, not {factor:g}"
        yield InvalidRequest(message, param="upscale_factor")
    elif task.upscales and known:
        yield from _upscaled_side_faults(request, spec, factor or known[0])


def _upscaled_side_faults(request: JobRequest, spec: ModelSpec, factor: float) -> Iterator[InvalidRequest]:
    for param, side in (("width", request.width), ("height", request.height)):
        if side is None or not spec.limits.allows_side(side):  # which is a fault of its own
            continue
        made = spec.rounded_side(side, factor)
        if made != side:
            message = f"{param}: by upscale_factor {factor:g} model {spec.id!r} makes {made}, not {side}"
            yield InvalidRequest(f"{message}; leave out width and height for those of the source", param=param)


def _audio_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of a sound's length, and of fields that sounds do not have."""
    if not task.makes_audio:
        return
    for param in ("width", "height"):
        if getattr(request, param) is not None:
            yield InvalidRequest(f"{param}: {task.value} makes no image; send duration_s", param=param)
    if request.controls:
        yield InvalidRequest(f"controls: not for {task.value}", param="controls")
    least, most = spec.limits.min_duration_s, spec.limits.max_duration_s or MAX_DURATION_S
    if request.duration_s is not None and not least <= request.duration_s <= most:
        message = f"duration_s must be {least:g} to {most:g}, not {request.duration_s:g}"
        yield InvalidRequest(message, param="duration_s")
    start, end = request.repaint_start_s or 0.0, request.repaint_end_s
    if request.duration_s is not None and start >= request.duration_s:
        message = f"repaint_start_s: {start:g}; the sound has {request.duration_s:g} seconds"
        yield InvalidRequest(message, param="repaint_start_s")
    if end is not None and end <= start:
        yield InvalidRequest(
            f"repaint_end_s must be above repaint_start_s {start:g}, not {end:g}", param="repaint_end_s"
        )


def _mesh_faults(request: JobRequest, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of fields that have no meaning for a mesh."""
    for param in _NOT_OF_MESHES if task.makes_mesh else ():
        if getattr(request, param) is not None:
            yield InvalidRequest(f"{param}: {task.value} takes none", param=param)


def _gives_latents(spec: ModelSpec, task: Task) -> bool:
    """Return whether results can be latents: not inpainted images, which are pasted into the image they start from."""
    return task in (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE) and spec.takes_part("denoising_end", task)


def _part_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of `denoising_start` and `denoising_end`."""
    with_nets = _has_nets(request, spec)
    for param in PARTS:
        if getattr(request, param) is not None and not spec.takes_part(param, task, with_nets=with_nets):
            what = f"{task.value} with control nets" if with_nets else task.value
            yield InvalidRequest(f"{param}: model {spec.id!r} takes none for {what}", param=param)
    start, end = request.denoising_start, request.denoising_end
    if start is not None and end is not None and end <= start:
        yield InvalidRequest(f"denoising_end must be above denoising_start {start}, not {end}", param="denoising_end")
    if start is not None and request.strength is not None:
        yield InvalidRequest("strength has no effect with denoising_start", param="strength")


def _has_nets(request: JobRequest, spec: ModelSpec) -> bool:
    return "controlnet" in _control_kinds(request, spec)


def _control_kinds(request: JobRequest, spec: ModelSpec) -> set[str]:
    chosen = {control.id for control in request.controls}
    return {control.kind for control in spec.control if control.id in chosen}


def _refiner_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of `refiner_start`."""
    start, param = request.refiner_start, "refiner_start"
    if start is None or start == NONE:
        return
    if spec.refiner is None:
        yield InvalidRequest(f"{param}: model {spec.id!r} has no refiner", param=param)
    elif not spec.refines(task, with_nets=(with_nets := _has_nets(request, spec))):
        what = f"{task.value} with control nets" if with_nets else task.value
        yield InvalidRequest(f"{param}: model {spec.id!r} has no refiner for {what}", param=param)
    for other in _sent_parts(request):
        yield InvalidRequest(f"{param} excludes {other}", param=param)
    strength = given_or(request.strength, spec.defaults.strength)
    if task.has_strength and not _has_step_before(start, strength, _steps_of(request, spec)):
        least = f"use a strength above {round(1 - start, 6)}, or more steps"
        yield InvalidRequest(f"{param}: with this strength no step is before {start}; {least}", param=param)


def _candidate_faults(request: JobRequest, spec: ModelSpec, task: Task) -> Iterator[InvalidRequest]:
    """Yield the faults of `best_of`, other than that of its candidates' number."""
    best_of, param = request.best_of, "best_of"
    if best_of is None:
        return
    if task.medium is not Medium.IMAGE:
        yield InvalidRequest(f"{param}: not for {task.value}, only for images", param=param)
    elif spec.scorer is None:
        yield InvalidRequest(f"{param}: model {spec.id!r} has no scorer of candidates", param=param)
    if "n" in request.model_fields_set and request.n != best_of.keep:
        yield InvalidRequest(f"n is {param}.keep, {best_of.keep}, with {param}; leave it out", param="n")
    if given_or(request.layers, spec.defaults.layers):
        yield InvalidRequest(f"{param} excludes layers", param=param)
    if request.refiner_start not in (None, NONE):
        yield InvalidRequest(f"{param} excludes refiner_start", param=param)
    for other in _sent_parts(request):
        yield InvalidRequest(f"{param} excludes {other}", param=param)


def kept_images(request: JobRequest) -> int:
    """Return how many results a request asks for."""
    return request.n if request.best_of is None else request.best_of.keep


def _steps_of(request: JobRequest, spec: ModelSpec) -> int:
    values = chosen_scheduler(request, spec).values
    return given_or(request.steps, spec.defaults.steps) if values is None else len(values)


def _has_step_before(start: float, strength: float, steps: int) -> bool:
    """Return whether any of the last steps that a strength leaves, rounded down, is before a share of all of them."""
    return int(steps * strength) > round(steps * (1 - start), 6)


def _sent_parts(request: JobRequest) -> Iterator[str]:
    """Yield the fields by which a request leaves a part of the denoising to another job."""
    yield from (name for name in PARTS if getattr(request, name) is not None)
    if request.output_format is OutputFormat.LATENT:
        yield "output_format latent"


def chosen_refiner_start(request: JobRequest, spec: ModelSpec, task: Task, steps: int) -> float | None:
    """Return from which share of the denoising the refiner of a model goes on, None if it does not.

    The model's default is for images from text only, by steps that no list names and that leave some to both.
    """
    if request.refiner_start is not None:
        return None if request.refiner_start == NONE else request.refiner_start
    if request.best_of is not None:
        return None
    listed = chosen_scheduler(request, spec).values is not None
    refines = spec.refines(task, with_nets=_has_nets(request, spec))
    if spec.refiner is None or task is not Task.TEXT_TO_IMAGE or not refines or listed or any(_sent_parts(request)):
        return None
    return spec.refiner.default_start(steps)


def chosen_controls(request: JobRequest, spec: ModelSpec, task: Task) -> tuple[Control, ...]:
    """Return the control images of a request, or raise `InvalidRequest`."""
    return resolve_controls(request.controls, spec.control, spec.limits.max_controls, task)


def given_or(value: T | None, default: T) -> T:
    """Return the value of a field, or its default if a request has none."""
    return default if value is None else value
