"""Blocks of modular pipelines that rewrite prompts: left out if their parts are not loaded, else run for jobs that ask.

FLUX.3's have no switch of their own, and would rewrite the prompt of every job.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

from diffusers.modular_pipelines import ConditionalPipelineBlocks, InputParam, ModularPipelineBlocks

from shared.config.model_index import rewrites_prompts

Pipeline = Any  # diffusers' pipelines have no types

SWITCH = "prompt_upsampling"
"""The input that turns it on, as Ideogram 4's own is named."""

_MOST_CLASSES = 256


def switch_rewriting(pipeline: Pipeline) -> None:
    """Give the blocks of a pipeline that only rewrite prompts a switch, which is off, or remove them without parts."""
    found = {name: block for name, block in pipeline._blocks.sub_blocks.items() if _only_rewrites(block)}
    loaded = {name for name, block in found.items() if _is_loaded(pipeline, block)}
    without_switch = {name for name in loaded if not any(item.type_hint is bool for item in found[name].inputs)}
    if removed := frozenset(found.keys() - loaded) | without_switch:
        blocks_class: Any = type(pipeline._blocks)
        pipeline._blocks = _changed(blocks_class, frozenset(removed - without_switch), frozenset(without_switch))()


def _only_rewrites(block: ModularPipelineBlocks) -> bool:
    parts = [part.name for part in block.expected_components]
    return bool(parts) and all(map(rewrites_prompts, parts))


def _is_loaded(pipeline: Pipeline, block: ModularPipelineBlocks) -> bool:
    return any(getattr(pipeline, part.name) is not None for part in block.expected_components)


@lru_cache(_MOST_CLASSES)
def _changed(blocks_class: Any, removed: frozenset[str], switched: frozenset[str]) -> Any:
    """Return a subclass of the blocks: their inputs are read from new instances of it."""
    own = {name: block for name, block in blocks_class().sub_blocks.items() if name not in removed}
    blocks = {name: _switched(block) if name in switched else block for name, block in own.items()}
    namespace = {"block_names": list(blocks), "block_classes": list(blocks.values()), "__module__": __name__}
    return type(blocks_class.__name__, (blocks_class,), namespace)


def _switched(block: ModularPipelineBlocks) -> ModularPipelineBlocks:
    made: ModularPipelineBlocks = type("Switched", (_Switched,), {"block_classes": [block]})()
    return made


class _Switched(ConditionalPipelineBlocks):  # type: ignore[misc]
    """Runs a block for calls with the switch only."""

    block_names: ClassVar[list[str]] = ["rewriting"]
    block_trigger_inputs: ClassVar[list[str]] = [SWITCH]

    @property
    def inputs(self) -> list[Any]:
        text = "Whether to rewrite the prompt first; other inputs of that have no effect without it."
        return [*super().inputs, InputParam(SWITCH, type_hint=bool, default=False, description=text)]

    def select_block(self, **given: Any) -> str | None:
        return "rewriting" if given.get(SWITCH) else None
