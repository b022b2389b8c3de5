"""From a job to the pipeline call of one result, and from the call's output to pixels and audio."""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import torch
from diffusers.guiders.guider_utils import BaseGuidance
from PIL import Image, ImageOps

from shared.architectures.registry import FIXED_RATES, LISTED_IMAGES, UPSCALERS
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults
from shared.config.scheduler_choices import SchedulerOptions
from shared.errors import InferenceFailed, JobError, NonFiniteLatents, UnusableInput
from shared.job import FieldWarning, Job
from shared.job_fields import PARTS, CallFields, OutputFormat, Task
from worker.engine.channel import shared_array
from worker.engine.pipelines.camera import camera_arguments
from worker.engine.pipelines.clones import Pipeline, StepCounter
from worker.engine.pipelines.control_nets import as_read, modes_of
from worker.engine.pipelines.extending import beginning, unused_frames
from worker.engine.pipelines.extra_inputs import extra_arguments
from worker.engine.pipelines.inpainting import Paste
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.model_facts import side_step
from worker.engine.pipelines.sounds import SOUND_STRENGTHS, audio_of, check_lyrics, sound_arguments, to_audio
from worker.engine.pipelines.task_pipelines import (
    FRAME_COUNTS,
    POSES_AND_FACES,
    REFERENCES,
    call_parameters,
    takes_last_image,
    takes_structure,
)
from worker.engine.protocol import Audio, Latents, Mesh, Output, Pixels

NEEDS_CACHE = ("AnyFlowFARPipeline",)
NEEDS_NEGATIVE = ("EasyAnimatePipeline",)  # with guidance it fails without one
LATENT = OutputFormat.LATENT.value  # diffusers' `output_type` has the same name
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
LAYERED_SIDES = (640, 1024)  # sides of the squares whose areas Qwen-Image-Layered supports

FRAME_RATES = ("frame_rate", "fps")  # pipelines name it differently
VIDEOS = ("video", "driving_video", "controls")
_DOWNSCALE = "reference_downscale_factor"
LEAST_POSES = 2  # segments of one frame have none but that of the segment before

Parameters = Mapping[str, inspect.Parameter]


def arguments_for(pipeline: Pipeline, job: Job, index: int, inputs: InputImages) -> dict[str, Any]:
    """Return the keyword arguments of result `index` of `job` that the pipeline accepts.

    Raises `UnusableInput` naming an input image that the model does not take, or lacks, and `InferenceFailed` for too
    few steps, or a part of the denoising that the pipeline does not do.
    """
    accepted = call_parameters(pipeline)
    _check_last_image(pipeline, job)
    _check_steps(pipeline, job)
    _check_parts(job, accepted)
    _check_rate(pipeline, job)
    check_lyrics(job, accepted)
    if inputs.latents is not None:
        _check_latents(pipeline, job, inputs.latents)
    arguments: dict[str, Any] = {
        "prompt": job.prompt,
        "width": job.width,
        "height": job.height,
        "num_inference_steps": job.steps,
        # Always on the CPU: the same seed gives the same noise on every device.
        "generator": torch.Generator("cpu").manual_seed(job.seed + index),
        "output_type": "pt",
        # FLUX.1 Kontext: input images have their final size, and the output gets the job's size.
        "_auto_resize": False,
        # Ideogram 4 guides by a list of its own unless there is none.
        "guidance_schedule": None,
        "max_area": job.width * job.height,
        # Calls with their own keys and values cannot share a forward; chunks of AnyFlow-FAR see others only by them.
        "use_kv_cache": type(pipeline).__name__ in NEEDS_CACHE,
        # SANA Sprint takes a time between two steps and refuses it for any other number of steps.
        "intermediate_timesteps": 1.3 if job.steps == 2 else None,
        **_guidance(job, accepted),
        **_images(type(pipeline).__name__, job, inputs),
        **_structure(pipeline, job, inputs),
        **{name: list(inputs.video) for name in VIDEOS},
        **_poses_and_faces(job, accepted, inputs),
        **beginning(pipeline, job, accepted, inputs.video),
        **_references(pipeline, job, inputs, accepted),
        **_video(job, accepted),
        **sound_arguments(pipeline, job, inputs),
        **_controls(pipeline, job, inputs),
        **_call_fields(job),
        **_listed_steps(pipeline, job, accepted),
        **extra_arguments(pipeline, job),
        **camera_arguments(job, accepted),
    }
    if type(pipeline).__name__ in NEEDS_NEGATIVE:
        arguments.setdefault("negative_prompt", "")
    if job.layers:
        resolution = min(LAYERED_SIDES, key=lambda side: abs(side * side - job.width * job.height))
        arguments |= {"layers": job.layers, "resolution": resolution}
    if _has_fixed_steps(pipeline):
        accepted = {
            name: item for name, item in accepted.items() if name not in ("num_inference_steps", "guidance_scale")
        }
    if not inputs.video:
        accepted = {name: item for name, item in accepted.items() if name not in VIDEOS}
    return {name: value for name, value in arguments.items() if name in accepted}


