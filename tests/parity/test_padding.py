"""Padding depends on batch mates: a reproducible image must not depend on padding by a single bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from parity.cells import LONG, small_images
from tiny import registry
from tiny.registry import torchvision_fault

from shared.architectures.registry import ARCHITECTURES
from shared.architectures.stacking_rules import Argument, Kind, StackingRules
from shared.tasks import Task

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

PROMPTS = ("a dog", LONG, "fog", f"{LONG}, and back", "ten boats", "a cat")


def saved(tiny: str, models_folder: Path) -> Path:
    source = models_folder / tiny
    return source if (source / "model_index.json").exists() else registry.save_tiny(tiny, source)


@pytest.mark.parametrize(
    "tiny",
    [
        "qwen-image",
        pytest.param("z-image", marks=pytest.mark.parity),
        pytest.param("ernie-image", marks=pytest.mark.parity),
    ],
)
def test_reproducible_images_do_not_depend_on_the_longest_prompt_of_the_batch(tiny: str, models_folder: Path) -> None:
    """Prompts are padded to the longest of a forward: reproducible jobs share forwards with prompts of their length."""
    source = saved(tiny, models_folder)
    spec = a_spec(source, tasks=(Task.TEXT_TO_IMAGE,))
    jobs = [a_job(f"job{at}", prompt=prompt, seed=at, steps=3, reproducible=True) for at, prompt in enumerate(PROMPTS)]
    together = EngineHarness(spec).run(*jobs)
    like = a_job("like", prompt="a cow", seed=7, steps=3, reproducible=True)
    assert not [job.id for job in jobs if together.finished[job.id].error]
    for job in jobs[:2]:
        solo = EngineHarness(spec).run(job, like)
        assert np.array_equal(solo.images[job.id, 0], together.images[job.id, 0])
    assert together.finished["job0"].batching.max_jobs > 1, "it shared a forward with a prompt of its length"


def test_the_self_check_finds_padding_without_a_mask(models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen-Image's pipelines drop a mask that is all ones; if it were not created again, longer prompts of batch
    mates would change images slightly."""
    source = saved("qwen-image", models_folder)
    rules = ARCHITECTURES["QwenImageTransformer2DModel"]["forward"]
    unmasked = {**rules.arguments, "encoder_hidden_states": Argument(Kind.PADDED)}
    wrong = {**ARCHITECTURES, "QwenImageTransformer2DModel": {"forward": StackingRules(rules.rows, unmasked)}}
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", wrong)
    harness = EngineHarness(a_spec(source, tasks=(Task.TEXT_TO_IMAGE,)), fresh=("tiny",))
    recorder = harness.run(a_job("one"), a_job("two", prompt=LONG))
    reason = recorder.finished["one"].batching.solo_reason
    assert reason is not None
    assert "failed its self-check: fused rows are off by" in reason


@pytest.mark.parity
@pytest.mark.parametrize("tiny", ["qwen-image-edit", "qwen-image-edit-plus", "qwen-image-2.1"])
def test_reproducible_edits_do_not_depend_on_their_batch_mates(tiny: str, models_folder: Path) -> None:
    """The text encoder gets an image's pixels without a rule to stack them: copies of a call cannot fill it up."""
    if fault := torchvision_fault():
        pytest.skip(fault)
    jobs = [
        a_job(f"job{at}", task=Task.EDIT, prompt=prompt, seed=at, steps=2, reproducible=True)
        for at, prompt in enumerate(("a dog", "a cat", LONG))
    ]
    with small_images("images.qwen21" if tiny == "qwen-image-2.1" else "images.qwen")():
        spec = a_spec(saved(tiny, models_folder), tasks=(Task.EDIT,))
        together, solo = EngineHarness(spec).run(*jobs), EngineHarness(spec).run(jobs[0])
    assert [together.finished[job.id].error for job in jobs] == [None, None, None]
    assert np.array_equal(solo.images["job0", 0], together.images["job0", 0])
    assert together.finished["job0"].batching.max_jobs > 1
