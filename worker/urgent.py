"""Whether interactive jobs may wait in line: what spares a full worker most of its questions."""

from __future__ import annotations

import time
from collections.abc import Callable

TRUSTED_S = 2.0


class InteractiveHint:
    """Likely from each hint that interactive jobs came, until the queue says that none waits.

    That is believed for `TRUSTED_S`: a hint may have been lost, and a model loaded since.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_since = float("-inf")
        self.hints = 0
        """How many there were: what the queue is asked after one and answers before the next is worth nothing then."""

    def hint(self) -> None:
        """Note that interactive jobs may have come."""
        self.hints += 1
        self._quiet_since = float("-inf")

    def none_waits(self, hints: int) -> None:
        """Note that the queue has none, asked when there had been so many hints."""
        if hints == self.hints:
            self._quiet_since = self._clock()

    @property
    def likely(self) -> bool:
        """Whether to ask for interactive jobs."""
        return self._clock() - self._quiet_since >= TRUSTED_S
