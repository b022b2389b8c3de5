"""Each picture has a pipeline of its own where its call changes something, and shares all else."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers import AdaptiveProjectedGuidance, ClassifierFreeGuidance, DDIMScheduler, PerturbedAttentionGuidance
from diffusers.loaders import TextualInversionLoaderMixin
from harness.engine import a_job

from worker.engine.pipelines.call_arguments import set_guidance
from worker.engine.pipelines.clones import StepCounter, cache_signatures, clone_pipeline, make_template

CPU = torch.device("cpu")


class Guided:
    """A pipeline whose guidance is told to its guider, as HunyuanVideo 1.5's."""

    def __init__(self, guider: Any) -> None:
        self.guider = guider
        self.scheduler = DDIMScheduler()
        self.transformer = torch.nn.Linear(2, 2)


class Tokenizer:
    """Tells words apart, knows those that it has learned, and remembers what it was asked to split."""

    def __init__(self, learned: list[str]) -> None:
        self.added_tokens_encoder = {token: at for at, token in enumerate(learned)}
        self.split: list[str] = []

    def tokenize(self, prompt: str) -> list[str]:
        self.split.append(prompt)
        return prompt.split()


class Worded(TextualInversionLoaderMixin):
    """A pipeline whose tokenizer may have learned tokens."""

    def __init__(self, learned: list[str]) -> None:
        self.tokenizer = Tokenizer(learned)
        self.scheduler = DDIMScheduler()
        self.components = {"tokenizer": self.tokenizer, "tokenizer_2": None, "scheduler": self.scheduler}


def a_copy(pipeline: Guided | Worded) -> Any:
    return clone_pipeline(make_template(pipeline, {}, CPU), pipeline.scheduler, StepCounter(lambda: None))


def test_each_picture_is_guided_by_its_own_job() -> None:
    """A guider counts steps and keeps what it was told: two pictures at one would guide each other."""
    pipeline = Guided(ClassifierFreeGuidance(guidance_scale=6.0))
    one, other = a_copy(pipeline), a_copy(pipeline)
    set_guidance(one, a_job("one", guidance_scale=2.5))
    one.guider.set_state(step=3, num_inference_steps=4, timestep=torch.tensor(7))
    assert [copied.guider.guidance_scale for copied in (one, other)] == [2.5, 6.0]
    assert (one.guider._step, other.guider._step) == (3, None)
    assert pipeline.guider.guidance_scale == 6.0
    assert one.transformer is other.transformer


def test_a_copied_schedulers_tensors_are_its_own() -> None:
    """What a step changes, also in place, stays with its picture; what were one tensor are one in the copy too."""
    pipeline = Guided(None)
    pipeline.scheduler.same = pipeline.scheduler.alphas_cumprod
    before = pipeline.scheduler.alphas_cumprod.clone()
    scheduler = a_copy(pipeline).scheduler
    scheduler.alphas_cumprod += 1
    assert torch.equal(pipeline.scheduler.alphas_cumprod, before)
    assert torch.equal(scheduler.same, before + 1)
    assert scheduler.config is pipeline.scheduler.config


def test_a_guider_that_leaves_the_denoiser_alone_is_taken() -> None:
    """One with a memory of its own is fine: the memory is copied."""
    assert isinstance(a_copy(Guided(AdaptiveProjectedGuidance())).guider, AdaptiveProjectedGuidance)


def test_a_guider_that_changes_the_denoiser_is_refused() -> None:
    """It would hang its hooks on the module while its picture is parked, and change the neighbours' pictures."""
    with pytest.raises(ValueError, match="PerturbedAttentionGuidance, changes the denoiser"):
        make_template(Guided(PerturbedAttentionGuidance(perturbed_guidance_layers=[0])), {}, CPU)


def test_signatures_of_attention_processors_are_at_hand() -> None:
    """The same signature as before, not worked out again; calls are the class's, and modules without one are let be."""

    class Processor:
        def __call__(self, attn: Any, hidden_states: Any, scale: float = 1.0) -> Any:
            return attn, hidden_states, scale

    processor = Processor()
    before = inspect.signature(processor.__call__)
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module[0].processor = processor  # type: ignore[assignment]
    cache_signatures(module)
    cache_signatures(module)
    assert inspect.signature(processor.__call__) == before
    assert inspect.signature(processor.__call__) is inspect.signature(processor.__call__)
    assert processor(1, 2, scale=3.0) == processor.__call__(1, 2, scale=3.0) == (1, 2, 3.0)


@pytest.mark.parametrize(
    ("learned", "converted", "asked"),
    [
        pytest.param(["<cat>", "<cat>_1"], "a <cat> <cat>_1 on a mat", True, id="a token in two parts"),
        pytest.param(["<cat>"], "a <cat> on a mat", False, id="a token in one part"),
        pytest.param([], "a <cat> on a mat", False, id="no learned token"),
    ],
)
def test_prompts_are_searched_for_learned_tokens_only_where_these_change_them(
    learned: list[str], converted: str, asked: bool
) -> None:
    """Textual inversion spells a token of several vectors out; the pipeline does so, or need not be asked."""
    pipeline = Worded(learned)
    picture = a_copy(pipeline)
    assert picture.maybe_convert_prompt("a <cat> on a mat", picture.tokenizer) == converted
    assert bool(pipeline.tokenizer.split) is asked
    assert pipeline.maybe_convert_prompt("a <cat> on a mat", pipeline.tokenizer) == converted, "as without the engine"