def _has_fixed_steps(pipeline: Pipeline) -> bool:
    """Return whether a distilled model has its steps in its index, and refuses others, and guidance."""
    return bool(getattr(pipeline, "config", {}).get("distilled_sigmas"))


def _guidance(job: Job, accepted: Parameters) -> dict[str, Any]:
    """Return guidance and negative prompt, under the pipeline's names."""
    scale = accepted.get("guidance_scale")
    if "true_cfg_scale" in accepted and (scale is None or scale.default is None):
        # Guidance by a second, negative call, which these pipelines make only with a negative prompt, even a blank.
        true_scale = job.guidance_scale if job.true_cfg_scale is None else job.true_cfg_scale
        blank = " " if true_scale > 1 else None
        negative = blank if job.negative_prompt is None else job.negative_prompt
        values: dict[str, Any] = {"true_cfg_scale": true_scale}
    else:
        negative, values = job.negative_prompt, {"guidance_scale": job.guidance_scale}
        if scale is None and "guidance_schedule" in accepted:  # the scale of each step
            values = {"guidance_schedule": [job.guidance_scale] * job.steps}
        if scale is None and "max_guidance_scale" in accepted:  # that of the last frame; it rises from 1
            values = {"max_guidance_scale": job.guidance_scale}
    if negative is not None:  # without one XL zeroes the negative embedding, as intended by its authors
        values["negative_prompt"] = negative
    if job.guidance_scale_2 is not None:
        values["guidance_scale_2"] = job.guidance_scale_2
    return values


def _listed_steps(pipeline: Pipeline, job: Job, accepted: Parameters) -> dict[str, Any]:
    """Return the steps that the job's scheduler lists, or raise `InferenceFailed` for a pipeline that takes none."""
    options = job.scheduler_options or SchedulerOptions()
    listed = {"timesteps": options.timesteps, "sigmas": options.sigmas}
    values = {name: list(values) for name, values in listed.items() if values is not None}
    for name in values:
        if name not in accepted or name not in inspect.signature(pipeline.scheduler.set_timesteps).parameters:
            message = f"scheduler: model {job.model!r} takes no {name} for {job.task.value} with this scheduler"
            raise InferenceFailed(message, param="scheduler")
    if "timesteps" in values:  # most schedulers index their tables by them
        values["timesteps"] = [int(value) if value.is_integer() else value for value in values["timesteps"]]
    return values


def _call_fields(job: Job) -> dict[str, Any]:
    """Return the values of the `CallFields` that the request set."""
    values = {name: getattr(job, name) for name in CallFields.model_fields}
    return {name: value for name, value in values.items() if value is not None}


