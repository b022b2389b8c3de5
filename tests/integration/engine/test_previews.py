"""Previews are what the running latents are: as a pipeline itself shows them when it is stopped at that step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec

from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines import latent_previews
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.call_results import to_pixels
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.latent_previews import preview_steps

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

# One of each way in which latents become what the VAE takes: scaled, shifted, packed, with mean and deviation for
# each channel and an axis of time, in patches.
FAMILIES = ("sd", "sd3", "flux", "qwen-image", "flux-2-klein")


@pytest.mark.parametrize(
    ("steps", "count", "after"),
    [
        (12, 3, (3, 6, 9)),
        (12, 1, (6,)),
        (4, 3, (1, 2, 3)),
        (3, 3, (1, 2)),  # after the last comes the image itself
        (2, 3, (1,)),
        (1, 3, ()),
        (50, 0, ()),
    ],
)
def test_previews_are_spread_over_the_steps(steps: int, count: int, after: tuple[int, ...]) -> None:
    assert preview_steps(steps, count) == after


def stopped(pipeline: Any, job: Job, step: int) -> np.ndarray:
    """Make a image with nothing but diffusers, which goes on to decode after `step`."""
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)

    def after_step(pipe: Any, index: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index + 1 == step:
            kept.append(tensors["latents"].clone())
        return {"latents": kept[0]} if kept else {}

    kept: list[torch.Tensor] = []
    result = pipeline(**arguments_for(pipeline, job, 0, InputImages()), callback_on_step_end=after_step)
    return to_pixels(result.images[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preview_equals_that_of_the_pipeline(family: str, tiny_model: Callable[[str], Path]) -> None:
    """Also with batch mates, and the images do not change."""
    folder = tiny_model(family)
    jobs = [a_job("one", prompt="a dog", previews=2), a_job("two", prompt="a cat", guidance_scale=3.0)]
    recorder = EngineHarness(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,))).run(*jobs)
    assert [entry for entry in recorder.log if entry[0] == "preview"] == 2 * [("preview", "one", 0)]
    after = preview_steps(jobs[0].steps, 2)
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for step, shown in zip(after, recorder.previews, strict=True):
        assert np.abs(shown.astype(int) - stopped(pipeline, jobs[0], step).astype(int)).max() <= 1
    plain = EngineHarness(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,))).run(
        *(job.model_copy(update={"previews": 0}) for job in jobs)
    )
    for at, pixels in plain.images.items():
        assert np.abs(recorder.images[at].astype(int) - pixels.astype(int)).max() <= 1


def test_previews_share_a_forward_and_decoding_is_reported_at_the_end(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large latents are downscaled first."""
    monkeypatch.setattr(latent_previews, "LARGEST_SIDE", 4)
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    decoded: list[int] = []

    class RecordingTimer(type(harness.engine._forward_timer)):  # type: ignore[misc]
        def measure(self, key: Any, run: Any, *on: Any) -> Any:
            if key[2].startswith("vae.decode"):
                decoded.append((key[2], key[3]))
            return super().measure(key, run, *on)

    harness.engine._forward_timer.__class__ = RecordingTimer
    recorder = harness.run(*(a_job(f"job{at}", prompt="a dog", previews=1) for at in range(3)))
    assert decoded == [("vae.decode of previews", 3), ("vae.decode", 3)]
    assert {pixels.shape for pixels in recorder.previews} == {(recorder.images["job0", 0].shape[0] // 2,) * 2 + (3,)}
    kinds = [entry[0] for entry in recorder.log]
    assert kinds.index("decoding") > max(at for at, kind in enumerate(kinds) if kind == "preview")
