"""The engine calls each pipeline with the arguments that a user of diffusers would write."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from harness.engine import a_job, input_files
from parity.plain_calls import CALLS, UPSCALES, VIDEO_UPSCALES, arguments

from shared.config.controls import Control
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import VIDEOS, arguments_for
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.sounds import DURATIONS
from worker.engine.pipelines.task_pipelines import POSES_AND_FACES, REFERENCES, pipeline_for

EDGES, DEPTH = Control(id="edges", scale=0.7, start=0.1, end=0.8), Control(id="depth", scale=0.4)
STYLE = Control(id="style", kind="ip_adapter", scale=0.5)
OUTLINE = Control(id="outline", kind="structure")
SCALES = ("controlnet_conditioning_scale", "adapter_conditioning_scale")
JOBS: tuple[Mapping[str, Any], ...] = (
    {"steps": 2, "controls": (EDGES, DEPTH)},
    {"steps": 4, "strength": 0.25, "guidance_scale": 1.0, "negative_prompt": "rain"},
    {"steps": 8, "strength": 0.9, "guidance_scale": 6.5, "negative_prompt": "rain", "width": 96, "height": 48},
    {"steps": 5, "strength": 0.2, "guidance_scale": 0.0},
)
# What the engine adds: with a cache of keys and values of their own, calls share no forward.
_NO_CACHE = {"use_kv_cache": False}
ADDED = {
    "QwenImage21Pipeline": _NO_CACHE,
    "QwenImage21ModularPipeline": _NO_CACHE,
    "QwenImage21TurboModularPipeline": _NO_CACHE,
    "AnyFlowFARPipeline": {"use_kv_cache": True},
}
# What a call takes and does nothing with.
WITHOUT_EFFECT = {"Cosmos3DistilledModularPipeline": ("guidance_scale", "num_inference_steps")}


@pytest.mark.parametrize("name", CALLS)
def test_a_pipeline_is_called_like_in_plain_diffusers(name: str) -> None:
    """Also the values, among them the strength and the pixels of images."""
    for fields in JOBS:
        job = job_of(name, set(CALLS[name].split()), fields)
        pipeline = without_parts(getattr(diffusers, name), job.task)
        made = arguments_for(pipeline, job, 1, decode_inputs(job, input_files(job)))
        made = {name_of: value for name_of, value in made.items() if name_of not in WITHOUT_EFFECT.get(name, ())}
        assert comparable(made) == comparable(arguments(pipeline, job, 1) | ADDED.get(name, {}))


def without_parts(pipeline_class: Any, task: Task) -> Any:
    """Return the pipeline of a task, of parts that do nothing."""
    if issubclass(pipeline_class, diffusers.ModularPipeline):
        pipeline = pipeline_class()
        vars(pipeline).update({part: SimpleNamespace(config={}) for part in pipeline.pretrained_component_names})
        if "enable_safety_checker" in pipeline.config:  # its part is in no index
            pipeline.register_to_config(enable_safety_checker=False)
        return pipeline_for(task, pipeline)
    pipeline = object.__new__(pipeline_class)
    pipeline.register_to_config()
    if task.makes_audio:
        vars(pipeline)["vae"] = SimpleNamespace(config=SimpleNamespace(sampling_rate=8000, audio_channels=2))
    return pipeline


def job_of(name: str, taken: set[str], fields: Mapping[str, Any]) -> Job:
    """Return a job of the task of a pipeline that takes these arguments."""
    own: dict[str, Any] = {"layers": 2 if "layers" in taken else 0, "strength": 1.0, "controls": (EDGES,), **fields}
    controlled, image = not taken.isdisjoint(SCALES), "image" in taken
    if controlled and "control_guidance_start" not in taken:
        end = 0.8 if "adapter_conditioning_factor" in taken else 1.0
        own["controls"] = tuple(Control(id=one.id, scale=one.scale, end=end) for one in own["controls"])
    if not controlled:
        own["controls"] = (STYLE,) if "ip_adapter_image" in taken else ()
        if {"image", "control_image"} <= taken:
            own["controls"] = (OUTLINE,)
    if "strength" in taken:
        task = Task.INPAINT if "mask_image" in taken else Task.IMAGE_TO_IMAGE
    else:
        own["strength"] = None
        task = Task.EDIT if (image or "control_image" in taken) and not controlled else Task.TEXT_TO_IMAGE
    if name in UPSCALES:
        task = Task.UPSCALE
    if taken & {"num_frames", "frames", "video_length"}:
        task = Task.IMAGE_TO_VIDEO if image else Task.TEXT_TO_VIDEO
        own |= {"frames": 9, "fps": 24}
    if not taken.isdisjoint({*VIDEOS, *POSES_AND_FACES, REFERENCES}):
        task = Task.EXTEND_VIDEO if "mask" in taken else Task.ANIMATE if image else Task.VIDEO_TO_VIDEO
        task = Task.UPSCALE_VIDEO if name in VIDEO_UPSCALES else task
        own |= {"frames": 9, "fps": 24}
    if not taken.isdisjoint(DURATIONS):
        return a_job("x", **sound_fields(taken, own))
    return a_job("x", **{**own, "task": task})


def sound_fields(taken: set[str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a job of the task of a pipeline of sounds, the one that takes most."""
    starts = not taken.isdisjoint(("audio", "initial_audio_waveforms"))
    repaints = not taken.isdisjoint(("mask_start_seconds", "repainting_start"))
    task = Task.AUDIO_INPAINT if repaints else Task.AUDIO_TO_AUDIO if starts else Task.TEXT_TO_AUDIO
    sung = {"lyrics": "la la"} if "audio_duration" in taken else {}
    more = {"strength": own["strength"] or 0.5, "repaint_start_s": 0.5 if repaints else None}
    return {**own, **more, **sung, "controls": (), "width": 0, "height": 0, "task": task}


def comparable(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, the seed for its generator, and no type of its output."""
    samples = {name: value.tolist() for name, value in call.items() if isinstance(value, torch.Tensor)}
    return {**call, **samples, "generator": call["generator"].initial_seed(), "output_type": None}
