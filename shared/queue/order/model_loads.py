"""Models in a worker's memory go first, within bounds."""

from __future__ import annotations

LOADS_WAITED = 3
"""While a worker has work for a loaded model, other models wait for this many times their load time."""


def sort_ms(ready_ms: float, load_ms: float, holders: int) -> float:
    """Return the time that orders a signature among others; `holders` are other workers that hold its model."""
    return ready_ms + LOADS_WAITED * load_ms * (2 if holders else 1)


def free_at(ready_ms: float, load_ms: float, holders: int, work_ms: float) -> float:
    """Return from when an idle worker can claim a signature.

    A model held by others is left to them for one load time, after which loading it would have been worth it; at once
    if each holder has more than one load time of work.
    """
    return ready_ms if not holders or work_ms > load_ms * holders else ready_ms + load_ms
