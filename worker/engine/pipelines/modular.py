"""Modular pipelines as the pipelines of tasks: which inputs a task gives, and a call that returns what it makes.

A modular pipeline runs the blocks that its inputs choose. It describes itself, so nothing here knows a family.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from diffusers import ModularPipeline
from diffusers.modular_pipelines import LoopSequentialPipelineBlocks, ModularPipelineBlocks

from shared.config.model_index import MODULAR, rewrites_prompts
from shared.errors import ModelUnavailable
from shared.tasks import Medium, Task
from worker.engine.weights.prompt_rewriting import SWITCH

Pipeline = Any  # diffusers' pipelines have no types

MOST_CLASSES = 256
"""Of pipelines with tasks; a process that has served more makes them again."""

_GIVEN: Mapping[Task, tuple[str, ...]] = {
    Task.TEXT_TO_IMAGE: ("prompt",),
    Task.TEXT_TO_VIDEO: ("prompt",),
    Task.IMAGE_TO_IMAGE: ("prompt", "image"),
    Task.INPAINT: ("prompt", "image", "mask_image"),
    Task.EDIT: ("prompt", "image"),
    Task.IMAGE_TO_VIDEO: ("prompt", "image"),
    Task.VIDEO_TO_VIDEO: ("prompt", "video"),
    Task.EXTEND_VIDEO: ("prompt", "video"),
    Task.ANIMATE: ("prompt", "image", "driving_video"),
    Task.TEXT_TO_AUDIO: ("prompt",),
    Task.AUDIO_TO_AUDIO: ("prompt", "audio"),
    Task.AUDIO_INPAINT: ("prompt", "audio", "mask_start_seconds"),
    Task.IMAGE_TO_MESH: ("image",),
}
_MADE: Mapping[Medium, str] = {
    Medium.IMAGE: "images",
    Medium.VIDEO: "videos",
    Medium.AUDIO: "audios",
    Medium.MESH: "meshes",
}
_IMAGES = ("image", "mask_image", "video", "driving_video")  # of the job's task
_ALSO_TAKEN = ("last_image", "callback_on_step_end")  # by blocks that the inputs of a task alone do not choose
_OUTPUTS = {
    "images": "images",
    "videos": "frames",
    "audios": "audios",
    "audio": "audio",
    "sampling_rate": "sampling_rate",
}
# Parts without which blocks run, besides all parts of blocks that rewrite prompts.
_OPTIONAL = frozenset({"duration_head", "safety_checker", "watermark"})


def is_modular(pipeline: Pipeline) -> bool:
    return isinstance(pipeline, ModularPipeline)


def modular_for(task: Task, pipeline: Pipeline) -> Pipeline:
    """Return a copy of a modular pipeline whose call takes the inputs of `task` by name and returns an output.

    Raises `ModelUnavailable` if no blocks of it do the task, or if one of their parts has not been loaded.
    """
    blocks = _blocks_for(task, pipeline)
    missing = _missing_parts(pipeline, blocks)
    if getattr(pipeline, "requires_safety_checker", False) and getattr(pipeline, "safety_checker", None) is None:
        missing.append(f"safety_checker (or false as enable_safety_checker in {MODULAR})")
    if missing:
        raise ModelUnavailable(f"{type(pipeline).__name__} needs {', '.join(missing)} for {task.value}; add the folder")
    classes: tuple[Any, Any] = (type(pipeline), type(pipeline._blocks))
    adapted = copy.copy(pipeline)
    adapted.__class__ = _class_for(*classes, task)
    return adapted


def _blocks_for(task: Task, pipeline: Pipeline) -> ModularPipelineBlocks:
    """Return the blocks that the inputs of a task choose."""
    fault = task_fault(task, pipeline._blocks)
    if fault is not None:
        raise ModelUnavailable(f"{type(pipeline).__name__} does not do {task.value}: {fault}")
    return _chosen(task, pipeline._blocks)


def task_fault(task: Task, blocks: ModularPipelineBlocks) -> str | None:
    """Return why blocks do not do a task, None if they do."""
    if task is Task.EXTEND_VIDEO:
        return "its blocks do not say whether they change a video or go on from it"
    if task.upscales:
        return "no blocks upscale an image or a video"
    lacking = [name for name in _GIVEN[task] if name not in blocks.input_names]
    if lacking:
        return f"it takes no {lacking[0]}"
    chosen = _chosen(task, blocks)
    output = _MADE[task.medium]
    if output not in [item.name for item in chosen.outputs]:
        return f"it makes no {output}"
    inputs = {item.name: item for item in chosen.inputs if item.name is not None}
    unused = [name for name in _GIVEN[task] if name not in inputs]
    if unused:
        return f"it takes no {unused[0]} with them"
    if task in (Task.IMAGE_TO_IMAGE, Task.EDIT) and ("strength" in inputs) != (task is Task.IMAGE_TO_IMAGE):
        return "its images have a strength" if task is Task.EDIT else "its images have no strength"
    needed = [name for name, item in inputs.items() if item.required and item.default is None]
    unknown = [name for name in needed if name not in (*_GIVEN[task], *_SUPPLIED)]
    return f"it needs {unknown[0]}, which jobs cannot give" if unknown else None


_SUPPLIED = (
    "width",
    "height",
    "num_frames",
    "num_inference_steps",
    "generator",
    "frame_rate",
    "negative_prompt",
    "lyrics",
)


def _chosen(task: Task, blocks: ModularPipelineBlocks) -> ModularPipelineBlocks:
    given = dict.fromkeys((*_GIVEN[task], SWITCH), True)
    return blocks.get_execution_blocks(**given, num_frames=2 if task.makes_video else 1)


def task_inputs(task: Task, pipeline: Pipeline) -> list[Any]:
    """Return the named inputs of the blocks that a task runs, and those that choose others: diffusers' `InputParam`."""
    return list(_inputs(task, pipeline._blocks).values())


