"""Times of forwards and of the engine's thread, measured without blocking the device."""

import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from cachetools import LRUCache

from worker.engine.engine_status import ThreadTime

T = TypeVar("T")
OnDone = Callable[[float], None]

LEARNING_RATE = 0.3  # weight of the newest measurement
MAX_KINDS = 4096  # clients choose the sizes, and with them the number of kinds


class RunningMeasurement(NamedTuple):
    """Two events on a GPU, and what is called with the seconds between them."""

    start: Any
    end: Any
    on_done: OnDone
    is_forward: bool


class ForwardTimer:
    """Measures forwards, and their image tasks' own code after them; learns the times of each kind.

    On a GPU the host runs ahead of the device by at most one forward: enough to keep it busy, and little enough that
    jobs join and leave within a step. A measurement is reported once its forward has ended on the device.

    While the thread is busy, each measurement begins where the last one ended, so that their sum is the busy time: what
    the thread does before a forward, such as selecting its calls, is a measurement of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._running: deque[RunningMeasurement] = deque()
        self._forward_s: LRUCache[Hashable, float] = LRUCache(MAX_KINDS)
        self._own_code_s: LRUCache[Hashable, float] = LRUCache(MAX_KINDS)
        self._ended: Any = None  # when the last forward ended, until its tasks are parked again
        self._measured: Any = None  # until when the present busy time is measured
        self.last_progress_s = time.monotonic()
        self.expected_s: float | None = None

    def note_progress(self) -> None:
        """Record progress other than a forward's: work began after a pause, or an image task's own code ended."""
        self.last_progress_s = time.monotonic()

    def begin_busy(self) -> None:
        """Measure from now on: the thread has image tasks to run."""
        self._measured = self._now()

    def end_busy(self) -> None:
        """Measure nothing until the thread is busy again."""
        self._measured = None

    def learned_s(self, kind: Hashable) -> float | None:
        """Return the seconds of a forward of this kind and of the own code after it, None if none has ended yet."""
        forward_s = self._forward_s.get(kind)
        return None if forward_s is None else forward_s + self.own_code_s(kind)

    def own_code_s(self, kind: Hashable) -> float:
        """Return the seconds from the end of a forward of this kind until all its image tasks are parked again."""
        return self._own_code_s.get(kind, 0.0)

    def forget(self, model: str) -> None:
        """Remove the times of a model, whose name begins its kinds."""
        for learned in (self._forward_s, self._own_code_s):
            for kind in [kind for kind in learned if isinstance(kind, tuple) and kind[:1] == (model,)]:
                del learned[kind]

    def measure(self, kind: Hashable, run: Callable[[], T], on_done: OnDone, on_before: OnDone | None = None) -> T:
        """Run a forward; `on_done(seconds)` is called once it has ended, never if it failed.

        `on_before(seconds)` is called with the time since the last measurement.
        """
        self.expected_s = self._forward_s.get(kind)

        def learn(seconds: float) -> None:
            _learn(self._forward_s, kind, seconds)
            self.last_progress_s = time.monotonic()
            on_done(seconds)

        while sum(measurement.is_forward for measurement in self._running) > 1:
            self._await_oldest()
        start = self._now()
        if on_before is not None and self._measured is not None:
            self._report(RunningMeasurement(self._measured, start, on_before, is_forward=False))
        result = run()
        self._ended = self._now()
        self._report(RunningMeasurement(start, self._ended, learn, is_forward=True))
        return result

    def note_parked(self, kind: Hashable, on_done: OnDone) -> None:
        """Record that all tasks of the last forward, if one ran since the last call, are parked again or done.

        Noise schedulers and the rest of a pipeline's own code run row by row: with small models and many rows they take
        as long as the forward. `on_done(seconds)` is called with their time.
        """
        ended, self._ended = self._ended, None

        def learn(seconds: float) -> None:
            _learn(self._own_code_s, kind, seconds)
            on_done(seconds)

        if ended is not None:
            self.end_own_code(ended, learn)

    def begin_own_code(self) -> Any:
        """Return the start of a measurement of own code before a first forward, for `end_own_code`."""
        return self._now() if self._measured is None else self._measured

    def end_own_code(self, start: Any, on_done: OnDone) -> None:
        """End a measurement; `on_done(seconds)` is called once the device has done that work."""
        self._report(RunningMeasurement(start, self._now(), on_done, is_forward=False))

    def measure_rest(self, on_done: OnDone) -> None:
        """Measure the busy time since the last measurement."""
        if self._measured is not None:
            self.end_own_code(self._measured, on_done)

    def _now(self) -> Any:
        if not self._uses_events:
            return time.perf_counter()
        event: Any = torch.cuda.Event
        now = event(enable_timing=True)
        now.record()
        return now

    def _report(self, measurement: RunningMeasurement) -> None:
        if self._measured is not None:
            self._measured = measurement.end
        if self._uses_events:
            self._running.append(measurement)
        else:
            measurement.on_done(measurement.end - measurement.start)

    def _await_oldest(self) -> None:
        oldest = self._running.popleft()
        oldest.end.synchronize()
        oldest.on_done(oldest.start.elapsed_time(oldest.end) / 1000)

    def drain(self) -> None:
        """Wait for all running forwards and report their times."""
        while self._running:
            self._await_oldest()


def _learn(learned: LRUCache[Hashable, float], kind: Hashable, seconds: float) -> None:
    known = learned.get(kind)
    learned[kind] = seconds if known is None else known + LEARNING_RATE * (seconds - known)


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

    def note_busy(self, now_s: float) -> None:
        """Record that an image task can run: jobs that waited for a model start without an arrival."""
        if not self.busy:
            self._since_s, self.busy = now_s, True

    def note_job(self, now_s: float, queued_since_s: float) -> None:
        """Record the arrival of a job that was queued since `queued_since_s`."""
        if not self.busy:
            self._idle_while_queued_s += max(0.0, now_s - max(self._since_s, queued_since_s))
            self._since_s, self.busy = now_s, True

    def time(self, now_s: float) -> ThreadTime:
        """Return both times up to now."""
        busy_s = self._busy_s + (now_s - self._since_s if self.busy else 0.0)
        return ThreadTime(busy_s, self._idle_while_queued_s)
