"""The pipelines of one model: which of diffusers' classes, built of the same modules, does which task."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import diffusers

from shared.architectures.registry import SIBLINGS, UPSCALERS
from shared.config.controls import structure_for
from shared.config.model_spec import ModelSpec
from shared.errors import ModelUnavailable
from shared.tasks import Task
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.extending import extends
from worker.engine.pipelines.modular import is_modular, modular_for
from worker.engine.pipelines.sounds import DURATIONS, does_sound

Parameters = Mapping[str, inspect.Parameter]

FRAME_COUNTS = ("num_frames", "frames", "video_length")
"""Names that pipelines give to their argument for the number of frames."""

POSES_AND_FACES = frozenset({"pose_video", "face_video"})
"""The videos of a call that animates an image, made of one video by models that workers lack."""
REFERENCES = "reference_conditions"
"""The argument of pipelines whose videos follow others, as an in-context LoRA says."""

# They import the pipelines of all families when they are first used, which takes 0.3 s and 21 MB.
_AUTOMATIC: Mapping[Task, str] = {
    Task.TEXT_TO_IMAGE: "AutoPipelineForText2Image",
    Task.IMAGE_TO_IMAGE: "AutoPipelineForImage2Image",
    Task.INPAINT: "AutoPipelineForInpainting",
}


def pipeline_for(task: Task, pipeline: Pipeline) -> Pipeline:
    """Return a pipeline of the same modules that does `task`; raises `ModelUnavailable` if there is none."""
    if is_modular(pipeline):
        return modular_for(task, pipeline)
    if supports(task, pipeline):
        return pipeline
    sibling = SIBLINGS.get((type(pipeline).__name__, task))
    try:
        if sibling is not None:
            other = rebuild(pipeline, getattr(diffusers, sibling))
        elif task in _AUTOMATIC:
            other = getattr(diffusers, _AUTOMATIC[task]).from_pipe(pipeline)
        else:
            raise ValueError("diffusers has no such class")
    except ValueError as error:
        raise ModelUnavailable(f"{type(pipeline).__name__} has no pipeline for {task.value}: {error}") from error
    if not supports(task, other):
        raise ModelUnavailable(f"{type(other).__name__} does not do {task.value}")
    return other


def supports(task: Task, pipeline: Pipeline) -> bool:
    """Return whether a pipeline's call takes the inputs of `task` and needs no others."""
    accepted = call_parameters(pipeline)
    if type(pipeline).__name__ in UPSCALERS:
        return task is (Task.UPSCALE_VIDEO if "video" in accepted else Task.UPSCALE)
    if task.upscales:
        return False
    if task.makes_audio or not accepted.keys().isdisjoint(DURATIONS):
        lacks_part = task is Task.AUDIO_TO_AUDIO and getattr(pipeline, "audio_tokenizer", True) is None  # of ACE-Step
        return does_sound(task, accepted) and not lacks_part
    if task.makes_mesh or "octree_resolution" in accepted:
        return task.makes_mesh and "octree_resolution" in accepted
    if task.takes_video or _needs_video(type(pipeline), accepted):
        return _supports_video(task, pipeline, accepted)
    if task.makes_video == accepted.keys().isdisjoint(FRAME_COUNTS):
        return False
    if takes_structure(pipeline) and "image" not in accepted:
        return task is Task.EDIT
    if task in (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO):
        return not _needs_image(type(pipeline), accepted)
    if task is Task.INPAINT:
        return "mask_image" in accepted
    with_strength = _has_strength(accepted)
    return "image" in accepted and "mask_image" not in accepted and with_strength == (task is Task.IMAGE_TO_IMAGE)


def takes_structure(pipeline: Pipeline) -> bool:
    """Return whether a call needs an image of structure (edges, depth) that is an input of the denoiser itself."""
    accepted = call_parameters(pipeline)
    return not is_modular(pipeline) and "control_image" in accepted and "controlnet_conditioning_scale" not in accepted


