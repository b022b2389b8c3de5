"""Tables on terminals of any width."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from rich.cells import cell_len

from cli.tables import age, aligned, blocks, fitting

NOW = datetime(2026, 1, 31, 22, tzinfo=UTC)
NAMES = ["id", "state", "note", "failed", "model", "prompt"]
JOBS = [
    NAMES,
    ["job_01ja3v5c8zq3m7x2r4t6w8y0ab", "running 45%", "", "0", "demo", "a red circle on a blue ground, left"],
    ["job_01ja3v5c8zq3m7x2r4t6w8y0ac", "succeeded", "", "0", "sdxl-turbo", "一个红色的圆圈"],
]


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (200, ["id", "state", "failed", "model", "prompt"]),  # those without a value are left out
        (77, ["id", "state", "failed", "model", "prompt"]),  # the last one is cut
        (76, ["id", "state", "model", "prompt"]),  # and those of zeros, if need be
        (60, None),
    ],
)
def test_a_table_has_the_columns_that_a_terminal_has_room_for(width: int, columns: list[str] | None) -> None:
    shown = fitting(JOBS, width)
    assert (shown and shown[0]) == columns
    lines = list(aligned(shown, width)) if shown else list(blocks(JOBS, width))
    assert max(map(cell_len, lines)) <= width
    assert all(any(job[0] in line for line in lines) for job in JOBS[1:]), "an id is never cut"


def test_a_terminal_too_narrow_for_columns_has_a_line_for_each_value() -> None:
    assert list(blocks(JOBS, 30))[:7] == [
        "id      job_01ja3v5c8zq3m7x2r4t6w8y0ab",
        "state   running 45%",
        "failed  0",
        "model   demo",
        "prompt  a red circle on a blu…",
        "",
        "id      job_01ja3v5c8zq3m7x2r4t6w8y0ac",
    ]


def test_the_last_column_stays_without_a_value_as_no_other_can_be_cut() -> None:
    shown = fitting([["paused", "key", "reason"], ["model demo", "Ab12Cd34Ef", ""]], 30)
    assert shown is not None
    assert list(aligned(shown, 30)) == ["paused      key         reason", "model demo  Ab12Cd34Ef"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (86_400, "1 d")],
)
def test_an_age_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text
