"""LoRA adapters of every layer, from job to job in one fused forward: further families, and those that cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.adapters import (
    PeftReference,
    adapters_of,
    assert_all_like_solo,
    eight_jobs,
    load_pipeline,
    mixable,
    run_together,
    spec_with,
)
from harness.engine import DIFFUSERS_AND_NUMPY, a_job
from parity.running import as_floats
from tiny import lora, registry

from shared.config.models_file import Defaults, Limits
from shared.job import Task

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY, "ignore:Already found a `peft_config`")

FRAMES = 5
VIDEO: dict[str, Any] = {
    "tasks": (Task.TEXT_TO_VIDEO,),
    "limits": Limits(multiple_of=16, max_frames=FRAMES, frames_multiple=4),
    "defaults": Defaults(frames=FRAMES),
}
PICTURE: dict[str, Any] = {"tasks": (Task.TEXT_TO_IMAGE,)}


@pytest.fixture(autouse=True)
def floats() -> Iterator[None]:
    with as_floats():
        yield


def three_files(folder: Path) -> dict[str, Path]:
    pipeline = load_pipeline(folder)
    wanted = {"ink": lora.everywhere, "oil": lora.everywhere, "neon": lora.attention}
    return {
        name: lora.save(pipeline, folder / f"loras/{name}.safetensors", at, wanted=layers)
        for at, (name, layers) in enumerate(wanted.items())
    }


@pytest.mark.parametrize(
    ("model", "components"),
    [
        ("qwen-image", {}),
        ("flux-2-klein", {}),
        ("wan-2.1-t2v", {}),
        ("wan-2.2-t2v", {"oil": "transformer_2", "neon": "transformer_2"}),
    ],
)
def test_jobs_with_different_adapters_and_none_share_one_forward(
    model: str, components: Mapping[str, str], tmp_path: Path
) -> None:
    """Eight jobs, three adapters in six mixtures; where there are two denoisers, each has its own."""
    folder = registry.save_tiny(model, tmp_path / model)
    files = three_files(folder)
    video = model.startswith("wan")
    jobs = eight_jobs(**({"task": Task.TEXT_TO_VIDEO, "frames": FRAMES, "fps": 24} if video else {}))
    heard = run_together(spec_with(folder, files, components, **(VIDEO if video else PICTURE)), *jobs)
    lone = PeftReference(folder, files, components)
    assert_all_like_solo(heard, lone, jobs)
    assert heard.rows[0] == 8
    assert {heard.ended[job.id].batching.max_jobs for job in jobs} == {8}
    for job in jobs:
        plain = lone.image(job.model_copy(update={"adapters": ()}))
        changed = np.abs(heard.pictures[job.id, 0] - plain).max()
        assert (changed > 1e-2) == bool(job.adapters), f"{job.id}: {changed}"


@pytest.mark.parametrize("model", ["ernie-image", "z-image"])
def test_where_rows_cannot_differ_jobs_run_apart_and_right(model: str, tmp_path: Path) -> None:
    """Their layers are given tokens of all rows at once, or tokens first: each mixture runs alone, the oldest first."""
    folder = registry.save_tiny(model, tmp_path / model)
    files = three_files(folder)
    jobs = [mixable(a_job(name, adapters=adapters_of((name[:3], 1.0)))) for name in ("ink", "oil", "ink2", "oil2")]
    jobs.append(mixable(a_job("none")))
    heard = run_together(spec_with(folder, files, **PICTURE), *jobs)
    assert_all_like_solo(heard, PeftReference(folder, files), jobs)
    assert heard.rows == [2] * 8 + [1] * 4
    assert heard.ended["none"].batching.solo_reason == (
        "tensor shapes or adapters of other jobs did not match, or memory held no more rows"
    )
