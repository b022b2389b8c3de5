"""Efficient rows: the largest row count of a batch cost curve that still lowers the cost per row."""

from collections.abc import Mapping

EFFICIENT_GAIN = 0.05
"""Minimal saving per row. The published 1024² curve, which gains 2% from rows, stays below it; small shapes on a CPU,
at 12%, stay above it on a noisy machine too."""


def efficient_rows(curve: Mapping[int, float], cap: int, gain: float = EFFICIENT_GAIN) -> int:
    """Return the largest number of rows, up to `cap`, for which further rows are efficient.

    `curve` is the seconds s(r) of a forward by its rows r. Rows from a to b are efficient when each costs
    (s(b) - s(a)) / (b - a), at least `gain` less than s(a) / a. A row count is compared with an efficient one of at
    most its half: between closer counts a single slow forward would decide. A larger count can be efficient although a
    smaller one is not. Beyond the largest measured count, up to twice as many rows are tried.
    """
    measured = sorted(rows for rows in curve if 0 < rows <= cap)
    if not measured:
        return cap
    efficient: list[int] = []
    for rows in measured:
        half = max((fewer for fewer in efficient if 2 * fewer <= rows), default=None)
        if half is None or (curve[rows] - curve[half]) / (rows - half) <= (1 - gain) * curve[half] / half:
            efficient.append(rows)
    return min(cap, 2 * efficient[-1]) if efficient[-1] == measured[-1] else efficient[-1]
