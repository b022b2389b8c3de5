"""From a job to the pipeline call that makes one of its pictures, and from that call's result to pixels."""

from __future__ import annotations

import inspect
import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForText2Image
from PIL import Image, ImageOps

from shared.errors import InferenceFailed, JobError, ModelUnavailable, NonFiniteLatents
from shared.job import Job, Task
from worker.engine.copies import Pipeline
from worker.engine.interface import Pixels


@dataclass(frozen=True)
class Made:
    """A finished picture."""

    pixels: Pixels
    flagged: bool


def pipeline_for(task: Task, pipeline: Pipeline) -> Pipeline:
    """Return a pipeline of the same modules that does `task`, or raise `ModelUnavailable`."""
    from_picture = "image" in _accepted(pipeline.__class__)
    if task is Task.IMAGE_TO_IMAGE:
        fits, others = from_picture, AutoPipelineForImage2Image
    else:  # some take a picture where they are given one; those with a strength need it
        fits, others = not (from_picture and "strength" in _accepted(pipeline.__class__)), AutoPipelineForText2Image
    if fits:
        return pipeline
    try:
        return others.from_pipe(pipeline)
    except ValueError as error:
        raise ModelUnavailable(f"{type(pipeline).__name__} has no form for {task.value}: {error}") from error


def arguments_for(pipeline: Pipeline, job: Job, index: int, image: Image.Image | None) -> dict[str, Any]:
    """Return the keyword arguments that make picture `index` of `job`, as far as the pipeline takes them."""
    wanted: dict[str, Any] = {
        "prompt": job.prompt,
        "width": job.width,
        "height": job.height,
        "num_inference_steps": job.steps,
        "guidance_scale": job.guidance_scale,
        # On the CPU whatever the device: the same seed gives the same noise everywhere.
        "generator": torch.Generator("cpu").manual_seed(job.seed + index),
        "output_type": "pt",
    }
    if job.negative_prompt:  # an empty one is not given: XL then zeroes its embedding, as its makers meant
        wanted["negative_prompt"] = job.negative_prompt
    if image is not None:
        wanted["image"] = image
        wanted["strength"] = least_strength(job)
    accepted = _accepted(pipeline.__class__)
    return {name: value for name, value in wanted.items() if name in accepted}


def least_strength(job: Job) -> float:
    """Return the job's strength, raised so far that at least one of its steps is done."""
    return min(1.0, max(job.strength or 0.0, (1 + 1e-6) / job.steps))


@cache
def _accepted(pipeline_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(pipeline_class.__call__).parameters)


def scheduler_named(name: str, own: Any) -> Any:
    """Return a scheduler of diffusers' class `name`, configured as the model's own one."""
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
        raise ModelUnavailable(f"diffusers has no scheduler {name!r}")
    scheduler_class: Any = found
    return scheduler_class.from_config(own.config)


def fit_picture(data: bytes, width: int, height: int) -> Image.Image:
    """Decode an input picture, upright and without transparency, scaled to cover `width` x `height` and cropped."""
    try:
        with Image.open(io.BytesIO(data)) as opened:
            upright = ImageOps.exif_transpose(opened)
            if upright.has_transparency_data:
                clear = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
            return ImageOps.fit(upright.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InferenceFailed(f"the input picture cannot be decoded: {error}", param="image") from error


def make_picture(pipeline: Pipeline, arguments: dict[str, Any]) -> Made:
    """Call the pipeline and bring its one picture to the host."""
    result = pipeline(**arguments)
    images = result.images
    if not (isinstance(images, torch.Tensor) and images.ndim == 4 and images.shape[0] == 1):
        raise InferenceFailed(f"{type(pipeline).__name__} did not give one picture")
    flags = getattr(result, "nsfw_content_detected", None)
    return Made(to_pixels(images[0]), bool(flags and flags[0]))


def to_pixels(image: torch.Tensor) -> Pixels:
    """Return [3, height, width] values of 0 to 1 as uint8 [height, width, 3], in one transfer."""
    broken = image.isnan().any()
    levels = (image.detach().float() * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
    pixels: Pixels = levels.cpu().numpy()
    if bool(broken):
        raise NonFiniteLatents("the decoder gave values that are not numbers")
    return pixels


def non_finite() -> JobError:
    """Return the error of a job whose latents are not numbers any more."""
    return NonFiniteLatents("denoising gave values that are not finite; try another seed, size or guidance")
