"""Jobs with a deadline go before the others of their tenant and priority, which they overtake a few times each."""

from __future__ import annotations

MOST_OVERTAKEN = 3
"""How often jobs with a deadline overtake a signature or a job that has waited for `aging_ms`."""

OVERTAKEN, DATED, UNDATED = 0, 1, 2


def turn(*, start_by: int | None, overtaken: int, aged: bool) -> int:
    """Return the turn of a signature or a job among others of its tenant and priority; lower ones go first."""
    if start_by is not None:
        return DATED
    return OVERTAKEN if aged and overtaken >= MOST_OVERTAKEN else UNDATED