def _inputs(task: Task, blocks: Any) -> dict[str, Any]:
    chosen = {item.name: item for item in _chosen(task, blocks).inputs if item.name is not None}
    choosing = blocks._get_trigger_inputs() - set(_IMAGES) if hasattr(blocks, "_get_trigger_inputs") else set()
    return {item.name: item for item in blocks.inputs if item.name in choosing} | chosen


def _missing_parts(pipeline: Pipeline, blocks: ModularPipelineBlocks) -> list[str]:
    leaves = [one for one in all_blocks(blocks) if not one.sub_blocks or isinstance(one, LoopSequentialPipelineBlocks)]
    named = [[part.name for part in leaf.expected_components] for leaf in leaves]
    needed = (name for names in named if not any(map(rewrites_prompts, names)) for name in names)
    return [name for name in dict.fromkeys(needed) if getattr(pipeline, name) is None and name not in _OPTIONAL]


@lru_cache(MOST_CLASSES)
def _class_for(base: Any, blocks_class: Any, task: Task) -> Any:
    """Return a subclass whose call has the inputs of a task as its parameters."""
    blocks = blocks_class()
    inputs = {name: item.default for name, item in _inputs(task, blocks).items()}
    inputs |= {name: None for name in _ALSO_TAKEN if name in (*blocks.input_names, "callback_on_step_end")}

    def call(self: Any, *, callback_on_step_end: Callable[..., Any] | None = None, **values: Any) -> SimpleNamespace:
        if callback_on_step_end is not None:
            for loop in _loops(self._blocks):
                loop.__dict__["loop_step"] = partial(_step_with_callback, loop, callback_on_step_end)
        state = base.__call__(self, **values)
        return SimpleNamespace(**{to: state.get(name) for name, to in _OUTPUTS.items() if state.get(name) is not None})

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=default) for name, default in inputs.items()]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    namespace: dict[str, Any] = {"__module__": base.__module__, "__call__": call}
    if task.makes_video and hasattr(base, "requires_unconditional_embeds"):
        namespace["requires_unconditional_embeds"] = True  # with a guidance of 1 they need it too (diffusers 0.42)
    return type(base.__name__, (base,), namespace)


def _step_with_callback(loop: Any, callback: Callable[..., Any], components: Any, state: Any, **at: Any) -> Any:
    components, state = type(loop).loop_step(loop, components, state, **at)
    latents: torch.Tensor | None = getattr(state, "latents", None)
    callback(components, at.get("i", 0), at.get("t"), {"latents": latents})
    return components, state


def private_blocks(blocks: ModularPipelineBlocks, progress_bar: Any) -> ModularPipelineBlocks:
    """Return a copy of a pipeline's blocks, whose loops count their steps by `progress_bar`.

    They hold nothing else that changes. Their inputs are collected once, which took 4 ms of each call of XL's.
    """
    own = _copy_blocks(blocks, progress_bar)
    blocks_class: Any = type(blocks)
    own.__class__ = _with_inputs(blocks_class)
    return own


@lru_cache(MOST_CLASSES)
def _with_inputs(blocks_class: Any) -> Any:
    return type(blocks_class.__name__, (blocks_class,), {"inputs": blocks_class().inputs})


def _copy_blocks(blocks: ModularPipelineBlocks, progress_bar: Any) -> ModularPipelineBlocks:
    own = copy.copy(blocks)
    copies = ((name, _copy_blocks(one, progress_bar)) for name, one in blocks.sub_blocks.items())
    own.sub_blocks = type(blocks.sub_blocks)(copies)
    if isinstance(own, LoopSequentialPipelineBlocks):
        own.__dict__["progress_bar"] = progress_bar
        return own
    block_class: Any = type(own)
    if "tqdm" in inspect.unwrap(block_class.__call__).__code__.co_names:
        own.__class__ = _counted(block_class)
        own.__dict__["progress_bar"] = progress_bar
    return own


@lru_cache(MOST_CLASSES)
def _counted(block_class: Any) -> Any:
    """Return a subclass of a block whose call counts its steps by `progress_bar` and not by the `tqdm` of its module.

    Helios: its inner loops are no loop blocks.
    """
    function = inspect.unwrap(block_class.__call__)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        names = {**function.__globals__, "tqdm": lambda items=None, total=None, **_: self.progress_bar(items, total)}
        own = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        return own(self, *args, **kwargs)

    namespace = {"__module__": block_class.__module__, "__call__": torch.no_grad()(call)}
    return type(block_class.__name__, (block_class,), namespace)


def all_blocks(blocks: ModularPipelineBlocks) -> Iterator[ModularPipelineBlocks]:
    yield blocks
    for one in blocks.sub_blocks.values():
        yield from all_blocks(one)


def _loops(blocks: ModularPipelineBlocks) -> Iterator[LoopSequentialPipelineBlocks]:
    return (one for one in all_blocks(blocks) if isinstance(one, LoopSequentialPipelineBlocks))
