"""From a job to the pipeline call that makes one of its results, and from what that gives to pixels and sound."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch

from shared.errors import InferenceFailed, JobError, ModelUnavailable, NonFiniteLatents
from shared.job import Job, Task
from worker.engine.channel import shared_array
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.task_pipelines import call_parameters, takes_last_image
from worker.engine.protocol import Audio, Output, Pixels

ALWAYS_LISTED = ("GlmImagePipeline",)  # takes a list of pictures even where it is one
LAYERED_SIDES = (640, 1024)  # the sizes, as the sides of squares, at which Qwen-Image-Layered works


def arguments_for(pipeline: Pipeline, job: Job, index: int, inputs: InputImages) -> dict[str, Any]:
    """Return the keyword arguments that make result `index` of `job`, as far as the pipeline takes them.

    Raises `InferenceFailed` that names an input picture which the model does not take, or lacks.
    """
    accepted = call_parameters(pipeline)
    _check_last_image(pipeline, job)
    wanted: dict[str, Any] = {
        "prompt": job.prompt,
        "width": job.width,
        "height": job.height,
        "num_inference_steps": job.steps,
        # On the CPU whatever the device: the same seed gives the same noise everywhere.
        "generator": torch.Generator("cpu").manual_seed(job.seed + index),
        "output_type": "pt",
        # Of FLUX.1 Kontext: pictures have their size already, and the output is to have the job's.
        "_auto_resize": False,
        "max_area": job.width * job.height,
        # Kept keys and values belong to one call: with them no two would share a forward.
        "use_kv_cache": False,
        # Of SANA Sprint, which takes a time between two steps and refuses it for any other number of them.
        "intermediate_timesteps": 1.3 if job.steps == 2 else None,
        **_guided(job, accepted),
        **_pictured(type(pipeline).__name__, job, inputs),
        **_of_time(job, accepted),
    }
    if job.layers:
        wanted |= {"layers": job.layers, "resolution": _nearest(LAYERED_SIDES, job.width * job.height)}
    return {name: value for name, value in wanted.items() if name in accepted}


def _guided(job: Job, accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return guidance and the negative prompt, under the names that the pipeline has for them."""
    scale = accepted.get("guidance_scale")
    if "true_cfg_scale" in accepted and (scale is None or scale.default is None):
        # Guided by a second, negative call, which these make only if there is a negative prompt, be it a blank.
        negative = job.negative_prompt or (" " if job.guidance_scale > 1 else "")
        values: dict[str, Any] = {"true_cfg_scale": job.guidance_scale}
    else:
        negative, values = job.negative_prompt, {"guidance_scale": job.guidance_scale}
    if negative:  # an empty one is not given: XL then zeroes its embedding, as its makers meant
        values["negative_prompt"] = negative
    if job.guidance_scale_2 is not None:
        values["guidance_scale_2"] = job.guidance_scale_2
    return values


def _pictured(pipeline: str, job: Job, inputs: InputImages) -> dict[str, Any]:
    values: dict[str, Any] = {"mask_image": inputs.mask, "last_image": inputs.last_image}
    if inputs.images:
        listed = len(inputs.images) > 1 or pipeline in ALWAYS_LISTED
        values["image"] = list(inputs.images) if listed else inputs.images[0]
    if job.task.has_strength:
        values["strength"] = least_strength(job)
    return {name: value for name, value in values.items() if value is not None}


def _check_last_image(pipeline: Pipeline, job: Job) -> None:
    taken = takes_last_image(pipeline) if job.task is Task.IMAGE_TO_VIDEO else False
    if taken is False and job.last_image is not None:
        raise InferenceFailed(f"model {job.model!r} takes no last_image", param="last_image")
    if taken is True and job.last_image is None:
        raise InferenceFailed(f"model {job.model!r} needs a last_image", param="last_image")


