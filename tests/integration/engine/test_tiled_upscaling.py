"""Videos that are denoised tile by tile: tiles of several jobs share forwards, and each has all steps of its job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.checkpoints import resumed
from harness.engine import EngineHarness, a_job, a_spec
from harness.videos import a_video_file

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.config.step_schedules import Extrapolation, StepSchedule
from shared.job import Job
from shared.tasks import Task
from worker.engine.protocol import InputFiles

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("shared_models")]
FRAMES, SIDE = 5, 48
TILES = 4  # two in each direction, of 32 pixels


@pytest.fixture
def spec(tiny_model: Callable[[str], Path]) -> ModelSpec:
    limits = Limits(min_side=32, multiple_of=8, max_frames=9, frames_multiple=4, max_images=2)
    defaults = Defaults(width=SIDE, height=SIDE, frames=FRAMES, steps=2)
    return a_spec(tiny_model("kandinsky-6-upscaler"), tasks=(Task.UPSCALE_VIDEO,), limits=limits, defaults=defaults)


def a_video_job(name: str, **fields: Any) -> Job:
    own = {"task": Task.UPSCALE_VIDEO, "prompt": "", "frames": FRAMES, "fps": 8, "steps": 2}
    return a_job(name, **{**own, "width": SIDE, "height": SIDE, **fields})


def test_tiles_of_jobs_with_other_factors_and_steps_share_forwards(spec: ModelSpec) -> None:
    """Progress counts the steps of all tiles."""
    jobs = [a_video_job("usual"), a_video_job("double", upscale_factor=2), a_video_job("long", steps=3)]
    video = InputFiles(video=a_video_file(FRAMES, 8, sound=True))
    recorder = EngineHarness(spec).run(*jobs, inputs=video)
    assert [recorder.finished[job.id].error for job in jobs] == [None] * 3
    assert recorder.rows == [3] * 2 * TILES + [1] * TILES
    totals = {name: total for kind, name, _, total in (entry[:4] for entry in recorder.log if entry[0] == "progress")}
    assert totals == {"usual": 2 * TILES, "double": 2 * TILES, "long": 3 * TILES}
    outputs = [recorder.outputs[job.id, 0] for job in jobs]
    assert [(one.pixels.shape, one.audio is not None) for one in outputs] == [((FRAMES, SIDE, SIDE, 3), True)] * 3


def test_a_job_continues_in_a_later_tile_with_the_same_bits(spec: ModelSpec) -> None:
    """The tiles before it are decoded again, of what their last steps returned."""
    outcome = resumed(spec, a_video_job("one", steps=3))
    assert outcome.difference == 0.0
    assert outcome.steps_computed == (3 * TILES, 3 * TILES // 2)


def test_steps_are_skipped_in_each_tile_by_itself(spec: ModelSpec) -> None:
    """An output of another tile says nothing of this one."""
    schedule = StepSchedule(every=2, first=1, last=1, order=Extrapolation.REUSE)
    recorder = EngineHarness(spec).run(a_video_job("one", steps=10, step_cache=schedule))
    finished = recorder.finished["one"]
    assert finished.error is None
    assert (finished.batching.skipped_steps, len(recorder.rows)) == (4 * TILES, 6 * TILES)


def test_estimates_count_a_step_of_a_request_with_all_its_tiles(spec: ModelSpec) -> None:
    times = EngineHarness(spec).run(a_video_job("one", steps=3)).finished["one"].device_times
    assert times is not None
    assert 3 * times.step_s + times.rest_s == pytest.approx(times.run_s)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"width": 32, "height": 24}, "video", "must be at least"),
        ({"frames": 6}, "frames", "a multiple of 4 plus 1"),
        ({"upscale_factor": 3}, "upscale_factor", "takes 2.25, 2, 4, not 3"),
    ],
)
def test_a_job_that_its_pipeline_does_not_do_fails_and_says_why(
    spec: ModelSpec, fields: dict[str, Any], param: str, said: str
) -> None:
    """Of a model whose files the API has not seen."""
    error = EngineHarness(spec).run(a_video_job("one", **fields)).finished["one"].error
    assert error is not None
    assert (error.param, said in error.message) == (param, True), error.message
