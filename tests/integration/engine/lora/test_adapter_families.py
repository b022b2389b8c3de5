"""LoRA adapters of every layer, different for each job of a fused forward: more families, and unsupported ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from tiny import lora

from shared.config.request_limits import Defaults, Limits
from shared.tasks import Task

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY, "ignore:Already found a `peft_config`"),
    pytest.mark.usefixtures("shared_models"),
]

FRAMES = 5
VIDEO: dict[str, Any] = {
    "tasks": (Task.TEXT_TO_VIDEO,),
    "limits": Limits(multiple_of=16, max_frames=FRAMES, frames_multiple=4),
    "defaults": Defaults(frames=FRAMES),
}
IMAGE: dict[str, Any] = {"tasks": (Task.TEXT_TO_IMAGE,)}


@pytest.fixture(autouse=True)
def floats() -> Iterator[None]:
    with as_floats():
        yield


def three_files(folder: Path, target: Path) -> dict[str, Path]:
    pipeline = load_pipeline(folder)
    wanted = {"ink": lora.everywhere, "oil": lora.everywhere, "neon": lora.attention}
    return {
        name: lora.save(pipeline, target / f"{name}.safetensors", at, wanted=layers)
        for at, (name, layers) in enumerate(wanted.items())
    }


@pytest.mark.parametrize(
    ("model", "components"),
    [
        ("qwen-image", {}),
        pytest.param("flux-2-klein", {}, marks=pytest.mark.slow),
        pytest.param("wan-2.1-t2v", {}, marks=pytest.mark.slow),  # Wan 2.2 has two such denoisers
        ("wan-2.2-t2v", {"oil": "transformer_2", "neon": "transformer_2"}),
    ],
)
def test_jobs_with_different_adapters_and_none_share_one_forward(
    model: str, components: Mapping[str, str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Eight jobs, three adapters in six combinations; each of two denoisers has its own adapters."""
    folder = tiny_model(model)
    files = three_files(folder, tmp_path)
    video = model.startswith("wan")
    jobs = eight_jobs(steps=2, **({"task": Task.TEXT_TO_VIDEO, "frames": FRAMES, "fps": 24} if video else {}))
    recorder = run_together(spec_with(folder, files, components, **(VIDEO if video else IMAGE)), *jobs)
    reference = PeftReference(folder, files, components)
    assert_all_like_solo(recorder, reference, jobs)
    assert recorder.rows[0] == 8
    assert {recorder.finished[job.id].batching.max_jobs for job in jobs} == {8}
    for job in (one for one in jobs if len(one.adapters) == 1):
        plain = reference.image(job.model_copy(update={"adapters": ()}))
        assert np.abs(recorder.images[job.id, 0] - plain).max() > 1e-2, job.id


@pytest.mark.parametrize("model", ["ernie-image", "z-image"])
def test_jobs_run_separately_if_rows_cannot_have_different_adapters(
    model: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their layers get tokens of all rows at once, or tokens first, so each combination runs by itself."""
    folder = tiny_model(model)
    files = three_files(folder, tmp_path)
    jobs = [mixable(a_job(name, adapters=adapters_of((name[:3], 1.0)))) for name in ("ink", "oil", "ink2", "oil2")]
    jobs.append(mixable(a_job("none")))
    recorder = run_together(spec_with(folder, files, **IMAGE), *jobs)
    assert_all_like_solo(recorder, PeftReference(folder, files), jobs)
    assert recorder.rows == [2] * 8 + [1] * 4
    assert recorder.finished["none"].batching.solo_reason == (
        "tensor shapes or adapters of other jobs did not match, or memory held no more rows"
    )