def _of_time(job: Job, accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return a video's length and pace; where steps are told for each stage of a pyramid, they are dealt out."""
    values: dict[str, Any] = {"num_frames": job.frames}
    if job.fps is not None:
        values["frame_rate"] = float(job.fps)
    stages = accepted.get("pyramid_num_inference_steps_list")
    if stages is not None:
        each, more = divmod(job.steps, len(stages.default))
        values[stages.name] = [max(1, each + (at < more)) for at in range(len(stages.default))]
    return values


def _nearest(sides: Sequence[int], area: int) -> int:
    return min(sides, key=lambda side: abs(side * side - area))


def least_strength(job: Job) -> float:
    """Return the job's strength, raised so far that at least one of its steps is done."""
    return min(1.0, max(job.strength or 0.0, (1 + 1e-6) / job.steps))


def set_guidance(pipeline: Pipeline, job: Job) -> None:
    """Set the job's guidance on the pipeline's guider, its own copy, where a call takes none."""
    guider = getattr(pipeline, "guider", None)
    if guider is not None and hasattr(guider, "guidance_scale"):
        guider.guidance_scale = job.guidance_scale


def make_scheduler(name: str, own: Any) -> Any:
    """Return a scheduler of diffusers' class `name`, configured as the model's own one."""
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise ModelUnavailable(f"diffusers has no scheduler {name!r}")
    scheduler_class: Any = found
    return scheduler_class.from_config(own.config)


def make_results(pipeline: Pipeline, arguments: dict[str, Any]) -> list[Output]:
    """Call the pipeline and bring what it made to the host: one picture, the layers of one, or a video."""
    result = pipeline(**arguments)
    frames = getattr(result, "frames", None)
    if frames is not None:
        video = _only(pipeline, frames, 5)[: arguments.get("num_frames")]  # Helios makes whole chunks of 33
        return [Output(to_frames(video), sound=_sound(pipeline, result))]
    images = result.images
    if isinstance(images, list) and len(images) == 1:  # layers
        return [Output(to_pixels(layer)) for layer in images[0]]
    flags = getattr(result, "nsfw_content_detected", None)
    return [Output(to_pixels(_only(pipeline, images, 4)), bool(flags and flags[0]))]


def _only(pipeline: Pipeline, batch: Any, dimensions: int) -> torch.Tensor:
    if not (isinstance(batch, torch.Tensor) and batch.ndim == dimensions and batch.shape[0] == 1):
        raise InferenceFailed(f"{type(pipeline).__name__} did not give one result")
    return batch[0]


def _sound(pipeline: Pipeline, result: Any) -> Audio | None:
    audio = getattr(result, "audio", None)
    if audio is None:
        return None
    samples = audio[0].detach().float().cpu()
    if not bool(samples.isfinite().all()):
        raise NonFiniteLatents("the vocoder gave values that are not finite")
    samples = samples.reshape(-1, samples.shape[-1]).clamp(-1, 1)
    return Audio(samples.numpy(), int(pipeline.vocoder.config.output_sampling_rate))


def to_pixels(image: torch.Tensor) -> Pixels:
    """Return [channels, height, width] values of 0 to 1 as uint8 [height, width, channels], in one transfer."""
    broken = image.amax().isnan()  # NaN counts as the largest; isnan().any() takes ten times as long
    levels = (image.detach().float() * 255).round().to(torch.uint8)
    pixels: Pixels = torch.stack(levels.unbind(), dim=-1).cpu().numpy()  # a third of what permute().contiguous() takes
    if bool(broken):
        raise NonFiniteLatents("the decoder gave values that are not numbers")
    return pixels


def to_frames(video: torch.Tensor) -> Pixels:
    """Return [frames, 3, height, width] values of 0 to 1 as uint8 [frames, height, width, 3].

    One frame after the other, as bytes into their place, which the encoder has too, though in another process: a video
    is not held a second time.
    """
    first = to_pixels(video[0])
    pixels: Pixels = shared_array((len(video), *first.shape), first.dtype)
    pixels[0] = first
    for at in range(1, len(video)):
        pixels[at] = to_pixels(video[at])
    return pixels


def non_finite_error() -> JobError:
    """Return the error of a job whose latents are not numbers any more."""
    return NonFiniteLatents("denoising gave values that are not finite; try another seed, size or guidance")
