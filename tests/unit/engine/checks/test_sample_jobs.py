"""The sizes of the jobs with which a model is checked when it is loaded."""

from __future__ import annotations

import pytest

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.tasks import Task
from worker.engine.checks.sample_jobs import sample_sizes


@pytest.mark.parametrize(
    ("limits", "frames"),
    [
        (Limits(max_frames=81, frames_multiple=4), [5, 5, 81]),
        (Limits(min_frames=35, max_frames=120, frames_multiple=17), [35, 35, 120]),
    ],
)
def test_videos_of_a_check_are_short_and_within_the_limits(limits: Limits, frames: list[int]) -> None:
    spec = ModelSpec(id="m", source="x", tasks=(Task.TEXT_TO_VIDEO,), limits=limits)
    assert [size.frames for size in sample_sizes(spec)] == frames
