"""From a job to the arguments of the pipeline's call for one result."""

import inspect
import math
from importlib import import_module
from typing import Any

import torch
from diffusers.guiders.guider_utils import BaseGuidance
from PIL import Image, ImageOps

from shared.architectures.registry import LISTED_IMAGES
from shared.config.scheduler_choices import SchedulerOptions
from shared.errors import InferenceFailed, UnusableInput
from shared.job import Job
from shared.job_fields import CallFields
from shared.tasks import Task
from worker.engine.pipelines.call_checks import (
    check_last_image,
    check_latents,
    check_parts,
    check_rate,
    check_steps,
    check_steps_of_controls,
)
from worker.engine.pipelines.camera import camera_arguments
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.control_nets import as_read, modes_of
from worker.engine.pipelines.extending import beginning
from worker.engine.pipelines.extra_inputs import extra_arguments
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.sounds import check_lyrics, sound_arguments
from worker.engine.pipelines.task_pipelines import (
    FRAME_COUNTS,
    POSES_AND_FACES,
    REFERENCES,
    Parameters,
    call_parameters,
    takes_structure,
)
from worker.engine.pipelines.upscaling import enlarged_video, source_size

NEEDS_CACHE = ("AnyFlowFARPipeline",)
NEEDS_NEGATIVE = ("EasyAnimatePipeline",)  # with guidance it fails without one
LAYERED_SIDES = (640, 1024)  # sides of the squares whose areas Qwen-Image-Layered supports

FRAME_RATES = ("frame_rate", "fps")  # pipelines name it differently
VIDEOS = ("video", "driving_video", "controls")
_DOWNSCALE = "reference_downscale_factor"
LEAST_POSES = 2  # segments of one frame have none but that of the segment before


def arguments_for(pipeline: Pipeline, job: Job, index: int, inputs: InputImages) -> dict[str, Any]:
    """Return the keyword arguments of result `index` of `job` that the pipeline accepts.

    Raises `UnusableInput` naming an input image that the model does not take, or lacks, and `InferenceFailed` for too
    few steps, or a part of the denoising that the pipeline does not do.
    """
    accepted = call_parameters(pipeline)
    check_last_image(pipeline, job)
    check_steps(pipeline, job)
    check_parts(job, accepted)
    check_rate(pipeline, job)
    check_lyrics(job, accepted)
    if inputs.latents is not None:
        check_latents(pipeline, job, inputs.latents)
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
        **guidance(job, accepted),
        **_images(pipeline, job, inputs),
        **_structure(pipeline, job, inputs),
        **{name: list(inputs.video) for name in VIDEOS},
        **_poses_and_faces(job, accepted, inputs),
        **beginning(pipeline, job, accepted, inputs.video),
        **enlarged_video(pipeline, job, inputs.video),
        **_references(pipeline, job, inputs, accepted),
        **_video(job, accepted),
        **sound_arguments(pipeline, job, inputs),
        **_controls(pipeline, job, inputs),
        **call_fields(job),
        **_listed_steps(pipeline, job, accepted),
        **extra_arguments(pipeline, job),
        **camera_arguments(job, accepted),
    }
    if type(pipeline).__name__ in NEEDS_NEGATIVE:
        arguments.setdefault("negative_prompt", "")
    if job.layers:
        resolution = min(LAYERED_SIDES, key=lambda side: abs(side * side - job.width * job.height))
        arguments |= {"layers": job.layers, "resolution": resolution}
    if has_fixed_steps(pipeline):
        accepted = {
            name: item for name, item in accepted.items() if name not in ("num_inference_steps", "guidance_scale")
        }
    if not inputs.video:
        accepted = {name: item for name, item in accepted.items() if name not in VIDEOS}
    return {name: value for name, value in arguments.items() if name in accepted}


def has_fixed_steps(pipeline: Pipeline) -> bool:
    """Return whether a distilled model has its steps in its index, and refuses others, and guidance."""
    return bool(getattr(pipeline, "config", {}).get("distilled_sigmas"))


def guidance(job: Job, accepted: Parameters) -> dict[str, Any]:
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


def call_fields(job: Job) -> dict[str, Any]:
    """Return the values of the `CallFields` that the request set."""
    values = {name: getattr(job, name) for name in CallFields.model_fields}
    return {name: value for name, value in values.items() if value is not None}


def _images(pipeline: Pipeline, job: Job, inputs: InputImages) -> dict[str, Any]:
    values: dict[str, Any] = {"mask_image": inputs.mask, "last_image": inputs.last_image}
    if inputs.images:
        listed = len(inputs.images) > 1 or type(pipeline).__name__ in LISTED_IMAGES
        values["image"] = list(inputs.images) if listed else inputs.images[0]
    if job.task is Task.UPSCALE:
        values["image"] = ImageOps.fit(inputs.images[0], source_size(pipeline, job), Image.Resampling.LANCZOS)
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
        check_steps_of_controls(job, accepted)
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
