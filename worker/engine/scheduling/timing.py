"""How long forwards take, told without holding the device up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Told = Callable[[float], None]

LEARNING = 0.3  # weight of the newest measurement


class ForwardTimer:
    """Measures forwards and learns how long each kind takes.

    On a GPU the host runs ahead of the device by one forward at most: far enough to keep it busy, near enough
    that a job joins and leaves within a step. A measurement is told when its forward has really ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._under_way: deque[tuple[Any, Any, Told]] = deque()
        self._learned: dict[Hashable, float] = {}
        self.last_progress = time.monotonic()
        self.expected_s: float | None = None

    def note_life(self) -> None:
        """Note that the thread got somewhere: work began after a pause, or a picture's own code came to its end."""
        self.last_progress = time.monotonic()

    def learned(self, kind: Hashable) -> float | None:
        """Return how many seconds a forward of this kind takes, None where none has ended yet."""
        return self._learned.get(kind)

    def measure(self, kind: Hashable, run: Callable[[], T], told: Told) -> T:
        """Run a forward; `told(seconds)` is called once it has ended, never if it failed."""
        self.expected_s = self._learned.get(kind)

        def learn(seconds: float) -> None:
            known = self._learned.get(kind)
            self._learned[kind] = seconds if known is None else known + LEARNING * (seconds - known)
            self.last_progress = time.monotonic()
            told(seconds)

        if self._on_device:
            return self._on_events(run, learn)
        started = time.perf_counter()
        result = run()
        learn(time.perf_counter() - started)
        return result

    def _on_events(self, run: Callable[[], T], learn: Told) -> T:
        while len(self._under_way) > 1:
            self._tell_oldest()
        start, end = _event(), _event()
        start.record()
        result = run()
        end.record()
        self._under_way.append((start, end, learn))
        return result

    def _tell_oldest(self) -> None:
        start, end, learn = self._under_way.popleft()
        end.synchronize()
        learn(start.elapsed_time(end) / 1000)

    def settle(self) -> None:
        """Wait for all forwards under way and tell their times."""
        while self._under_way:
            self._tell_oldest()


def _event() -> Any:
    event: Any = torch.cuda.Event
    return event(enable_timing=True)
