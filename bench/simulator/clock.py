"""Simulated time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Clock:
    """Runs events in the order of their times; those of one time in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._events)

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), event))

    def run(self, until_s: float = math.inf) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
