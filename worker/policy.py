"""Decisions of a worker, as pure functions: the clock and everything measured is passed in."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

PAYING_GAIN = 0.1


def paying_rows(curve: Mapping[int, float], cap: int, gain: float = PAYING_GAIN) -> int:
    """Return the most rows a forward should have: where one more no longer pays, or `cap`.

    `curve` holds measured seconds per forward by rows. With r rows a row costs s(r)/r; between two measured
    counts a < b each further row costs (s(b) - s(a)) / (b - a). It pays while that is at least `gain` below
    what a row costs already. Beyond the largest measured count nothing is known: up to twice of it is tried.
    """
    measured = sorted(rows for rows in curve if 0 < rows <= cap)
    if not measured:
        return cap
    best = measured[0]
    for smaller, larger in pairwise(measured):
        each = (curve[larger] - curve[smaller]) / (larger - smaller)
        if each > (1 - gain) * curve[smaller] / smaller:
            return best
        best = larger
    return min(cap, 2 * best)
