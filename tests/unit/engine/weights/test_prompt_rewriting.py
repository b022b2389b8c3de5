"""Blocks of modular pipelines that rewrite prompts run for jobs that ask for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from diffusers import Flux3DistilledModularPipeline, Flux3ModularPipeline
from diffusers.modular_pipelines import (
    InputParam,
    ModularPipelineBlocks,
    OutputParam,
    PipelineState,
    SequentialPipelineBlocks,
)
from diffusers.modular_pipelines.modular_pipeline_utils import ComponentSpec
from harness.engine import a_job

from shared.errors import UnusableInput
from shared.tasks import Task
from worker.engine.pipelines.extra_inputs import describe_inputs, extra_arguments
from worker.engine.pipelines.modular import modular_for, private_blocks, task_fault, task_inputs
from worker.engine.weights.prompt_rewriting import SWITCH, switch_rewriting

FLUX_3 = pytest.mark.parametrize("make", [Flux3ModularPipeline, Flux3DistilledModularPipeline])
TASKS = pytest.mark.parametrize("task", [Task.TEXT_TO_IMAGE, Task.EDIT])


class Rewriting(ModularPipelineBlocks):
    """A block that writes prompts in capitals, by a part."""

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [ComponentSpec("prompt_upsampler", object)]

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam("prompt"), InputParam("boxes", type_hint=list)]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("prompt", type_hint=str)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        block_state.prompt = components.prompt_upsampler(block_state.prompt)
        self.set_block_state(state, block_state)
        return components, state


class WithItsOwnSwitch(Rewriting):
    @property
    def inputs(self) -> list[InputParam]:
        return [*super().inputs, InputParam("enable", type_hint=bool, default=False)]


class Encoding(ModularPipelineBlocks):
    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam("prompt")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("encoded", type_hint=str)]

    def __call__(self, components: Any, state: PipelineState) -> tuple[Any, PipelineState]:
        block_state = self.get_block_state(state)
        block_state.encoded = f"<{block_state.prompt}>"
        self.set_block_state(state, block_state)
        return components, state


class Blocks(SequentialPipelineBlocks):
    block_names: ClassVar[list[str]] = ["rewrite", "encode"]
    block_classes: ClassVar[list[Any]] = [Rewriting, Encoding]


class BlocksWithTheirSwitch(SequentialPipelineBlocks):
    block_names: ClassVar[list[str]] = ["rewrite", "encode"]
    block_classes: ClassVar[list[Any]] = [WithItsOwnSwitch, Encoding]


def pipeline(blocks: Any, upsampler: Any) -> Any:
    made = SimpleNamespace(_blocks=blocks(), prompt_upsampler=upsampler)
    switch_rewriting(made)
    return made


def encoded(made: Any, **values: Any) -> Any:
    state = PipelineState()
    for name, value in values.items():
        state.set(name, value)
    private_blocks(made._blocks, None)(made, state)
    return state.get("encoded")


def test_prompts_are_rewritten_for_calls_with_the_switch_only() -> None:
    made = pipeline(Blocks, str.upper)
    assert encoded(made, prompt="a fox") == "<a fox>"
    assert encoded(made, prompt="a fox", **{SWITCH: False}) == "<a fox>"
    assert encoded(made, prompt="a fox", **{SWITCH: True}) == "<A FOX>"


def test_blocks_without_their_parts_are_removed() -> None:
    made = pipeline(Blocks, None)
    assert [item.name for item in made._blocks.inputs] == ["prompt"]
    assert encoded(made, prompt="a fox", **{SWITCH: True}) == "<a fox>"


def test_blocks_with_a_switch_of_their_own_stay() -> None:
    made = pipeline(BlocksWithTheirSwitch, str.upper)
    assert type(made._blocks) is BlocksWithTheirSwitch
    assert SWITCH not in [item.name for item in made._blocks.inputs]


def flux_3(make: Any, upsampler: Any) -> Any:
    """Return a FLUX.3 whose parts are all something."""
    made = make()
    for name in made._component_specs:
        object.__setattr__(made, name, SimpleNamespace())
    made.prompt_upsampler = made.prompt_upsampler_processor = upsampler
    switch_rewriting(made)
    return made


@FLUX_3
@TASKS
def test_flux_3_rewrites_prompts_of_jobs_that_ask_for_it(make: Any, task: Task) -> None:
    """With the upsampler in its folder; `boxes` are an input of that."""
    made = flux_3(make, SimpleNamespace())
    assert task_fault(task, made._blocks) is None
    defaults = {item.name: item.default for item in task_inputs(task, made)}
    assert (defaults[SWITCH], "boxes" in defaults) == (False, True)
    template = modular_for(task, made)
    (switch,) = (one for one in describe_inputs({task: template}) if one.name == SWITCH)
    assert (switch.type_schema, switch.default) == ({"type": "boolean"}, False)
    assert extra_arguments(template, a_job("x", task=task, extra={SWITCH: True})) == {SWITCH: True}
    chosen = {"image": True} if task is Task.EDIT else {}
    plain, rewritten = (made._blocks.get_execution_blocks(prompt=True, **chosen, **own) for own in ({}, {SWITCH: True}))
    assert len(rewritten.sub_blocks) == len(plain.sub_blocks) + 1
    assert not any(name.startswith("prompt_upsampler") for name in plain.sub_blocks)


@FLUX_3
@TASKS
def test_flux_3_without_its_upsampler_has_no_input_of_it(make: Any, task: Task) -> None:
    template = modular_for(task, flux_3(make, None))
    assert not {SWITCH, "boxes"} & {item.name for item in task_inputs(task, template)}
    with pytest.raises(UnusableInput, match="takes no such input"):
        extra_arguments(template, a_job("x", task=task, extra={SWITCH: True}))
