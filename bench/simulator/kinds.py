"""What simulated jobs cost, and when they arrive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from shared.autoscaling.efficient_rows import efficient_rows

MAX_BATCH = 8
# Published speedups of batching, one GPU, Qwen-Image: images per second by rows, relative to one row.
GAINS = {
    "512": {1: 1.0, 2: 1.8, 4: 2.8, 8: 3.1},
    "1024": {1: 1.0, 2: 1.02, 4: 1.02, 8: 1.02},
}

Curve: TypeAlias = Mapping[int, float]
"""Seconds per forward by rows."""


def curve_of(gains: Mapping[int, float], step_s: float) -> Curve:
    """Return the cost curve of speedups by rows; a forward of one row takes `step_s`."""
    return {rows: step_s * rows / gain for rows, gain in gains.items()}


def seconds_at(curve: Curve, rows: int) -> float:
    """Interpolate a cost curve linearly; constant above its last point."""
    below = max(known for known in curve if known <= rows)
    above = min((known for known in curve if known >= rows), default=below)
    share = 0.0 if above == below else (rows - below) / (above - below)
    return curve[below] + share * (curve[above] - curve[below])


@dataclass(frozen=True, eq=False)
class JobKind:
    """The jobs of one signature and their usual steps."""

    name: str
    curve: Curve
    model: str
    steps: int

    @cached_property
    def rows(self) -> int:
        """The efficient rows of a batch."""
        return efficient_rows(self.curve, MAX_BATCH)

    @cached_property
    def _seconds(self) -> list[float]:
        return [seconds_at(self.curve, rows) for rows in range(1, MAX_BATCH + 1)]

    def forward_s(self, rows: int) -> float:
        return self._seconds[rows - 1]

    def image_s(self, rows: int) -> float:
        """Return the GPU-seconds of one image in forwards of so many rows."""
        return self.steps * self.forward_s(rows) / rows


class Arrival(NamedTuple):
    """A job that arrives at `at_s`, and is to have ended by `deadline_s`."""

    at_s: float
    kind: JobKind
    steps: int
    tenant: str = "all"
    bulk: bool = False
    deadline_s: float | None = None


@dataclass(eq=False)
class SimulatedJob:
    """A job that has arrived. `end_s` is None for one that was stopped, or has not ended.

    Its forwards have taken `run_s`; its share of them by rows is `gpu_s`, and its least share `least_s`. `start_by_ms`
    is its latest start, None without one or once that has passed; it is in its lane since `in_lane_s`.
    """

    number: int
    arrival: Arrival
    start_s: float | None = None
    end_s: float | None = None
    start_by_ms: int | None = None
    overtaken: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0
    forward_rows: float = 0.0
    least_s: float = math.inf
    kind: JobKind = field(init=False)
    steps_left: float = field(init=False)
    in_lane_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.kind, self.steps_left, self.in_lane_s = self.arrival.kind, self.arrival.steps, self.arrival.at_s

    @property
    def latency_s(self) -> float:
        return (self.end_s or math.inf) - self.arrival.at_s

    @property
    def met(self) -> bool:
        """Whether it ended by its deadline."""
        by_s = self.arrival.deadline_s
        return by_s is not None and self.end_s is not None and self.end_s <= by_s
