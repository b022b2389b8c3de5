"""The output of a probe: table, memory notes and plot."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from worker.engine.checks.warm_up import row_counts
from worker.probe import Measured, Probed, memory_notes, table

MIB = 2**20


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_row_counts_double_up_to_the_limit(most: int, counts: list[int]) -> None:
    assert row_counts(most) == counts


def probed(seconds: dict[int, float], peaks: dict[int, int] | None = None, max_batch: int = 8) -> Probed:
    peaks = peaks or {}
    spec = ModelSpec(id="m", source="/m", max_batch=max_batch, limits=Limits(max_images=1))
    return Probed(spec, "cpu", "64x64", tuple(Measured(rows, each, peaks.get(rows)) for rows, each in seconds.items()))


def rendered(result: Probed) -> str:
    out = io.StringIO()
    Console(width=120, file=out).print(table([result]))
    return out.getvalue()


def test_table_marks_inefficient_rows() -> None:
    lines = [line for line in rendered(probed({1: 0.1, 2: 0.12, 4: 0.26})).splitlines() if "64x64" in line]
    assert ["not efficient" in line for line in lines] == [False, False, True]
    assert "65%" in lines[2]  # 65 ms per image, 100 ms solo


def test_memory_per_row_is_that_of_one_more_row() -> None:
    result = probed({1: 0.1, 2: 0.1, 4: 0.1}, {1: 500 * MIB, 2: 600 * MIB, 4: 800 * MIB}, max_batch=4)
    assert result.row_bytes == 100 * MIB
    assert "m: 100 MiB per additional row" in memory_notes([result])


def test_rows_beyond_memory_are_reported() -> None:
    (note,) = memory_notes([probed({1: 0.1, 2: 0.1})])
    assert "8 rows do not fit" in note
