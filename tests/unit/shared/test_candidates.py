"""Candidates of a job: how many go on after which steps, which ones, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shared.config.candidates import BestOf, Verdict, judge


@pytest.mark.parametrize(
    ("fields", "steps", "marks"),
    [
        ({"candidates": 16, "keep": 4}, 12, {3: 8, 6: 4}),
        ({"candidates": 16, "keep": 1}, 12, {3: 4, 6: 1}),
        ({"candidates": 4, "keep": 1, "at": [1.0]}, 12, {12: 1}),
        ({"candidates": 8, "keep": 1, "at": [0.2, 0.4, 0.6]}, 10, {2: 4, 4: 2, 6: 1}),
        ({"candidates": 16, "keep": 4}, 2, {1: 4}),
        ({"candidates": 16, "keep": 4}, 1, {1: 4}),
        ({"candidates": 3, "keep": 2, "at": [0.3, 0.6]}, 10, {3: 2, 6: 2}),
    ],
)
def test_the_same_part_goes_on_after_each_share(fields: dict[str, Any], steps: int, marks: dict[int, int]) -> None:
    assert BestOf.model_validate(fields).marks(steps) == marks


@pytest.mark.parametrize(
    ("fields", "steps", "mean"),
    [
        ({"candidates": 16, "keep": 4}, 12, (16 * 3 + 8 * 3 + 4 * 6) / 16),
        ({"candidates": 16, "keep": 1}, 12, (16 * 3 + 4 * 3 + 1 * 6) / 16),
        ({"candidates": 4, "keep": 1, "at": [1.0]}, 12, 12.0),
    ],
)
def test_dropped_candidates_compute_fewer_steps(fields: dict[str, Any], steps: int, mean: float) -> None:
    assert BestOf.model_validate(fields).mean_steps(steps) == mean


@pytest.mark.parametrize(
    ("scores", "keep", "verdict"),
    [
        ({0: 0.1, 1: 0.3, 2: 0.2}, 2, Verdict((1, 2), (0,))),
        ({0: 0.2, 1: 0.2, 2: 0.2}, 1, Verdict((0,), (2, 1))),
        ({3: 0.2, 1: 0.2}, 1, Verdict((1,), (3,))),
        ({0: None, 1: -0.5}, 1, Verdict((1,), (0,))),
        ({0: None, 1: None}, 1, Verdict((0,), (1,))),
        ({0: 0.1, 1: 0.2}, 2, Verdict((1, 0), ())),
    ],
)
def test_the_best_go_on_and_ties_go_by_number(scores: dict[int, float | None], keep: int, verdict: Verdict) -> None:
    assert judge(scores, keep) == verdict


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"candidates": 4, "keep": 4}, "keep must be below candidates 4, not 4"),
        ({"candidates": 4, "at": [0.5, 0.5]}, "each share must be above the one before"),
        ({"candidates": 4, "at": [0.5, 0.25]}, "each share must be above the one before"),
        ({"candidates": 4, "at": []}, "at least 1 item"),
        ({"candidates": 4, "at": [0]}, "greater than 0"),
        ({"candidates": 4, "at": [1.5]}, "less than or equal to 1"),
        ({"candidates": 1}, "greater than or equal to 2"),
        ({"candidates": 4, "drop": 2}, "Extra inputs"),
    ],
)
def test_other_candidates_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        BestOf.model_validate(fields)
