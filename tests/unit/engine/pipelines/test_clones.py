"""Pipeline clones: what image tasks share, and what each has its own copy of."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers import (
    AdaptiveProjectedGuidance,
    ClassifierFreeGuidance,
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    PerturbedAttentionGuidance,
)
from diffusers.loaders import TextualInversionLoaderMixin
from harness.engine import a_job
from transformers import Qwen3Config, Qwen3ForCausalLM

from worker.engine.pipelines.call_arguments import set_guidance
from worker.engine.pipelines.clones import (
    StepCounter,
    cache_signatures,
    clone_pipeline,
    install_capturing_hooks,
    make_template,
)

CPU = torch.device("cpu")


class Guided:
    """A pipeline whose guider has the guidance scale, like HunyuanVideo 1.5's."""

    def __init__(self, guider: Any) -> None:
        self.guider = guider
        self.scheduler = DDIMScheduler()
        self.transformer = torch.nn.Linear(2, 2)


class WordTokenizer:
    """Splits prompts into words, has learned tokens, and records the prompts."""

    def __init__(self, learned: list[str]) -> None:
        self.added_tokens_encoder = {token: at for at, token in enumerate(learned)}
        self.split: list[str] = []

    def tokenize(self, prompt: str) -> list[str]:
        self.split.append(prompt)
        return prompt.split()


class Prompted(TextualInversionLoaderMixin):
    """A pipeline whose tokenizer can have learned tokens."""

    def __init__(self, learned: list[str]) -> None:
        self.tokenizer = WordTokenizer(learned)
        self.scheduler = DDIMScheduler()
        self.components = {"tokenizer": self.tokenizer, "tokenizer_2": None, "scheduler": self.scheduler}


class Stage(DiffusionPipeline):
    """A pipeline inside a combined one."""

    def __init__(self, unet: torch.nn.Module, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)


class Combined(DiffusionPipeline):
    """A pipeline of two others, like Kandinsky's; it has their components under names of its own."""

    def __init__(
        self, prior_unet: torch.nn.Module, prior_scheduler: Any, unet: torch.nn.Module, scheduler: Any
    ) -> None:
        super().__init__()
        self.register_modules(prior_unet=prior_unet, prior_scheduler=prior_scheduler, unet=unet, scheduler=scheduler)
        self.prior_pipe = Stage(prior_unet, prior_scheduler)
        self.decoder_pipe = Stage(unet, scheduler)


def a_clone(pipeline: Guided | Prompted) -> Any:
    return clone_pipeline(make_template(pipeline, {}, CPU), pipeline.scheduler, StepCounter(lambda: None))


def test_each_clone_has_the_guidance_of_its_job() -> None:
    """A guider counts steps and stores its scale, so image tasks cannot share one."""
    pipeline = Guided(ClassifierFreeGuidance(guidance_scale=6.0))
    one, other = a_clone(pipeline), a_clone(pipeline)
    set_guidance(one, a_job("one", guidance_scale=2.5))
    one.guider.set_state(step=3, num_inference_steps=4, timestep=torch.tensor(7))
    assert [clone.guider.guidance_scale for clone in (one, other)] == [2.5, 6.0]
    assert (one.guider._step, other.guider._step) == (3, None)
    assert pipeline.guider.guidance_scale == 6.0
    assert one.transformer is other.transformer


def test_the_pipelines_of_a_combined_one_get_its_stand_ins_and_schedulers_of_the_clone() -> None:
    """A job's noise scheduler replaces the combined pipeline's; the prior keeps its kind."""
    pipeline = Combined(torch.nn.Linear(1, 1), DDPMScheduler(), torch.nn.Linear(1, 1), DDIMScheduler())
    template = make_template(pipeline, {"prior_unet": "first proxy", "unet": "second proxy"}, CPU)
    chosen, steps = DDPMScheduler(), StepCounter(lambda: None)
    one, other = (clone_pipeline(template, chosen, steps) for _ in range(2))
    assert (one.prior_pipe.unet, one.decoder_pipe.unet) == ("first proxy", "second proxy")
    assert one.decoder_pipe.scheduler is one.scheduler
    assert isinstance(one.scheduler, DDPMScheduler)
    assert one.prior_pipe.scheduler is not other.prior_pipe.scheduler
    assert one.prior_pipe.progress_bar is steps
    assert pipeline.prior_pipe.unet is pipeline.prior_unet, "the original pipeline is unchanged"


def test_a_cloned_scheduler_has_its_own_tensors() -> None:
    """A change in place stays in the clone; two names of one tensor are one tensor in the clone too."""
    pipeline = Guided(None)
    pipeline.scheduler.same = pipeline.scheduler.alphas_cumprod
    before = pipeline.scheduler.alphas_cumprod.clone()
    scheduler = a_clone(pipeline).scheduler
    scheduler.alphas_cumprod += 1
    assert torch.equal(pipeline.scheduler.alphas_cumprod, before)
    assert torch.equal(scheduler.same, before + 1)
    assert scheduler.config is pipeline.scheduler.config


def test_a_guider_that_does_not_change_the_denoiser_is_accepted() -> None:
    """A guider with state is accepted: its state is cloned."""
    assert isinstance(a_clone(Guided(AdaptiveProjectedGuidance())).guider, AdaptiveProjectedGuidance)


def test_a_guider_that_changes_the_denoiser_is_refused() -> None:
    """Its hooks on the shared module would change the images of other jobs."""
    with pytest.raises(ValueError, match="PerturbedAttentionGuidance, changes the denoiser"):
        make_template(Guided(PerturbedAttentionGuidance(perturbed_guidance_layers=[0])), {}, CPU)


def test_signatures_of_attention_processors_are_cached() -> None:
    """The signature is the same object at each read; calls go to the class; other modules stay unchanged."""

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
    ("learned", "converted", "searched"),
    [
        pytest.param(["<cat>", "<cat>_1"], "a <cat> <cat>_1 on a mat", True, id="a token of two vectors"),
        pytest.param(["<cat>"], "a <cat> on a mat", False, id="a token of one vector"),
        pytest.param([], "a <cat> on a mat", False, id="no learned token"),
    ],
)
def test_prompts_are_searched_only_for_tokens_of_several_vectors(
    learned: list[str], converted: str, searched: bool
) -> None:
    """Textual inversion expands a token of several vectors; other prompts do not change."""
    pipeline = Prompted(learned)
    clone = a_clone(pipeline)
    assert clone.maybe_convert_prompt("a <cat> on a mat", clone.tokenizer) == converted
    assert bool(pipeline.tokenizer.split) is searched
    assert pipeline.maybe_convert_prompt("a <cat> on a mat", pipeline.tokenizer) == converted, (
        "the original pipeline is unchanged"
    )


def test_steps_are_counted_from_bars_and_from_loops() -> None:
    """Pipelines use a progress bar in both ways; several bars add up."""
    changes = []
    steps = StepCounter(lambda: changes.append(1))
    with steps(total=2) as bar:
        bar.update()
        bar.set_postfix(loss=1)
        bar.update()
    assert list(steps("abc")) == ["a", "b", "c"]
    assert (steps.step, steps.total, len(changes)) == (5, 5, 5)


def test_hooks_that_collect_states_are_there_before_the_first_call() -> None:
    """Installed by a pipeline's call of an inner model, they would be a change of one image task."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    install_capturing_hooks(model)
    before = [len(part._forward_hooks) for part in model.modules()]
    states = model.model(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert [len(part._forward_hooks) for part in model.modules()] == before
    assert sum(before) > 0
