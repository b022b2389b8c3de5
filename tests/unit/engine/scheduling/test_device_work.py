"""Device time of a job: a step and the rest apart, and the least share of an image."""

from __future__ import annotations

import pytest

from shared.job_record import DeviceTimes
from worker.engine.fusion.module_proxy import Stage
from worker.engine.scheduling.device_work import DeviceWork

Work = tuple[Stage | None, float, int]  # seconds of a forward and its images, 0 for other work

CASES: list[tuple[str, list[Work], float, DeviceTimes | None]] = [
    ("no work", [], 4, None),
    (
        "forwards by stage, with the code around them",
        [
            (None, 1, 0),
            (Stage.ENCODE, 2, 1),
            (Stage.DENOISE, 4, 2),
            (Stage.DENOISE, 2, 0),
            (Stage.DENOISE, 6, 2),
            (Stage.DECODE, 8, 2),
            (Stage.DECODE, 1, 0),
        ],
        2,
        DeviceTimes(step_s=6, rest_s=12, run_s=24, least_step_s=2, least_rest_s=4),
    ),
    (
        "a control net belongs to its step, its forward is no least step",
        [(Stage.CONTROL, 1, 1), (Stage.DENOISE, 3, 1)],
        1,
        DeviceTimes(step_s=4, rest_s=0, run_s=4, least_step_s=3),
    ),
    ("steps in own code", [(None, 8, 0), (Stage.DECODE, 2, 1)], 5, DeviceTimes(step_s=2, rest_s=0, run_s=10)),
]


@pytest.mark.parametrize(("why", "work", "steps", "times"), CASES, ids=[case[0] for case in CASES])
def test_device_times(why: str, work: list[Work], steps: float, times: DeviceTimes | None) -> None:
    device_work = DeviceWork()
    for stage, seconds, images in work:
        device_work.add(stage, seconds)
        if stage is not None and images:
            device_work.note_share(stage, seconds / images)
    assert device_work.times(steps) == times, why
