"""How many calls can run together: learned when memory ran out, and raised step by step.

The same limits hold back a number of rows that a model or a kernel refuses.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

# A failed attempt costs an extra forward, so attempts are seconds apart, and further apart after each failure.
FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 3600.0
MIN_SUCCESSES = 20
MAX_CAPS = 1000  # bounded because clients choose the sizes, and with them the number of kinds


@dataclass(frozen=True)
class Cap:
    """Limits of one kind of forward: `fits` calls fit, `failed` calls ran out of memory, or failed, at `at_s`.

    More than `fits` are tried after `MIN_SUCCESSES` forwards of `fits` calls and `retry_s` seconds.
    """

    fits: int
    failed: int
    at_s: float
    retry_s: float = FIRST_RETRY_S
    successes: int = 0


def allowed(cap: Cap, now_s: float) -> int:
    """Return how many calls to run together now: `fits`, or half-way to `failed` as an attempt.

    If one less than `failed` fits, `failed` itself is tried, because memory may have become free.
    """
    if cap.successes < MIN_SUCCESSES or now_s - cap.at_s < cap.retry_s:
        return cap.fits
    return max(cap.fits + 1, (cap.fits + cap.failed) // 2)


def after_success(cap: Cap, calls: int, now_s: float) -> Cap:
    """Return the cap after a forward of `calls` calls that succeeded."""
    if calls < cap.fits:
        return cap
    if calls == cap.fits:
        return replace(cap, successes=cap.successes + 1)
    if calls < cap.failed:
        return replace(cap, fits=calls, at_s=now_s, successes=0)
    return Cap(fits=calls, failed=2 * calls, at_s=now_s)  # nothing is known above what failed before


def after_failure(cap: Cap | None, calls: int, fits: int, now_s: float) -> Cap:
    """Return the cap after `calls` calls ran out of memory and `fits` are tried instead."""
    retry_s = FIRST_RETRY_S if cap is None else min(LONGEST_RETRY_S, 2 * cap.retry_s)
    return Cap(fits=fits, failed=calls, at_s=now_s, retry_s=retry_s)


class ForwardKind(NamedTuple):
    model: str
    shape: str
    method: str


class MemoryLimits:
    """The caps of one device by kind of forward. The engine's thread writes; any thread can read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._caps: dict[ForwardKind, Cap] = {}

    def allowed(self, kind: ForwardKind, limit: int) -> int:
        """Return how many calls of a kind can run together now, at most `limit`."""
        cap = self._caps.get(kind)
        return limit if cap is None else min(limit, allowed(cap, self._clock()))

    def caps(self) -> dict[ForwardKind, int]:
        """Return how many calls can run together now, for each kind that has a limit."""
        now = self._clock()
        return {kind: allowed(cap, now) for kind, cap in list(self._caps.items())}

    def fits(self, kind: ForwardKind) -> int | None:
        """Return how many calls of a kind fit, None if memory never ran out."""
        cap = self._caps.get(kind)
        return None if cap is None else cap.fits

    def forget(self, model: str) -> None:
        """Remove the caps of a model."""
        for kind in [kind for kind in self._caps if kind.model == model]:
            del self._caps[kind]

    def record_success(self, kind: ForwardKind, calls: int) -> None:
        if cap := self._caps.get(kind):
            self._caps[kind] = after_success(cap, calls, self._clock())

    def record_failure(self, kind: ForwardKind, calls: int, fits: int) -> None:
        """Record a forward that ran out of memory or was refused, and the number of calls tried next."""
        self._caps[kind] = after_failure(self._caps.pop(kind, None), calls, fits, self._clock())
        if len(self._caps) > MAX_CAPS:
            del self._caps[next(iter(self._caps))]  # the oldest failure
