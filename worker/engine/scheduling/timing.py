"""Times of forwards and of the engine's thread, measured without blocking the device."""

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from worker.engine.protocol import ThreadTime

T = TypeVar("T")
OnDone = Callable[[float], None]

LEARNING_RATE = 0.3  # weight of the newest measurement


class ForwardTimer:
    """Measures forwards and learns the time of each kind.

    On a GPU the host runs ahead of the device by at most one forward: enough to keep it busy, and little enough that
    jobs join and leave within a step. A measurement is reported once its forward has ended on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._running: deque[tuple[Any, Any, OnDone]] = deque()
        self._learned_s: dict[Hashable, float] = {}
        self.last_progress_s = time.monotonic()
        self.expected_s: float | None = None

    def note_progress(self) -> None:
        """Record progress other than a forward's: work began after a pause, or an image task's own code ended."""
        self.last_progress_s = time.monotonic()

    def learned_s(self, kind: Hashable) -> float | None:
        """Return the seconds of a forward of this kind, None if none has ended yet."""
        return self._learned_s.get(kind)

    def measure(self, kind: Hashable, run: Callable[[], T], on_done: OnDone) -> T:
        """Run a forward; `on_done(seconds)` is called once it has ended, never if it failed."""
        self.expected_s = self._learned_s.get(kind)

        def learn(seconds: float) -> None:
            known = self._learned_s.get(kind)
            self._learned_s[kind] = seconds if known is None else known + LEARNING_RATE * (seconds - known)
            self.last_progress_s = time.monotonic()
            on_done(seconds)

        if not self._uses_events:
            started = time.perf_counter()
            result = run()
            learn(time.perf_counter() - started)
            return result
        while len(self._running) > 1:
            self._await_oldest()
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        result = run()
        end.record()
        self._running.append((start, end, learn))
        return result

    def _await_oldest(self) -> None:
        start, end, learn = self._running.popleft()
        end.synchronize()
        learn(start.elapsed_time(end) / 1000)

    def drain(self) -> None:
        """Wait for all running forwards and report their times."""
        while self._running:
            self._await_oldest()


class ThreadTimer:
    """Adds up the engine thread's busy time, and its idle time while a job was queued.

    Times are of `time.monotonic()`. One thread writes; any thread can read.
    """

    def __init__(self, now_s: float) -> None:
        self._idle_while_queued_s = 0.0
        self._busy_s = 0.0
        self._since_s = now_s
        self.busy = False

    def note_idle(self, now_s: float) -> None:
        """Record that no image task can run."""
        if self.busy:
            self._busy_s += now_s - self._since_s
            self._since_s, self.busy = now_s, False

    def note_job(self, now_s: float, queued_since_s: float) -> None:
        """Record the arrival of a job that was queued since `queued_since_s`."""
        if not self.busy:
            self._idle_while_queued_s += max(0.0, now_s - max(self._since_s, queued_since_s))
            self._since_s, self.busy = now_s, True

    def time(self, now_s: float) -> ThreadTime:
        """Return both times up to now."""
        busy_s = self._busy_s + (now_s - self._since_s if self.busy else 0.0)
        return ThreadTime(busy_s, self._idle_while_queued_s)
