"""Which schedules a calibration picks."""

from __future__ import annotations

import numpy as np
import pytest

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.config.step_schedules import CacheLevel, StepCaching, StepSchedule
from worker.engine.step_calibration import ScheduleError, calibrated, choose, psnr, step_counts

LIGHT, MEDIUM, STRONG = CacheLevel


def measured(every: int, psnr: float, computed: float, of: str = "output") -> ScheduleError:
    return ScheduleError(StepSchedule.model_validate({"every": every, "of": of}), psnr, computed)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(2, 60.0, 0.6), (3, 50.0, 0.5), (4, 40.0, 0.4), (5, 31.0, 0.3)], {LIGHT: 3, MEDIUM: 4, STRONG: 5}),
        ([(2, 60.0, 0.6), (3, 29.0, 0.5)], {LIGHT: 2, MEDIUM: 2, STRONG: 2}),
        ([(2, 39.0, 0.6), (3, 38.0, 0.5)], {MEDIUM: 3, STRONG: 3}),
        ([(2, 20.0, 0.6)], {}),
    ],
)
def test_each_level_gets_the_fewest_steps_that_are_good_enough(
    found: list[tuple[int, float, float]], expected: dict[CacheLevel, int]
) -> None:
    chosen = choose([measured(*one) for one in found])
    assert {level: one.schedule.every for level, one in chosen.items()} == expected


def test_of_schedules_with_as_many_steps_the_best_is_picked() -> None:
    chosen = choose([measured(3, 46.0, 0.5), measured(3, 52.0, 0.5, "residual"), measured(2, 60.0, 0.6)])
    assert chosen[LIGHT].schedule == StepSchedule(every=3, of="residual")


@pytest.mark.parametrize(
    ("steps", "limits", "counts"),
    [
        (30, Limits(), (20, 30, 50)),
        (12, Limits(max_steps=40), (12, 20, 40)),
        (4, Limits(max_steps=8), ()),
        (4, Limits(), (20, 50)),
        (40, Limits(min_steps=30), (40, 50)),
    ],
)
def test_the_numbers_of_steps_are_those_that_jobs_can_have(steps: int, limits: Limits, counts: tuple[int, ...]) -> None:
    assert step_counts(ModelSpec(id="m", source="x", defaults=Defaults(steps=steps), limits=limits)) == counts


def test_equal_images_have_the_highest_psnr() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    assert psnr(image, image) == 99.0
    assert psnr(image, image + np.uint8(1)) == pytest.approx(48.13, abs=0.01)


def test_a_table_keeps_what_a_calibration_does_not_measure() -> None:
    """Schedules in requests, and a default that has a schedule; a level without one is not allowed."""
    chosen = {LIGHT: measured(2, 60.0, 0.6)}
    caching = calibrated(StepCaching(default="light"), chosen)
    assert (caching.default, caching.allowed, caching.light.every) == ("light", ("light", "schedule"), 2)
    caching = calibrated(StepCaching(default="strong", allowed=("light", "strong")), chosen)
    assert (caching.default, caching.allowed) == ("off", ("light",))
    assert calibrated(StepCaching(allowed=()), {}) == StepCaching(allowed=())
