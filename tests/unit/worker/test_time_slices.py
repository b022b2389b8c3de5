"""When a batch that has run for a slice is put aside."""

from __future__ import annotations

import pytest

from worker.claims.time_slices import Slice, is_over


@pytest.mark.parametrize(
    ("slice_s", "jobs", "cost_s", "over"),
    [
        (10.0, [Slice(10.0, 50.0)], 2.0, True),
        (10.0, [Slice(9.9, 50.0)], 2.0, False),  # it runs at least one slice
        (10.0, [Slice(60.0, 50.0), Slice(9.9, 50.0)], 2.0, False),  # and so does each of its batch
        (10.0, [Slice(60.0, 1.0), Slice(30.0, 50.0)], 2.0, True),
        (10.0, [Slice(60.0, 2.0)], 2.0, False),  # it ends sooner than it could be back
        (10.0, [Slice(60.0, 0.0)], 0.0, False),  # or is about to end
        (10.0, [Slice(12.0, 50.0)], 20.0, False),  # a change costs more than what it has run
        (10.0, [Slice(20.0, 50.0)], 20.0, True),
        (0.0, [Slice(60.0, 50.0)], 0.0, False),  # off
        (10.0, [], 0.0, False),
    ],
)
def test_a_batch_is_put_aside_after_a_slice_if_that_is_worth_its_cost(
    slice_s: float, jobs: list[Slice], cost_s: float, over: bool
) -> None:
    assert is_over(slice_s, jobs, cost_s) is over
