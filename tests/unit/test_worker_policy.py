"""Decisions of a worker: each row of a table says why."""

from __future__ import annotations

import pytest

from worker.policy import paying_rows

QWEN_512 = {1: 1.0, 2: 2 / 1.8, 4: 4 / 2.8, 8: 8 / 3.1}
QWEN_1024 = {1: 1.0, 2: 2 / 1.02, 4: 4 / 1.02}


@pytest.mark.parametrize(
    ("curve", "cap", "rows", "why"),
    [
        ({}, 8, 8, "nothing measured: the operator's cap is all that is known"),
        ({1: 1.0}, 8, 2, "one row measured: try two"),
        ({1: 1.0, 2: 1.1}, 8, 4, "two rows paid: try four"),
        (QWEN_512, 8, 8, "the published 512 curve gains up to eight rows"),
        (QWEN_512, 4, 4, "the cap wins over a curve that still gains"),
        (QWEN_1024, 8, 1, "the published 1024 curve gains two percent at two rows: not worth the wait"),
        ({1: 1.0, 2: 1.0, 4: 3.9}, 8, 2, "the step from two to four rows costs more than it brings"),
        ({4: 1.0}, 8, 8, "only a larger count measured: double it"),
        ({1: 1.0, 16: 1.0}, 8, 2, "counts above the cap do not speak for what is below it"),
    ],
)
def test_rows_stop_where_one_more_no_longer_pays(curve: dict[int, float], cap: int, rows: int, why: str) -> None:
    """A forward takes rows for as long as each makes all of them cheaper."""
    assert paying_rows(curve, cap) == rows, why
