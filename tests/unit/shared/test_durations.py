"""Durations in commands and headers."""

from __future__ import annotations

import pytest

from shared.durations import duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("30m", 1800), ("12h", 43_200), ("90d", 7_776_000), ("1h30m", 5400), ("1d1s", 86_401), ("0s", 0)],
)
def test_a_duration_is_the_sum_of_its_parts(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1.5h", "1y", "30m1h", "1h 30m", "1H", "\n", "9999999999s"])
def test_another_text_is_none(text: str) -> None:
    assert duration_s(text) is None