def ignored_fields(pipeline: Pipeline, job: Job, defaults: Defaults) -> tuple[FieldWarning, ...]:
    """Return warnings about fields of `job` that the pipeline's call does not use.

    None for the model's `defaults`, which its client may not have sent.
    """
    accepted = call_parameters(pipeline)
    takes_negative = "negative_prompt" in accepted and not _is_distilled(pipeline, job, accepted)
    unsent = (None, 1.0) if job.task is Task.INPAINT else (None, 1.0, defaults.strength)
    ignored = {
        "prompt": bool(job.prompt) and "prompt" not in accepted,
        "negative_prompt": job.negative_prompt not in (None, "", defaults.negative_prompt) and not takes_negative,
        "strength": job.strength not in unsent and accepted.keys().isdisjoint(("strength", *SOUND_STRENGTHS)),
        **{name: name not in accepted for name in _call_fields(job) if name not in PARTS},
        "face_video": job.face_video is not None and "face_video" not in accepted,
        "steps": job.steps != defaults.steps and not _takes_steps(pipeline, accepted),
    }
    if (
        (job.true_cfg_scale or 0) > 1
        and job.negative_prompt is None
        and "true_cfg_scale" not in _guidance(job, accepted)
    ):
        ignored["true_cfg_scale"] = True  # the pipeline guides only away from a negative prompt
    warnings = tuple(
        FieldWarning(param=name, message=f"{name}: ignored; {_why_ignored(name, job, accepted)}")
        for name, is_ignored in ignored.items()
        if is_ignored
    )
    return (*warnings, *unused_frames(pipeline, job))


def _why_ignored(name: str, job: Job, accepted: Parameters) -> str:
    needs = {"negative_prompt": "a true_cfg_scale above 1", "true_cfg_scale": "a negative_prompt"}
    if name in needs and needs.keys() <= accepted.keys():
        return f"model {job.model!r} uses one only with {needs[name]}"
    return f"model {job.model!r} takes none for {job.task.value}"


def _takes_steps(pipeline: Pipeline, accepted: Parameters) -> bool:
    """Return whether steps are a job's to choose: not if the pipeline has a schedule of its own, as Echo does."""
    if _has_fixed_steps(pipeline):
        return False
    return "num_inference_steps" in accepted or getattr(pipeline, "scheduler", None) is not None


def rounded_sides(pipeline: Pipeline, job: Job, spec: ModelSpec) -> tuple[FieldWarning, ...]:
    """Return warnings about sides that the request chose and the pipeline rounds.

    The API refuses such sides once the model's files are known to it.
    """
    step = side_step(pipeline)
    if job.images and spec.size_like(job.task, job.images[0].width, job.images[0].height) == (job.width, job.height):
        return ()
    chosen = {"width": (job.width, spec.defaults.width), "height": (job.height, spec.defaults.height)}
    return tuple(
        FieldWarning(param=param, message=f"{param}: model {job.model!r} makes multiples of {step}, not {side}")
        for param, (side, default) in chosen.items()
        if side % step and side != default
    )


def _is_distilled(pipeline: Pipeline, job: Job, accepted: Parameters) -> bool:
    """Return whether guidance is an input of the denoiser, and a negative prompt counts only with a `true_cfg_scale`.

    Chroma's inpainting takes that and ignores it.
    """
    scale = accepted.get("true_cfg_scale")
    is_off = (job.true_cfg_scale or 1) <= 1 and "true_cfg_scale" not in _guidance(job, accepted)
    unused = scale is not None and scale.default <= 1 and is_off
    return unused and not hasattr(type(pipeline), "do_classifier_free_guidance")


