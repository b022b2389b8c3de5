"""The grace of leases: a time without renewals, as an outage of Redis, is followed by one in which holders renew."""

from __future__ import annotations

from typing import NamedTuple

AHEAD_MS = 1_000
"""A later time than this from now was written before the clock was set back."""

LONGEST_MS = 10_000
"""Two command timeouts: how long a worker can take to notice that Redis is back."""

CHORES_MS = 15_000
"""The chores reclaim at least this often."""

CHORES_ALONE = 3
"""Calls of the chores with none of a worker between them, after which there is no worker."""


class Grace(NamedTuple):
    """Leases that ended before `before_ms` can be reclaimed; when the last gap ended, and how many calls in a row were
    gaps."""

    before_ms: int
    gap_ms: int | None
    gaps: int


def decide(*, now: int, lease: int, last: int | None = None, gap: int | None = None, gaps: int = 0) -> Grace:
    """Return which leases can be reclaimed, from the `last` call, which each worker makes eight times in a lease.

    A call that ends a gap reclaims nothing, whatever came before it: of two outages with a moment between them, that
    moment was too short to renew. With leases of less than 20 s each call of the chores is a gap while no worker is
    there: some of them in a row are no outages.
    """
    if gap is not None and gap > now:  # the clock was set back
        gap = None
    if last is not None and now - last > lease / 2:
        gaps = gaps + 1 if now - last <= CHORES_MS else 1
        return Grace(now if gaps >= CHORES_ALONE else 0, now, gaps)
    over = gap is None or now - gap >= min(lease, LONGEST_MS)
    return Grace(now if over else 0, gap, 0)
