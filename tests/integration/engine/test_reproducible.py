"""Reproducible images are equal to the last bit of their floats, whatever their batch mates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec

from shared.architectures.registry import ARCHITECTURES
from shared.architectures.stacking_rules import StackingRules
from shared.tasks import Task

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

LONG = "a very large number of dogs, one behind the other, on their way to the sea"


@pytest.fixture(autouse=True)
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output images as floats of 0 to 1, because 8 bits would hide small differences."""
    monkeypatch.setattr("worker.engine.pipelines.call_results.to_pixels", lambda image: image.float().cpu().numpy())


def run(source: Path, *names: str, **spec: Any) -> EventRecorder:
    """Run the reproducible jobs `names`: `image-N` starts from an image, `long-N` has a long prompt."""
    jobs = []
    for name in names:
        kind, seed = name.split("-")
        fields: dict[str, Any] = {"strength": 0.9} if kind == "image" else {}
        prompt = LONG if kind == "long" else "a dog"
        jobs.append(a_job(name, prompt=prompt, seed=int(seed), steps=3, reproducible=True, **fields))
    recorder = EngineHarness(a_spec(source, **spec)).run(*jobs)
    assert {name: recorder.finished[name].error for name in names} == dict.fromkeys(names)
    return recorder


@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_an_image_from_an_image_does_not_depend_on_the_memory_format_of_others(family: str, tiny_models: Path) -> None:
    """The VAE's latents are channels-last, noise is not: what is joined depends on all rows, and kernels on that."""
    solo = run(tiny_models / family, "image-0")
    among = run(tiny_models / family, "image-0", "text-1", "text-2", "text-3")
    assert np.array_equal(among.images["image-0", 0], solo.images["image-0", 0])
    assert among.finished["image-0"].batching.max_jobs > 1


@pytest.mark.parametrize("inferred", [False, True])
def test_a_model_whose_rows_depend_on_others_runs_reproducible_jobs_solo(
    inferred: bool, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lumina 2 pads to the longest prompt of a forward; nothing shows it where its rules are inferred."""
    if inferred:
        listed = {name: rules for name, rules in ARCHITECTURES.items() if name != "Lumina2Transformer2DModel"}
        monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", listed)
    source = tiny_model("lumina-2")
    text = {"tasks": (Task.TEXT_TO_IMAGE,)}
    among = run(source, "text-0", "long-1", "long-2", **text)
    solo = run(source, "text-0", **text)
    assert np.array_equal(among.images["text-0", 0], solo.images["text-0", 0])
    assert set(among.rows) == {1}
    assert {forward.padding for forward in among.forwards} == {0}
    reason = among.finished["text-0"].batching.solo_reason
    assert reason is not None
    assert "reproducible" in reason


def test_a_call_with_tensors_that_have_no_rule_is_not_filled_up_with_copies(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the pixels beside the tokens of an edit: they have the entries of one call, not those of its copies."""
    rules = ARCHITECTURES["UNet2DConditionModel"]["forward"]
    ruled = {name: argument for name, argument in rules.arguments.items() if name != "encoder_hidden_states"}
    unruled = {**ARCHITECTURES, "UNet2DConditionModel": {"forward": StackingRules(rules.rows, ruled)}}
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", unruled)
    solo = run(tiny_models / "sd", "text-0")
    among = run(tiny_models / "sd", "text-0", "text-1", "long-2")
    assert np.array_equal(among.images["text-0", 0], solo.images["text-0", 0])
    assert set(among.rows) == {1}
    assert {forward.padding for forward in among.forwards} == {0}