def _images(pipeline: str, job: Job, inputs: InputImages) -> dict[str, Any]:
    values: dict[str, Any] = {"mask_image": inputs.mask, "last_image": inputs.last_image}
    if inputs.images:
        listed = len(inputs.images) > 1 or pipeline in LISTED_IMAGES
        values["image"] = list(inputs.images) if listed else inputs.images[0]
    if job.task is Task.UPSCALE:
        factor = UPSCALERS[pipeline]
        size = (job.width // factor, job.height // factor)
        values["image"] = ImageOps.fit(inputs.images[0], size, Image.Resampling.LANCZOS)
    if inputs.latents is not None:
        values["image"] = inputs.latents
    if job.task.has_strength and job.denoising_start is None:
        values["strength"] = effective_strength(job)
    return {name: value for name, value in values.items() if value is not None}


def _structure(pipeline: Pipeline, job: Job, inputs: InputImages) -> dict[str, Any]:
    """Return the image of structure that a result follows, cropped to the job's size: pipelines would stretch it.

    It is the image of an edit, and a control beside the image of other tasks.
    """
    if not takes_structure(pipeline):
        return {}
    if job.task is not Task.EDIT:
        pairs = zip(job.controls, inputs.controls, strict=True)
        images = [image for control, image in pairs if control.kind == "structure"]
        if not images:
            message = f"model {job.model!r} needs a control of kind structure for {job.task.value}"
            raise UnusableInput(message, param="controls")
        return {"control_image": images[0]}
    if len(inputs.images) != 1:
        raise UnusableInput(f"model {job.model!r} takes one image, not {len(inputs.images)}", param="images")
    image = inputs.structure or inputs.images[0]
    return {"control_image": ImageOps.fit(image, (job.width, job.height), Image.Resampling.LANCZOS)}


def _poses_and_faces(job: Job, accepted: Parameters, inputs: InputImages) -> dict[str, Any]:
    """Return the videos of poses and faces; poses are cropped to the job's size, as pipelines would stretch them."""
    if not accepted.keys() >= POSES_AND_FACES:
        return {}
    if not inputs.face_video:
        message = f"model {job.model!r} needs a face_video; its video is one of poses"
        raise UnusableInput(message, param="face_video")
    if job.frames < LEAST_POSES:
        raise UnusableInput(f"model {job.model!r} makes at least {LEAST_POSES} frames", param="frames")
    size = (job.width, job.height)
    poses = [ImageOps.fit(frame, size, Image.Resampling.LANCZOS) for frame in inputs.video]
    return {"pose_video": poses, "face_video": list(inputs.face_video)}


def _controls(pipeline: Pipeline, job: Job, inputs: InputImages) -> dict[str, Any]:
    """Return the control images and their settings; pipelines take lists of several controls."""
    accepted = call_parameters(pipeline)
    pairs = list(zip(job.controls, inputs.controls, strict=True))
    styles = [image for control, image in pairs if control.kind == "ip_adapter"]
    values: dict[str, Any] = {"ip_adapter_image": styles[0]} if styles else {}
    nets = [(control, image) for control, image in pairs if control.kind == "controlnet"]
    if nets:
        _check_steps_of_controls(job, accepted)
        columns: dict[str, list[Any]] = {
            "control_image" if "control_image" in accepted else "image": as_read(pipeline, [one for _, one in nets]),
            "controlnet_conditioning_scale": [control.scale for control, _ in nets],
            "adapter_conditioning_scale": [control.scale for control, _ in nets],
            "control_guidance_start": [control.start for control, _ in nets],
            "control_guidance_end": [control.end for control, _ in nets],
        }
        if modes := modes_of(pipeline):
            columns["control_mode"] = modes
        values |= {name: column if len(nets) > 1 else column[0] for name, column in columns.items()}
        values["adapter_conditioning_factor"] = nets[0][0].end
    return values


def _check_steps_of_controls(job: Job, accepted: Parameters) -> None:
    """Raise `UnusableInput` for a control of some steps only, if the pipeline applies it to all.

    T2I-Adapters of Stable Diffusion XL end together, and none begins late.
    """
    end = job.controls[0].end if "adapter_conditioning_factor" in accepted else 1.0
    parts = [at for at, control in enumerate(job.controls) if (control.start, control.end) != (0.0, end)]
    if parts and "control_guidance_start" not in accepted:
        at = parts[0]
        param = f"controls.{at}.{'start' if job.controls[at].start else 'end'}"
        message = f"controls of model {job.model!r} apply to all steps for {job.task.value}; remove start and end"
        raise UnusableInput(message, param=param)


def _check_last_image(pipeline: Pipeline, job: Job) -> None:
    taken = takes_last_image(pipeline) if job.task is Task.IMAGE_TO_VIDEO else False
    if taken is False and job.last_image is not None:
        raise UnusableInput(f"model {job.model!r} takes no last_image", param="last_image")
    if taken is True and job.last_image is None:
        raise UnusableInput(f"model {job.model!r} needs a last_image", param="last_image")


def _check_steps(pipeline: Pipeline, job: Job) -> None:
    """Raise `InferenceFailed` for one step of a schedule that is stretched to a last value: diffusers divides by 0."""
    config = getattr(getattr(pipeline, "scheduler", None), "config", {})
    if job.steps == 1 and config.get("shift_terminal"):
        raise InferenceFailed(f"steps: model {job.model!r} needs at least 2", param="steps")


def _check_parts(job: Job, accepted: Parameters) -> None:
    """Raise `InferenceFailed` for a part of the denoising that the call does not take."""
    for name in PARTS:
        if getattr(job, name) is not None and name not in accepted:
            raise InferenceFailed(f"{name}: model {job.model!r} takes none for {job.task.value}", param=name)


def check_gives_latents(pipeline: Pipeline, job: Job) -> None:
    """Raise `InferenceFailed` for a pipeline whose latents no other job takes."""
    if "denoising_end" not in call_parameters(pipeline):
        message = f"output_format: model {job.model!r} gives no latents for {job.task.value}"
        raise InferenceFailed(message, param="output_format")


def _check_latents(pipeline: Pipeline, job: Job, latents: torch.Tensor) -> None:
    """Raise `UnusableInput` for latents that are not those of the job's image, and if the pipeline takes none."""
    if "denoising_start" not in call_parameters(pipeline):
        raise UnusableInput(f"model {job.model!r} takes no latents", param="image")
    scale, channels = pipeline.vae_scale_factor, pipeline.vae.config.latent_channels
    needed = [1, channels, job.height // scale, job.width // scale]
    if list(latents.shape) != needed:
        message = f"the latents have the shape {list(latents.shape)}; model {job.model!r} needs {needed}"
        raise UnusableInput(message, param="image")


def _check_rate(pipeline: Pipeline, job: Job) -> None:
    """Raise `InferenceFailed` for a rate that the video would have without its sound, which is made for another one."""
    fps = FIXED_RATES.get(type(pipeline).__name__, job.fps)
    if job.fps != fps:
        raise InferenceFailed(f"fps: videos of model {job.model!r} have {fps}, not {job.fps}", param="fps")


def check_part_has_steps(job: Job, steps: StepCounter) -> None:
    """Raise `InferenceFailed` if the part of the denoising that a job does has had no step."""
    part = next((name for name in PARTS if getattr(job, name) is not None), None)
    if part is not None and not steps.step:
        message = f"{part}: {getattr(job, part)} leaves none of the {job.steps} steps; use more steps, or another part"
        raise InferenceFailed(message, param=part)


def _video(job: Job, accepted: Parameters) -> dict[str, Any]:
    """Return a video's frames and rate; pyramids take steps per stage, so the steps are divided among the stages."""
    values: dict[str, Any] = dict.fromkeys(FRAME_COUNTS, job.frames)
    segment = accepted.get("segment_frame_length")
    if segment is not None:  # pipelines fail at videos that are shorter than half of a segment
        values[segment.name] = min(segment.default, (job.frames - 1) // 4 * 4 + 1)
    if job.fps is not None:
        values |= dict.fromkeys(FRAME_RATES, float(job.fps))
    stages = accepted.get("pyramid_num_inference_steps_list")
    if stages is not None:
        each, rest = divmod(job.steps, len(stages.default))
        values[stages.name] = [max(1, each + (at < rest)) for at in range(len(stages.default))]
    return values


def _references(pipeline: Pipeline, job: Job, inputs: InputImages, accepted: Parameters) -> dict[str, Any]:
    """Return the video of a job as one to follow, without any noise, for pipelines that take those.

    Raises `UnusableInput` for a factor of a job that leaves nothing of it.
    """
    if not inputs.video or REFERENCES not in accepted:
        return {}
    factor = (job.extra or {}).get(_DOWNSCALE)
    most = min(job.width, job.height) // getattr(pipeline, "vae_spatial_compression_ratio", 1)
    if isinstance(factor, int) and not 1 <= factor <= most:
        raise UnusableInput(f"extra.{_DOWNSCALE}: it must be 1 to {most} for this size", param=f"extra.{_DOWNSCALE}")
    reference = import_module("diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora").LTX2ReferenceCondition
    return {REFERENCES: [reference(list(inputs.video))]}


def effective_strength(job: Job) -> float:
    """Return the job's strength, or the smallest that runs one step, if larger.

    Some pipelines round the steps down and fail without any; those of flow models round up: a strength that is larger
    by more than rounding errors makes them run two.
    """
    one_step = 1 / job.steps
    if int(job.steps * one_step) < 1:  # of 49 steps, say
        one_step = math.nextafter(one_step, 1.0)
    return max(job.strength or 0.0, one_step)


def set_guidance(pipeline: Pipeline, job: Job) -> None:
    """Set the job's guidance on the clone's guiders, for pipelines whose call takes none.

    The second of two denoisers has a guider of its own, which a job's `guidance_scale_2` sets; the others are alike.
    """
    second = job.guidance_scale if job.guidance_scale_2 is None else job.guidance_scale_2
    for name, part in vars(pipeline).items():
        if isinstance(part, BaseGuidance) and hasattr(part, "guidance_scale"):
            part.guidance_scale = second if name == "guider_2" else job.guidance_scale


@contextmanager
def inputs_refused(job: Job, steps: StepCounter) -> Iterator[None]:
    """Raise `InferenceFailed` for a `ValueError` before the first step that names an input of `extra`, and
    `UnusableInput` for any other of an edit: the pipeline refuses its images.

    FLUX.2 does so for small and for long ones. Pipelines of other tasks get images of the job's own size.
    """
    try:
        yield
    except ValueError as error:
        if steps.total:
            raise
        for name in (name for name in job.extra or {} if f"`{name}`" in str(error)):
            raise InferenceFailed(f"extra.{name}: {error}"[:500], param=f"extra.{name}") from None
        if job.task not in (Task.EDIT, Task.IMAGE_TO_MESH):
            raise
        raise UnusableInput(f"model {job.model!r} refuses the input image: {error}"[:500], param="image") from None


def make_results(
    pipeline: Pipeline, arguments: dict[str, Any], paste: Paste | None = None
) -> list[Output] | list[Audio] | list[Mesh] | list[Latents]:
    """Call the pipeline and copy its output to the host: one image, the layers of one, a video, a sound or a mesh; or
    latents.

    A flagged image is not pasted: the safety checker has made it black.
    """
    result = pipeline(**arguments)
    if isinstance(result, Mesh):
        return [result]
    if arguments.get("output_type") == LATENT:
        return [_to_latents(result.images)]
    if (sound := audio_of(pipeline, result)) is not None:
        return [sound]
    images = images_of(pipeline, arguments, result)
    if isinstance(images, torch.Tensor):
        return [Output(to_frames(images), audio=_audio(pipeline, result))]
    pixels, flagged = [to_pixels(image) for image in images], is_flagged(result)
    if paste is not None and not flagged:
        pixels = [paste(image) for image in pixels]
    return [Output(image, flagged) for image in pixels]


def _to_latents(tensor: torch.Tensor) -> Latents:
    if not bool(tensor.isfinite().all()):
        raise non_finite_error()
    values = tensor.detach().cpu().contiguous()
    return Latents(_DTYPES[values.dtype], tuple(values.shape), values.view(torch.uint8).numpy().tobytes())


def images_of(pipeline: Pipeline, arguments: dict[str, Any], result: Any) -> torch.Tensor | list[torch.Tensor]:
    """Return the images of a pipeline's output as tensors [channels, height, width], or its video as one tensor
    [frames, channels, height, width].

    The output holds tensors, arrays or PIL images. The values are 0 to 1 if the pipeline keeps to that.
    """
    frames = getattr(result, "frames", getattr(result, "video", None))
    if frames is not None:
        is_one = getattr(frames, "ndim", 5) == 4 or isinstance(frames[0], Image.Image)  # Cosmos 3, not a list of one
        video = frames if is_one else _only(pipeline, frames)
        sent = arguments.get("video")
        # Helios makes whole chunks of 33; CogVideoX decodes an even number of latents to 3 frames more than it got.
        return _stack(pipeline, video)[: arguments.get("num_frames", None if sent is None else len(sent))]
    only = _only(pipeline, getattr(result, "images", getattr(result, "image", None)))
    if isinstance(only, list) or getattr(only, "ndim", 3) == 4:
        return list(_stack(pipeline, only))  # layers
    return [_to_tensor(pipeline, only)]


def is_flagged(result: Any) -> bool:
    """Return whether the safety checker of a pipeline found anything in its only image."""
    names = ("nsfw_content_detected", "nsfw_detected", "watermark_detected")
    return any(flags and flags[0] for flags in (getattr(result, name, None) for name in names))


def _only(pipeline: Pipeline, batch: Any) -> Any:
    if not isinstance(batch, torch.Tensor | np.ndarray | list) or len(batch) != 1:
        raise InferenceFailed(f"{type(pipeline).__name__} did not return exactly one result")
    return batch[0]


def _stack(pipeline: Pipeline, images: Any) -> torch.Tensor:
    if isinstance(images, torch.Tensor | np.ndarray) and images.ndim == 4:
        return images if isinstance(images, torch.Tensor) else torch.from_numpy(images).permute(0, 3, 1, 2)
    return torch.stack([_to_tensor(pipeline, image) for image in images])


def _to_tensor(pipeline: Pipeline, image: Any) -> torch.Tensor:
    if isinstance(image, Image.Image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    if not isinstance(image, torch.Tensor | np.ndarray) or image.ndim != 3:
        raise InferenceFailed(f"{type(pipeline).__name__} returned no image")
    return image if isinstance(image, torch.Tensor) else torch.from_numpy(image).permute(2, 0, 1)


def _audio(pipeline: Pipeline, result: Any) -> Audio | None:
    audio = getattr(result, "audio", None)
    if audio is None:
        return None
    return to_audio(audio[0], int(_sampling_rate(pipeline, result)))


def _sampling_rate(pipeline: Pipeline, result: Any) -> float:
    """Return the sound's samples per second, which the output says, or the pipeline, or its vocoder."""
    for holder, name in ((result, "sampling_rate"), (pipeline, "audio_sample_rate")):
        rate: float | None = getattr(holder, name, None)
        if rate is not None:
            return rate
    return float(pipeline.vocoder.config.output_sampling_rate)


def to_pixels(image: torch.Tensor) -> Pixels:
    """Return [channels, height, width] values of 0 to 1 as uint8 [height, width, channels], in one transfer.

    Values outside become black or white.
    """
    has_nan = image.amax().isnan()  # NaN counts as the largest; isnan().any() takes ten times as long
    levels = (image.detach().float() * 255).round().clamp_(0, 255).to(torch.uint8)
    pixels: Pixels = torch.stack(levels.unbind(), dim=-1).cpu().numpy()  # a third of the time of permute().contiguous()
    if bool(has_nan):
        raise NonFiniteLatents("the decoder returned values that are not numbers")
    return pixels


def to_frames(video: torch.Tensor) -> Pixels:
    """Return [frames, 3, height, width] values of 0 to 1 as uint8 [frames, height, width, 3].

    Frame by frame, into memory that the encoder's process shares, so that a video is in memory once.
    """
    first = to_pixels(video[0])
    pixels: Pixels = shared_array((len(video), *first.shape), first.dtype)
    pixels[0] = first
    for at in range(1, len(video)):
        pixels[at] = to_pixels(video[at])
    return pixels


def non_finite_error() -> JobError:
    return NonFiniteLatents("denoising produced values that are not finite; try another seed, size or guidance")
