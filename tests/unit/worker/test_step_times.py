"""How long a running job still takes, by the reports of its progress."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from worker.claims.step_times import StepTimes, remaining_s, with_report


def times(reports: Sequence[tuple[int, int, float]]) -> StepTimes | None:
    result = None
    for step, total, at_s in reports:
        result = with_report(result, step, total, at_s)
    return result


@pytest.mark.parametrize(
    ("reports", "now_s", "expected"),
    [
        ([], 50.0, 0.0),  # nothing is known
        ([(1, 11, 10.0)], 10.0, 0.0),  # nor of one step
        ([(1, 11, 10.0)], 12.0, 18.0),  # but a second one takes 2 s at least, and 10 are left
        ([(1, 11, 10.0), (3, 11, 14.0)], 14.0, 16.0),
        ([(1, 11, 10.0), (3, 11, 14.0)], 15.0, 15.0),
        ([(1, 11, 10.0), (3, 11, 14.0)], 20.0, 8 * 10 / 3 - 6),  # the present step is a slow one
        ([(1, 11, 10.0), (11, 11, 14.0)], 15.0, 0.0),  # it is decoded
        ([(50, 100, 10.0), (52, 100, 11.0)], 11.0, 24.0),  # continued: the steps before do not count
        ([(5, 10, 10.0), (0, 10, 20.0), (1, 10, 21.0)], 21.0, 9.0),  # it began anew
        ([(5, 10, 10.0), (5, 20, 20.0), (6, 20, 22.0)], 22.0, 28.0),  # its other images have begun
    ],
)
def test_the_rest_takes_as_long_as_the_steps_so_far(
    reports: Sequence[tuple[int, int, float]], now_s: float, expected: float
) -> None:
    assert remaining_s(times(reports), now_s) == pytest.approx(expected)
