"""Who goes next, as a table."""

from __future__ import annotations

import pytest

from worker.engine.policy import Waiting, aged, next_group

ENCODE, DECODE, DENOISE = range(3)


def call(
    cohort: str = "a", urgency: int = 1, age: int = 0, stage: int = DENOISE, fit: str = "fits", place: int | None = None
) -> Waiting:
    return Waiting(cohort, urgency, age, stage, fit, place)


@pytest.mark.parametrize(
    ("waiting", "limit", "chosen"),
    [
        pytest.param([call(age=2), call(age=1)], 8, [1, 0], id="all that fit, oldest first"),
        pytest.param([call(age=3), call(age=1), call(age=2)], 2, [1, 2], id="the youngest is set aside at the limit"),
        pytest.param([call(age=1), call(age=2, urgency=0)], 1, [1], id="an urgent one goes before an older one"),
        pytest.param([call("b", age=2), call("a", age=1)], 8, [1], id="the older cohort runs to its end"),
        pytest.param([call("a", age=1), call("b", age=2, urgency=0)], 8, [1], id="urgency chooses the cohort too"),
        pytest.param(
            [call("a", age=1), call("a", age=9, stage=ENCODE)], 8, [1], id="a newcomer catches up with its cohort first"
        ),
        pytest.param(
            [call("a", age=1), call("b", age=0, stage=DECODE), call("b", age=2)], 8, [1], id="a finished picture leaves"
        ),
        pytest.param(
            [call("a", age=1), call("b", age=2, stage=ENCODE)], 8, [0], id="another cohort's newcomer delays nobody"
        ),
        pytest.param(
            [call(age=2, fit="x"), call(age=1, fit="y"), call(age=3, fit="y")], 8, [1, 2], id="those who fit the oldest"
        ),
        pytest.param([call()], 0, [0], id="somebody always goes"),
        pytest.param(
            [call(age=1, place=3), call(age=2, place=3), call(age=3, place=0)], 8, [0, 2], id="one a place, the oldest"
        ),
    ],
)
def test_next_group(waiting: list[Waiting], limit: int, chosen: list[int]) -> None:
    """Order by priority, then age; one cohort at a time; in it the earliest stage first."""
    assert next_group(waiting, lambda _first: limit) == chosen


def test_the_limit_is_asked_for_the_first_of_the_group() -> None:
    """Limits differ by model and shape."""
    asked: list[int] = []
    next_group([call("b", age=2), call("a", age=1)], lambda first: asked.append(first) or 1)  # type: ignore[func-returns-value]
    assert asked == [1]


@pytest.mark.parametrize(
    ("urgency", "aside_s", "effective", "why"),
    [
        (2, 0.0, 2, "a bulk job that was not kept waiting is one"),
        (2, 29.9, 2, "patience is not at its end"),
        (2, 30.0, 1, "one patience lifts it to the standard jobs"),
        (2, 60.0, 0, "two lift it to the interactive ones, of which it is the oldest: it goes on to its end"),
        (2, 1e6, 0, "there is nothing above them"),
        (1, 30.0, 0, "a standard job has one step to go"),
        (0, 1e6, 0, "an interactive one has none"),
    ],
)
def test_who_is_set_aside_for_long_becomes_more_urgent(urgency: int, aside_s: float, effective: int, why: str) -> None:
    """A stream of interactive jobs cannot keep a bulk row waiting for ever."""
    assert aged(urgency, aside_s, patience_s=30.0) == effective, why
