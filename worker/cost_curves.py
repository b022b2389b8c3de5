"""Batch cost curves: seconds per step, from one forward to the next, by rows; shared through Redis."""

import statistics
import time
from collections import deque
from typing import NamedTuple

from cachetools import LRUCache

from shared.autoscaling.efficient_rows import efficient_rows
from shared.queue import Queue
from worker.engine.protocol import ForwardDone

MIN_SAMPLES = 8
MAX_SAMPLES = 60
SAMPLES_KEPT_S = 600.0
SAMPLES_KEPT_FORWARDS = 1000
MAX_CURVES = 128
"""Clients choose among many sizes. A curve of eight row counts takes 85 KB, so all take 11 MB at most."""
RESEND_AFTER_S = 3600.0  # Redis keeps efficient rows for a day

Shape = tuple[str, str, str]  # device, model, tensor shape


class CostCurves:
    """Cost curves by shape, and the efficient rows of each signature."""

    def __init__(self) -> None:
        self._measured: LRUCache[Shape, MeasuredCurve] = LRUCache(MAX_CURVES)
        # None: not read from Redis yet
        self._loaded: LRUCache[Shape, tuple[float, dict[int, float]] | None] = LRUCache(MAX_CURVES)
        self._shapes: LRUCache[str, Shape] = LRUCache(MAX_CURVES)  # by signature
        self._unsaved: dict[tuple[Shape, int], list[float]] = {}
        self._unsaved_rows: dict[str, int] = {}
        self._saved_rows: LRUCache[str, tuple[int, float]] = LRUCache(MAX_CURVES)  # rows, time.monotonic()

    def add(self, signature: str, forward: ForwardDone) -> None:
        """Add a forward of jobs of `signature`."""
        shape = (forward.device, forward.model, forward.shape)
        rows = forward.rows + forward.padding
        self._shapes[signature] = shape
        self._measured.setdefault(shape, MeasuredCurve()).add(rows, forward.step_s)
        self._loaded.setdefault(shape, None)
        self._unsaved.setdefault((shape, rows), []).append(forward.step_s)

    def rows(self, signature: str, cap: int) -> int:
        """Return the most rows that a forward of `signature` should have."""
        shape = self._shapes.get(signature)
        rows = cap if shape is None else efficient_rows(self._curve(shape), cap)
        self._unsaved_rows[signature] = rows
        return rows

    def _curve(self, shape: Shape) -> dict[int, float]:
        loaded, measured = self._loaded.get(shape), self._measured.get(shape)
        curve = dict(loaded[1]) if loaded is not None and time.monotonic() - loaded[0] <= SAMPLES_KEPT_S else {}
        return curve if measured is None else curve | measured.curve()

    async def load(self, queue: Queue) -> None:
        """Read the saved curves of new shapes: used until this worker has its own measurements, and kept as long."""
        for shape in [shape for shape, loaded in self._loaded.items() if loaded is None]:
            self._loaded[shape] = (time.monotonic(), await queue.workers.cost_curve(*shape))

    async def save(self, queue: Queue) -> None:
        """Save what was measured since the last call, for the API and for other workers."""
        unsaved, self._unsaved = self._unsaved, {}
        for (shape, rows), seconds in unsaved.items():
            await queue.workers.learn_cost(*shape, rows, statistics.median(seconds))
        unsaved_rows, self._unsaved_rows = self._unsaved_rows, {}
        now = time.monotonic()
        for signature, rows in unsaved_rows.items():
            saved_rows, saved_at = self._saved_rows.get(signature, (0, 0.0))
            if saved_rows != rows or now - saved_at > RESEND_AFTER_S:
                await queue.claims.learn_efficient_rows(signature, rows)
                self._saved_rows[signature] = (rows, now)


class _Sample(NamedTuple):
    """`forward` is the number of the forward among those of its shape."""

    measured_at_s: float
    forward: int
    seconds: float


class MeasuredCurve:
    """Measurements of one shape: the median of the last samples of each row count.

    Samples expire after `SAMPLES_KEPT_S` or `SAMPLES_KEPT_FORWARDS`, so that a row count measured while the machine was
    busy is tried again.
    """

    def __init__(self) -> None:
        self._forwards = 0
        self._samples: dict[int, deque[_Sample]] = {}
        self._medians: dict[int, float] = {}  # of unchanged samples

    def add(self, rows: int, seconds: float) -> None:
        self._forwards += 1
        samples = self._samples.setdefault(rows, deque(maxlen=MAX_SAMPLES))
        samples.append(_Sample(time.monotonic(), self._forwards, seconds))
        self._medians.pop(rows, None)

    def curve(self) -> dict[int, float]:
        """Return seconds by rows, for row counts with at least `MIN_SAMPLES` samples."""
        now = time.monotonic()
        curve = {}
        for rows, samples in self._samples.items():
            while samples and (
                now - samples[0].measured_at_s > SAMPLES_KEPT_S
                or self._forwards - samples[0].forward > SAMPLES_KEPT_FORWARDS
            ):
                samples.popleft()
                self._medians.pop(rows, None)
            if len(samples) >= MIN_SAMPLES:
                if rows not in self._medians:
                    self._medians[rows] = statistics.median(sample.seconds for sample in samples)
                curve[rows] = self._medians[rows]
        return curve
