"""Upscalers in the engine: the size of the result, and inputs that the pipeline refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from families.video_upscalers import ltx_2_upscaler
from harness.engine import EngineHarness, a_job, a_spec
from harness.videos import a_video_file

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.tasks import Task
from worker.engine.protocol import InputFiles

pytestmark = pytest.mark.usefixtures("shared_models")
SIZE = {"width": 128, "height": 128}


def upscaler(source: Path) -> ModelSpec:
    return a_spec(source, tasks=(Task.UPSCALE,), extra=("noise_level",))


def test_results_have_the_size_of_the_job(tiny_model: Callable[[str], Path]) -> None:
    """Whatever that of the image is; jobs of one size share forwards, with different inputs too."""
    fields = {"task": Task.UPSCALE, "prompt": "a dog", "steps": 2, "width": 96, "height": 64}
    jobs = [a_job("usual", **fields), a_job("noisy", **fields, extra={"noise_level": 300})]
    recorder = EngineHarness(upscaler(tiny_model("upscaler"))).run(*jobs)
    assert [recorder.finished[job.id].error for job in jobs] == [None, None]
    assert [recorder.images[job.id, 0].shape for job in jobs] == [(64, 96, 3)] * 2
    assert recorder.finished["usual"].batching.max_jobs == 2


def test_an_input_out_of_range_is_named(tiny_model: Callable[[str], Path]) -> None:
    job = a_job("job", task=Task.UPSCALE, steps=2, extra={"noise_level": 5000})
    error = EngineHarness(upscaler(tiny_model("upscaler"))).run(job).finished["job"].error
    assert error is not None
    assert (error.param, "350" in error.message) == ("extra.noise_level", True)


def video_upscaler(source: Path) -> ModelSpec:
    allowed = Limits(min_side=128, multiple_of=16, max_frames=17, frames_multiple=8, max_images=2)
    return a_spec(source, tasks=(Task.UPSCALE_VIDEO,), limits=allowed, defaults=Defaults(**SIZE, frames=9, steps=1))


def test_videos_are_enlarged_together_and_keep_their_frames_and_sound(tiny_model: Callable[[str], Path]) -> None:
    """Of the prompt, which the model does not take, a warning says so."""
    video = InputFiles(video=a_video_file(9, 8, sound=True))
    job = a_job("job", task=Task.UPSCALE_VIDEO, n=2, frames=9, fps=8, steps=1, **SIZE)
    recorder = EngineHarness(video_upscaler(tiny_model("ltx-video-upscaler"))).run(job, inputs=video)
    finished, outputs = recorder.finished["job"], [recorder.outputs["job", index] for index in range(2)]
    assert (finished.error, recorder.rows) == (None, [2])
    assert [(one.pixels.shape, one.audio is not None) for one in outputs] == [((9, 128, 128, 3), True)] * 2
    assert [warning.param for warning in finished.warnings] == ["prompt"]


def test_frames_that_the_model_would_cut_are_refused(tiny_model: Callable[[str], Path]) -> None:
    job = a_job("job", task=Task.UPSCALE_VIDEO, frames=10, fps=8, **SIZE)
    error = EngineHarness(video_upscaler(tiny_model("ltx-video-upscaler"))).run(job).finished["job"].error
    assert error is not None
    assert (error.param, "a multiple of 8 plus 1" in error.message) == ("frames", True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rational_spatial_scale": 1.5}, "makes sides 1.5 times as long"),
        ({"temporal_upsample": True, "spatial_upsample": False}, "makes more frames"),
    ],
)
def test_an_upsampler_that_does_something_else_is_not_loaded(
    tmp_path: Path, config: dict[str, float], said: str
) -> None:
    folder = tmp_path / "upscaler"
    ltx_2_upscaler(**config).save_pretrained(folder)
    job = a_job("job", task=Task.UPSCALE_VIDEO, frames=9, fps=8, **SIZE)
    error = EngineHarness(video_upscaler(folder)).run(job).finished["job"].error
    assert error is not None
    assert said in error.message
