"""The candidates of a job after a mark: each is kept or dropped, and the checkpoints of the last mark count."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from shared.config.candidates import DroppedCandidate
from worker.engine.checkpoints.mark_state import MarkState, latest


def dropped(*candidates: int, step: int = 2) -> tuple[DroppedCandidate, ...]:
    return tuple(DroppedCandidate(candidate=one, step=step, score=0.1) for one in candidates)


BEGINNING = MarkState(kept=(0, 1, 2))
FIRST = MarkState(step=2, kept=(2, 0), scores=(0.5, None), dropped=dropped(1))
OTHER_FIRST = MarkState(step=2, kept=(2, 1), scores=(0.5, 0.2), dropped=dropped(0))
SECOND = MarkState(step=4, kept=(0,), scores=(0.6,), dropped=dropped(1, 2))


@pytest.mark.parametrize(
    "fields",
    [
        {"kept": (0, 2)},
        {"kept": (0, 1, 1)},
        {"kept": (-1, 0)},
        {"kept": (0, 1), "scores": (0.1, 0.2)},
        {"step": 2, "kept": (0, 1), "scores": (0.1,)},
        {"step": 2, "kept": (0, 1), "scores": (0.1, 0.2), "dropped": dropped(1)},
        {"step": 2, "kept": (0,), "scores": (0.1,), "dropped": dropped(2)},
        {"step": -1, "kept": (0,)},
        {"kept": (0,), "more": 1},
    ],
)
def test_a_state_that_does_not_hold_together_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MarkState(**fields)


def test_a_kept_candidate_has_its_score() -> None:
    assert [FIRST.score_of(candidate) for candidate in FIRST.kept] == [0.5, None]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], None),
        ([None, None, None], None),
        ([BEGINNING, None, BEGINNING], BEGINNING),
        ([BEGINNING, FIRST, FIRST], FIRST),
        ([SECOND, FIRST, BEGINNING], SECOND),
        ([None, OTHER_FIRST, FIRST], OTHER_FIRST),
        ([MarkState(step=9, kept=(0, 1), scores=(0.1, 0.1)), FIRST, None], FIRST),
    ],
)
def test_the_state_of_the_last_mark_counts(states: list[MarkState | None], expected: MarkState | None) -> None:
    """One of a job with another number of candidates does not."""
    assert latest(states, 3) == expected
