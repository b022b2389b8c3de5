"""Modular pipelines: what tasks lack, guidance, and progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import Cosmos3OmniModularPipeline, WanModularPipeline
from diffusers.modular_pipelines import InputParam, ModularPipelineBlocks, SequentialPipelineBlocks
from harness.engine import a_job
from tiny.videos.cosmos3 import distilled, omni
from tqdm.auto import tqdm

from shared.config.request_limits import Defaults
from shared.errors import ModelUnavailable
from shared.model_inputs import type_fault
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for, set_guidance
from worker.engine.pipelines.call_results import make_results
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.extra_inputs import describe_inputs, extra_arguments
from worker.engine.pipelines.ignored_fields import ignored_fields
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.modular import modular_for, private_blocks


class CountsByItself(ModularPipelineBlocks):
    """A block that counts its steps by the bar of its module, as those of Helios do."""

    @torch.no_grad()
    def __call__(self, components: Any, state: Any, first: int = 0) -> Any:
        with tqdm(total=3, disable=True) as progress_bar:
            for _ in range(first, 3):
                progress_bar.update()
        return components, torch.is_grad_enabled()


def test_steps_of_a_block_with_a_bar_of_its_module_are_counted_for_its_own_clone() -> None:
    """The module and other clones keep their bars."""
    counters = [StepCounter(lambda: None) for _ in range(2)]
    blocks = SequentialPipelineBlocks.from_blocks_dict({"denoise": CountsByItself()})
    one, other = (private_blocks(blocks, counter).sub_blocks["denoise"] for counter in counters)
    assert one(None, None)[1] is False
    assert (counters[0].step, counters[0].total) == (3, 3)
    assert (counters[1].step, counters[1].total) == (0, 0)
    other(None, None, first=1)
    blocks.sub_blocks["denoise"](None, None)
    assert [(counter.step, counter.total) for counter in counters] == [(3, 3), (2, 3)]


@pytest.mark.parametrize(("second", "expected"), [(None, [7.0, 7.0, 7.0]), (2.0, [7.0, 2.0, 7.0])])
def test_all_guiders_have_the_guidance_of_the_job(second: float | None, expected: list[float]) -> None:
    """Only that of the second denoiser has its own."""
    guider = WanModularPipeline().guider
    pipeline = SimpleNamespace(guider=guider.new(), guider_2=guider.new(), audio_guider=guider.new())
    set_guidance(pipeline, a_job("x", guidance_scale=7.0, guidance_scale_2=second))
    assert [part.guidance_scale for part in vars(pipeline).values()] == expected


def test_missing_parts_are_named() -> None:
    """Denoiser and text encoder of a folder without weights."""
    with pytest.raises(ModelUnavailable, match="needs text_encoder, tokenizer, transformer, scheduler, vae for"):
        modular_for(Task.TEXT_TO_VIDEO, WanModularPipeline())


def test_a_safety_checker_that_is_asked_for_is_not_left_out() -> None:
    """The folder says whether it is needed."""
    pipeline = omni()
    modular_for(Task.TEXT_TO_VIDEO, pipeline)
    pipeline.update_components(enable_safety_checker=True)
    assert isinstance(pipeline, Cosmos3OmniModularPipeline)
    with pytest.raises(ModelUnavailable, match=r"needs safety_checker .* enable_safety_checker"):
        modular_for(Task.TEXT_TO_VIDEO, pipeline)


class OneVideo:
    """A pipeline that returns one video, not a list of one, with sound and its rate."""

    vocoder = SimpleNamespace(config=SimpleNamespace(output_sampling_rate=48000))

    def __init__(self, **rate: int) -> None:
        self.rate = rate

    def __call__(self, prompt: str = "") -> Any:
        return SimpleNamespace(frames=torch.zeros(5, 3, 8, 8), audio=torch.zeros(1, 2, 16), **self.rate)


@pytest.mark.parametrize(
    ("rate", "own", "expected"),
    [({"sampling_rate": 32000}, 16000, 32000), ({}, 16000, 16000), ({}, None, 48000)],
)
def test_sound_has_the_rate_of_the_result_or_pipeline_or_vocoder(
    rate: dict[str, int], own: int | None, expected: int
) -> None:
    pipeline = OneVideo(**rate)
    if own is not None:
        vars(pipeline)["audio_sample_rate"] = own
    (output,) = make_results(pipeline, {})
    assert output.pixels.shape == (5, 8, 8, 3)
    assert output.audio is not None
    assert (output.audio.samples.shape, output.audio.rate) == ((2, 16), expected)


@pytest.mark.parametrize(("steps", "warned"), [(4, False), (5, True)])
def test_steps_of_a_pipeline_with_a_schedule_of_its_own_are_warned_about(steps: int, warned: bool) -> None:
    """Unless they are the model's default."""
    warnings = ignored_fields(OneVideo(), a_job("x", steps=steps), Defaults(width=64, height=64, steps=4))
    assert ["steps" in warning.param for warning in warnings] == [True] * warned


def test_a_distilled_model_makes_the_steps_of_its_index() -> None:
    """It refuses others, and guidance; the rate of a video has its own name there."""
    pipeline = modular_for(Task.TEXT_TO_VIDEO, distilled())
    job = a_job("x", task=Task.TEXT_TO_VIDEO, steps=7, guidance_scale=5.0, frames=9, fps=30)
    arguments = arguments_for(pipeline, job, 0, InputImages())
    assert {"num_inference_steps", "guidance_scale"}.isdisjoint(arguments)
    assert (arguments["fps"], arguments["num_frames"]) == (30.0, 9)
    assert [warning.param for warning in ignored_fields(pipeline, job, Defaults(width=64, height=64, steps=4))] == [
        "steps"
    ]


def test_denoisers_get_a_negative_embedding_without_guidance() -> None:
    """diffusers' Wan, LTX and HunyuanVideo 1.5 fail otherwise."""
    pipeline = WanModularPipeline()
    parts = dict.fromkeys(pipeline.pretrained_component_names, SimpleNamespace())
    vars(pipeline).update(parts, guider=pipeline.guider.new(guidance_scale=1.0))
    assert not pipeline.requires_unconditional_embeds
    assert modular_for(Task.TEXT_TO_VIDEO, pipeline).requires_unconditional_embeds


class LayersBlock(ModularPipelineBlocks):
    """Declares its type as diffusers does: any number of layers."""

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam("out_layers", type_hint=tuple[int], default=(1, 2))]

    def __call__(self, components: Any, state: Any) -> Any:
        return components, state


def test_a_tuple_of_one_type_is_a_list_of_any_length() -> None:
    pipeline = SequentialPipelineBlocks.from_blocks_dict({"layers": LayersBlock}).init_pipeline()
    (described,) = describe_inputs({Task.TEXT_TO_IMAGE: pipeline})
    assert (described.default, type_fault(described, [3, 4, 5])) == ([1, 2], None)
    assert type_fault(described, [3, "x"]) == "[1]: 'x' is not of type 'integer'"
    job = a_job("one", extra={"out_layers": [3, 4, 5]})
    assert extra_arguments(pipeline, job) == {"out_layers": (3, 4, 5)}
