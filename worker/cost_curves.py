"""Seconds per forward by rows, as measured on this worker."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from shared.queue import Queue
from worker.engine import ForwardDone

MAX_KEPT = 1000  # shapes, and signatures: clients choose among many sizes, and a worker lives long
TELL_AGAIN_S = 3600.0  # Redis forgets within a day what is not told again
SAMPLES = 60
TRUSTED_SAMPLES = 8
MEMORY_S = 600.0
MEMORY_FORWARDS = 1000

PAYING_GAIN = 0.05
"""By what share a further row must cost less than those before it. The published 1024² curve, which gains 2% from
rows, stays below it; small shapes on a CPU, at 12%, stay above it on a noisy machine too."""

Shape = tuple[str, str, str]  # device, model, tensor shape
K = TypeVar("K")
V = TypeVar("V")


def efficient_rows(curve: Mapping[int, float], cap: int, gain: float = PAYING_GAIN) -> int:
    """Return the most rows a forward should have: where one more no longer pays, or `cap`.

    `curve` holds measured seconds per forward by rows. With r rows a row costs s(r)/r; from a to b rows each further
    one costs (s(b) - s(a)) / (b - a). They pay where that is at least `gain` below what a row costs already. A count
    is compared with one of at most half of it that pays: between counts nearer to each other a hiccup decides. One
    that does not pay ends nothing, as a larger one may. Beyond the largest measured count nothing is known: up to
    twice of it is tried.
    """
    measured = sorted(rows for rows in curve if 0 < rows <= cap)
    if not measured:
        return cap
    paying: list[int] = []
    for rows in measured:
        half = max((fewer for fewer in paying if 2 * fewer <= rows), default=None)
        if half is None or (curve[rows] - curve[half]) / (rows - half) <= (1 - gain) * curve[half] / half:
            paying.append(rows)
    return min(cap, 2 * paying[-1]) if paying[-1] == measured[-1] else paying[-1]


class Sample(NamedTuple):
    """One forward: when it ended (`time.monotonic()`), how many of its shape had before it, and seconds."""

    at_s: float
    number: int
    seconds: float


class Measured:
    """The forwards of one shape. The median of the last ones of a row count stands for it: no hiccup does.

    A measurement is forgotten after `MEMORY_S`, or `MEMORY_FORWARDS` more of the shape: what was seen in a slow moment
    is not held against a row count, nor what was in a fast one for it, once that is long over. It is tried again.
    """

    def __init__(self) -> None:
        self._forwards = 0
        self._samples: dict[int, deque[Sample]] = {}
        self._medians: dict[int, float] = {}  # as long as the samples are the same

    def add(self, rows: int, seconds: float) -> None:
        """Take in a forward."""
        self._forwards += 1
        samples = self._samples.setdefault(rows, deque(maxlen=SAMPLES))
        samples.append(Sample(time.monotonic(), self._forwards, seconds))
        self._medians.pop(rows, None)

    def curve(self) -> dict[int, float]:
        """Return seconds per forward of each row count that was measured often enough."""
        now = time.monotonic()
        curve = {}
        for rows, samples in self._samples.items():
            while samples and (
                now - samples[0].at_s > MEMORY_S or self._forwards - samples[0].number > MEMORY_FORWARDS
            ):
                samples.popleft()
                self._medians.pop(rows, None)
            if len(samples) >= TRUSTED_SAMPLES:
                if rows not in self._medians:
                    self._medians[rows] = statistics.median(sample.seconds for sample in samples)
                curve[rows] = self._medians[rows]
        return curve


class CostCurves:
    """Learns how long forwards of each shape take, and says how many rows pay."""

    def __init__(self) -> None:
        self._measured: dict[Shape, Measured] = {}
        self._untold: dict[tuple[Shape, int], list[float]] = {}
        self._shape_of: dict[str, Shape] = {}
        self._paying: dict[str, int] = {}
        self._recalled: dict[Shape, tuple[float, dict[int, float]] | None] = {}  # None: not asked for yet
        self._told: dict[str, tuple[int, float]] = {}  # rows, time.monotonic()

    def measure(self, signature: str, facts: ForwardDone) -> None:
        """Take in one forward of the jobs of `signature`."""
        shape = (facts.device, facts.model, facts.shape)
        _keep(self._shape_of, signature, shape)
        rows = facts.rows + facts.padding
        _keep(self._measured, shape, self._measured.get(shape) or Measured()).add(rows, facts.seconds)
        self._untold.setdefault((shape, rows), []).append(facts.seconds)
        if shape not in self._recalled:
            _keep(self._recalled, shape, None)

    def rows(self, signature: str, cap: int) -> int:
        """Return how many rows a forward of `signature` should have at most."""
        shape = self._shape_of.get(signature)
        rows = cap if shape is None else efficient_rows(self._curve(shape), cap)
        self._paying[signature] = rows
        return rows

    def _curve(self, shape: Shape) -> dict[int, float]:
        recalled = self._recalled.get(shape)
        curve = dict(recalled[1]) if recalled is not None and time.monotonic() - recalled[0] <= MEMORY_S else {}
        measured = self._measured.get(shape)
        return curve if measured is None else curve | measured.curve()

    async def recall(self, queue: Queue) -> None:
        """Read what was learned before, by others or a probe, of shapes that are new here.

        It serves until this worker has measured a row count itself, and is forgotten like its own measurements.
        """
        for shape in [shape for shape, known in self._recalled.items() if known is None]:
            _keep(self._recalled, shape, (time.monotonic(), await queue.workers.cost_curve(*shape)))

    async def teach(self, queue: Queue) -> None:
        """Write what was measured since the last call where the API and later workers find it."""
        untold, self._untold = self._untold, {}
        for (shape, rows), seconds in untold.items():
            await queue.workers.learn_cost(*shape, rows, statistics.median(seconds))
        paying, self._paying = self._paying, {}
        now = time.monotonic()
        for signature, rows in paying.items():
            told, at = self._told.get(signature, (0, 0.0))
            if told != rows or now - at > TELL_AGAIN_S:
                await queue.claims.learn_efficient_rows(signature, rows)
                _keep(self._told, signature, (rows, now))


def _keep(known: dict[K, V], name: K, value: V) -> V:
    """Set `name` to `value` as the newest entry; the oldest goes where there are too many."""
    known.pop(name, None)
    known[name] = value
    if len(known) > MAX_KEPT:
        del known[next(iter(known))]
    return value
