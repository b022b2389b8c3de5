"""The forms of one model: which of diffusers' classes, made of the same modules, does which task."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import diffusers
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting, AutoPipelineForText2Image

from shared.errors import ModelUnavailable
from shared.job import Task
from worker.engine.pipelines.clones import Pipeline

_AUTOMATIC: Mapping[Task, Pipeline] = {
    Task.TEXT_TO_IMAGE: AutoPipelineForText2Image,
    Task.IMAGE_TO_IMAGE: AutoPipelineForImage2Image,
    Task.INPAINT: AutoPipelineForInpainting,
}
# Siblings that diffusers' automatic choice does not know.
_SIBLINGS: Mapping[tuple[str, Task], str] = {
    ("FluxKontextPipeline", Task.INPAINT): "FluxKontextInpaintPipeline",
    ("Flux2KleinPipeline", Task.INPAINT): "Flux2KleinInpaintPipeline",
    ("WanPipeline", Task.IMAGE_TO_VIDEO): "WanImageToVideoPipeline",
    ("WanImageToVideoPipeline", Task.TEXT_TO_VIDEO): "WanPipeline",
    ("HunyuanVideo15Pipeline", Task.IMAGE_TO_VIDEO): "HunyuanVideo15ImageToVideoPipeline",
    ("HunyuanVideo15ImageToVideoPipeline", Task.TEXT_TO_VIDEO): "HunyuanVideo15Pipeline",
    ("LTX2Pipeline", Task.IMAGE_TO_VIDEO): "LTX2ImageToVideoPipeline",
    ("LTX2ImageToVideoPipeline", Task.TEXT_TO_VIDEO): "LTX2Pipeline",
}


def pipeline_for(task: Task, pipeline: Pipeline) -> Pipeline:
    """Return a pipeline of the same modules that does `task`, or raise `ModelUnavailable`."""
    if supports(task, pipeline):
        return pipeline
    sibling = _SIBLINGS.get((type(pipeline).__name__, task))
    try:
        if sibling is not None:
            other = _remade(pipeline, getattr(diffusers, sibling))
        elif task in _AUTOMATIC:
            other = _AUTOMATIC[task].from_pipe(pipeline)
        else:
            raise ValueError("there is no other")
    except ValueError as error:
        raise ModelUnavailable(f"{type(pipeline).__name__} has no form for {task.value}: {error}") from error
    if not supports(task, other):
        raise ModelUnavailable(f"{type(other).__name__} does not do {task.value}")
    return other


def supports(task: Task, pipeline: Pipeline) -> bool:
    """Tell whether a pipeline's call takes what `task` brings, and needs nothing else."""
    accepted = call_parameters(pipeline)
    if task.makes_video != ("num_frames" in accepted):
        return False
    if task in (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO):
        return not _wants_picture(type(pipeline), accepted)
    if task is Task.INPAINT:
        return "mask_image" in accepted
    with_strength = "strength" in accepted
    return "image" in accepted and "mask_image" not in accepted and with_strength == (task is Task.IMAGE_TO_IMAGE)


def takes_last_image(pipeline: Pipeline) -> bool | None:
    """Tell whether a pipeline of videos takes the picture to end with: False if not, True if it needs it, else None."""
    own, denoiser = (getattr(part, "config", None) for part in (pipeline, getattr(pipeline, "transformer", None)))
    if "last_image" not in call_parameters(pipeline) or getattr(own, "expand_timesteps", False):
        return False
    if getattr(denoiser, "image_dim", None) is None:  # the pictures come as latents only, and one may be missing
        return None
    return getattr(denoiser, "pos_embed_seq_len", None) is not None


def _wants_picture(pipeline_class: type[Any], accepted: Mapping[str, inspect.Parameter]) -> bool:
    """Tell whether a call without a picture fails; some, whose default is None, look at one only if it is there."""
    image = accepted.get("image")
    if image is None:
        return False
    named_so = "ImageToVideo" in pipeline_class.__name__ or "Edit" in pipeline_class.__name__
    needed = image.default is inspect.Parameter.empty or named_so or "layers" in accepted
    return needed or "strength" in accepted or "mask_image" in accepted


def _remade(pipeline: Pipeline, other_class: Pipeline) -> Pipeline:
    """Return a pipeline of another class with the same modules and settings.

    Not by `from_pipe`, which casts the modules of both. Raises `ValueError` naming what is missing.
    """
    have = {**{name: value for name, value in pipeline.config.items() if name[0] != "_"}, **pipeline.components}
    needed = list(inspect.signature(other_class.__init__).parameters.values())[1:]
    lacking = [item.name for item in needed if item.name not in have and item.default is inspect.Parameter.empty]
    if lacking:
        raise ValueError(f"{other_class.__name__} also needs {', '.join(lacking)}")
    return other_class(**{item.name: have[item.name] for item in needed if item.name in have})


def call_parameters(pipeline: Pipeline) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a pipeline's call, by name."""
    return _parameters(pipeline.__class__)


@cache
def _parameters(pipeline_class: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(pipeline_class.__call__).parameters