def check_structure(spec: ModelSpec, pipelines: Mapping[Task, Pipeline]) -> None:
    """Raise `ValueError` unless the model has a control of kind `structure` for the tasks that need one, and no others.

    An edit has its only image for it.
    """
    for task, pipeline in pipelines.items():
        declared = structure_for(task, spec.control) is not None
        if declared != (takes_structure(pipeline) and task is not Task.EDIT):
            what = "takes no control" if declared else "needs a control"
            raise ValueError(f"{type(pipeline).__name__} {what} of kind structure for {task.value}")


def _supports_video(task: Task, pipeline: Pipeline, accepted: Parameters) -> bool:
    if REFERENCES in accepted:  # with conditions too, which a sibling class takes
        return task is Task.VIDEO_TO_VIDEO
    if task is Task.EXTEND_VIDEO:
        return extends(accepted)
    if task is Task.ANIMATE:
        return "image" in accepted and ("driving_video" in accepted or accepted.keys() >= POSES_AND_FACES)
    return task is Task.VIDEO_TO_VIDEO and _needs_video(type(pipeline), accepted) and not _others_needed(accepted)


def _needs_video(pipeline_class: type[Any], accepted: Parameters) -> bool:
    """Return whether a call without a video fails. For some pipelines a video with default None is optional."""
    video = accepted.get("video")
    by_name = "VideoToVideo" in pipeline_class.__name__
    other = not accepted.keys().isdisjoint(("pose_video", "controls"))
    return other or (video is not None and (video.default is inspect.Parameter.empty or by_name))


def _others_needed(accepted: Parameters) -> bool:
    needed = {name for name, item in accepted.items() if item.default is inspect.Parameter.empty}
    given = {"self", "prompt", "video", "controls"}
    return not needed <= given or "overlap_history" in accepted  # it continues the video


def takes_last_image(pipeline: Pipeline) -> bool | None:
    """Return whether a video pipeline takes a last image: False if not, True if it needs one, None if it can."""
    config, denoiser = (getattr(item, "config", None) for item in (pipeline, getattr(pipeline, "transformer", None)))
    if "last_image" not in call_parameters(pipeline) or getattr(config, "expand_timesteps", False):
        return False
    if getattr(denoiser, "image_dim", None) is None:  # images enter as latents only, and one can be missing
        return None
    return getattr(denoiser, "pos_embed_seq_len", None) is not None


def _needs_image(pipeline_class: type[Any], accepted: Parameters) -> bool:
    """Return whether a call without an image fails. For some pipelines an image with default None is optional."""
    image = accepted.get("image")
    if image is None:
        return False
    by_name = "ImageToVideo" in pipeline_class.__name__ or "Edit" in pipeline_class.__name__
    required = image.default is inspect.Parameter.empty or by_name or "layers" in accepted
    return required or _has_strength(accepted) or "mask_image" in accepted


def _has_strength(accepted: Parameters) -> bool:
    """Return whether a call starts from a noised image; LTX has a strength of its first frame beside that."""
    return "strength" in accepted and "denoise_strength" not in accepted


def rebuild(pipeline: Pipeline, other_class: Pipeline, **more: Any) -> Pipeline:
    """Return a pipeline of another class with the same modules and settings, and `more`.

    Raises `ValueError` if some are missing. `from_pipe` would cast the modules of both.
    """
    have = {**{name: value for name, value in pipeline.config.items() if name[0] != "_"}, **pipeline.components, **more}
    needed = list(inspect.signature(other_class.__init__).parameters.values())[1:]
    missing = [item.name for item in needed if item.name not in have and item.default is inspect.Parameter.empty]
    if missing:
        raise ValueError(f"{other_class.__name__} also needs {', '.join(missing)}")
    return other_class(**{item.name: have[item.name] for item in needed if item.name in have})


def call_parameters(pipeline: Pipeline) -> Parameters:
    return _parameters(pipeline.__class__)


@cache
def _parameters(pipeline_class: Any) -> Parameters:
    return inspect.signature(pipeline_class.__call__).parameters
