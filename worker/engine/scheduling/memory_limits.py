"""How many calls fit into memory together: learned where it ran out, and tried again with care."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

# A failed try costs one forward more, so one is made at most every few seconds, and ever more rarely while they fail.
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 3600.0
PROOFS = 20
MOST_CAPS = 1000  # kinds of calls remembered: clients choose sizes, and so how many kinds there are


@dataclass(frozen=True)
class Cap:
    """What is known of one kind of call: `fits` together are safe, `failed` ran out of memory.

    More are tried once `proofs`, the forwards of `fits` calls since `at_s`, are enough and `wait_s` is over.
    """

    fits: int
    failed: int
    at_s: float
    wait_s: float = FIRST_WAIT_S
    proofs: int = 0


def allowed(cap: Cap, now_s: float) -> int:
    """Return how many calls to run together now: those that fit, or a try half-way to the number that failed.

    When one less than what failed is known to fit, the try is that number itself: memory may have come free.
    """
    if cap.proofs < PROOFS or now_s - cap.at_s < cap.wait_s:
        return cap.fits
    return max(cap.fits + 1, (cap.fits + cap.failed) // 2)


def after_success(cap: Cap, calls: int, now_s: float) -> Cap:
    """Return what is known after a forward of so many calls ended well."""
    if calls < cap.fits:
        return cap
    if calls == cap.fits:
        return replace(cap, proofs=cap.proofs + 1)
    if calls < cap.failed:
        return replace(cap, fits=calls, at_s=now_s, proofs=0)
    return Cap(fits=calls, failed=2 * calls, at_s=now_s)  # what failed fits now: nothing is known above it


def after_failure(cap: Cap | None, calls: int, fits: int, now_s: float) -> Cap:
    """Return what is known after a forward of so many calls ran out of memory, and `fits` were tried instead."""
    wait_s = FIRST_WAIT_S if cap is None else min(LONGEST_WAIT_S, 2 * cap.wait_s)
    return Cap(fits=fits, failed=calls, at_s=now_s, wait_s=wait_s)


Kind = tuple[str, str, str]
"""Model, shape, meeting point."""


class MemoryLimits:
    """The caps of one device, by kind of call. Written on the engine's thread, read from any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._caps: dict[Kind, Cap] = {}

    def allowed(self, kind: Kind, most: int) -> int:
        """Return how many calls of a kind may run together now, at most `most`."""
        cap = self._caps.get(kind)
        return most if cap is None else min(most, allowed(cap, self._clock()))

    def caps(self) -> dict[Kind, int]:
        """Return how many calls may run together now, of each kind that ran out of memory."""
        now = self._clock()
        return {kind: allowed(cap, now) for kind, cap in list(self._caps.items())}

    def fits(self, kind: Kind) -> int | None:
        """Return how many calls of a kind are known to fit, None if memory never ran out."""
        cap = self._caps.get(kind)
        return None if cap is None else cap.fits

    def ran(self, kind: Kind, calls: int) -> None:
        """Take in a forward that ended well."""
        cap = self._caps.get(kind)
        if cap is not None:
            self._caps[kind] = after_success(cap, calls, self._clock())

    def ran_out(self, kind: Kind, calls: int, fits: int) -> None:
        """Take in a forward that did not fit, and how many calls are tried together from now on."""
        self._caps[kind] = after_failure(self._caps.pop(kind, None), calls, fits, self._clock())
        if len(self._caps) > MOST_CAPS:
            del self._caps[next(iter(self._caps))]  # the one that failed longest ago
