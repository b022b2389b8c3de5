"""When a job gets a checkpoint."""

from __future__ import annotations

import pytest

from worker.engine.checkpoints.policy import is_due


@pytest.mark.parametrize(
    ("checkpoint_s", "lost_s", "steps_left", "due"),
    [
        (10.0, 9.9, 5, False),  # a job that takes less than 10 s gets none
        (10.0, 10.0, 5, True),
        (10.0, 25.0, 1, True),
        (10.0, 25.0, 0, False),  # only decoding is left
        (0.0, 0.0, 1, True),
        (None, 1e9, 5, False),
        (float("inf"), 1e9, 5, False),  # on request only
    ],
)
def test_a_checkpoint_is_due_when_its_time_would_be_lost(
    checkpoint_s: float | None, lost_s: float, steps_left: int, due: bool
) -> None:
    assert is_due(checkpoint_s, lost_s, steps_left) is due
