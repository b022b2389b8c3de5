"""Denoisers without stacking rules: rules are inferred from real calls, tried in turn, and verified at load."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from harness import model_pool
from harness.engine import DIFFUSERS_AND_NUMPY, SIDE, EngineHarness, a_job, a_spec

from shared.architectures.registry import ARCHITECTURES
from shared.config.request_limits import Defaults, Limits
from shared.tasks import Task

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)


def without_rules(patch: pytest.MonkeyPatch, architecture: str) -> None:
    rest = {name: rules for name, rules in ARCHITECTURES.items() if name != architecture}
    patch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rest)


def test_an_architecture_without_rules_is_fused_by_inferred_rules(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of real calls are enough for a UNet, and the self-check verifies them."""
    with model_pool.shared_models():
        with_rules = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    without_rules(monkeypatch, "UNet2DConditionModel")
    inferred = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    assert inferred.rows == with_rules.rows == [2] * 4
    for key in ("one", "two"):
        assert np.abs(inferred.images[key, 0].astype(int) - with_rules.images[key, 0].astype(int)).max() <= 1


def test_an_architecture_whose_rows_influence_each_other_runs_solo_with_a_reason(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images are correct, and the job's record has the reason."""
    real = UNet2DConditionModel.forward

    @wraps(real)  # with its signature
    def mixing(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        (output,) = real(self, sample, *args, **kwargs)
        return (output + sample.mean(),)

    monkeypatch.setattr(UNet2DConditionModel, "forward", mixing)
    without_rules(monkeypatch, "UNet2DConditionModel")
    harness, jobs = EngineHarness(a_spec(tiny_models / "sd")), [a_job("one"), a_job("two")]
    apart = [job.model_copy(update={"id": f"{job.id}-solo"}) for job in jobs]
    with harness.started():
        harness.submit(*jobs)
        harness.recorder.wait_for([job.id for job in jobs])
        harness.submit(*apart, solo=[job.id for job in apart])
        harness.recorder.wait_for([job.id for job in apart])
    made = harness.recorder
    assert made.rows[:8] == [1] * 8
    for key in ("one", "two"):
        reason = made.finished[key].batching.solo_reason
        assert reason is not None
        assert "has no stacking rule, and with an inferred one failed its self-check: fused rows are off" in reason
        assert np.array_equal(made.images[key, 0], made.images[f"{key}-solo", 0])


def test_a_guess_that_fails_is_followed_by_the_next(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that takes one time for all rows fails with one per row, and fuses calls of equal times."""
    real = UNet2DConditionModel.forward

    @wraps(real)  # with its signature
    def with_one_time(self: Any, sample: torch.Tensor, timestep: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return real(self, sample, torch.full((len(sample),), timestep.item()), *args, **kwargs)

    monkeypatch.setattr(UNet2DConditionModel, "forward", with_one_time)
    without_rules(monkeypatch, "UNet2DConditionModel")
    together = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    assert together.rows == [2] * 4


def test_a_model_that_reads_values_of_the_first_row_only_runs_solo(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of the check's own jobs are all equal, so the check tries others."""
    real = UNet2DConditionModel.forward

    @wraps(real)  # with its signature
    def reading_the_first_row(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        (output,) = real(self, sample, *args, **kwargs)
        return (output + kwargs["added_cond_kwargs"]["time_ids"][0, 2].sin(),)

    monkeypatch.setattr(UNet2DConditionModel, "forward", reading_the_first_row)
    without_rules(monkeypatch, "UNet2DConditionModel")
    together = EngineHarness(a_spec(tiny_models / "sdxl")).run(a_job("one"), a_job("two"))
    assert together.rows == [1] * 8
    reason = together.finished["one"].batching.solo_reason
    assert reason is not None
    assert "with an inferred one failed its self-check: fused rows are off" in reason


def test_a_model_that_rounds_inside_is_compared_with_its_own_sensitivity(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like Kandinsky 5: the last bits of a sum decide between two values of bfloat16, fused or not."""
    real = UNet2DConditionModel.forward

    @wraps(real)
    def rounding(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        (output,) = real(self, sample, *args, **kwargs)
        return (output.bfloat16().float(),)

    monkeypatch.setattr(UNet2DConditionModel, "forward", rounding)
    together = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    assert together.rows == [2] * 4


@pytest.mark.parametrize(
    ("tiny", "task"),
    [
        ("kandinsky-5-t2v", Task.TEXT_TO_VIDEO),
        pytest.param("ltx-video", Task.TEXT_TO_VIDEO, marks=pytest.mark.slow),
        ("cogvideox-i2v", Task.IMAGE_TO_VIDEO),
        pytest.param("animatediff", Task.TEXT_TO_VIDEO, marks=pytest.mark.slow),
    ],
    ids=[
        "lists of position tensors",
        "integers that are no rows",
        "an offset of one entry for all rows",
        "texts repeated for each frame",
    ],
)
def test_arguments_of_real_families_are_read_correctly(
    tiny: str, task: Task, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs share all forwards; `make parity-more` compares the frames."""
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", {})
    spec = a_spec(
        tiny_model(tiny),
        tasks=(task,),
        limits=Limits(multiple_of=16, max_frames=9, frames_multiple=8),
        defaults=Defaults(width=SIDE, height=SIDE, steps=2, guidance_scale=4.0, fps=8),
    )
    fields: dict[str, Any] = {"task": task, "frames": 9, "fps": 8, "steps": 2}
    together = EngineHarness(spec).run(a_job("one", prompt="a dog", **fields), a_job("two", prompt="a cat", **fields))
    assert [together.finished[key].error for key in ("one", "two")] == [None, None]
    assert set(together.rows) == {2}
