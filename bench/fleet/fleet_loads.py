"""Simulated loads of `bench.fleet`: kinds of jobs and when they arrive."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from bench.simulate import CURVES


@dataclass(frozen=True, eq=False)
class JobKind:
    """One signature: steps, seconds per forward of one row, and speedup by rows."""

    name: str
    steps: int
    step_s: float
    gains: dict[int, float]

    def curve(self) -> dict[int, float]:
        """Return seconds per forward by rows."""
        return {rows: self.step_s * rows / gain for rows, gain in self.gains.items()}


SMALL = JobKind("small", 28, 0.05, CURVES["512"])
LARGE = JobKind("large", 40, 0.35, CURVES["1024"])
VIDEO = JobKind("video", 50, 1.2, {1: 1.0, 2: 1.01})


@dataclass(frozen=True)
class FleetLoad:
    """Jobs by arrival, and the least and most seconds a worker needs to load its models."""

    name: str
    arrivals: tuple[tuple[float, JobKind], ...]
    loading_s: tuple[float, float]


def _random_arrivals(
    rate: Callable[[float], float], max_rate: float, span_s: float, rng: random.Random
) -> Iterator[float]:
    """Yield the arrivals of a Poisson process whose `rate` per second varies over time, at most `max_rate`."""
    at_s = rng.expovariate(max_rate)
    while at_s < span_s:
        if rng.random() < rate(at_s) / max_rate:
            yield at_s
        at_s += rng.expovariate(max_rate)


def bursts(seed: int) -> FleetLoad:
    """Every twenty minutes a burst: of small images, of large ones, of videos."""
    rng, arrivals = random.Random(seed), []
    for number in range(12):
        kind, count = ((SMALL, 600), (LARGE, 60), (VIDEO, 20))[number % 3]
        arrivals += [(60 + 1200 * number + rng.uniform(0, 30), kind) for _ in range(count)]
    return FleetLoad("bursts", tuple(sorted(arrivals, key=lambda row: row[0])), (60.0, 180.0))


def daily_wave(seed: int) -> FleetLoad:
    """A day in eight hours: small and large images during the day, videos mostly at night."""
    rng, span_s = random.Random(seed), 8 * 3600.0

    def daylight(at_s: float) -> float:
        return 0.5 - 0.5 * math.cos(2 * math.pi * at_s / span_s)

    arrivals = [(at_s, SMALL) for at_s in _random_arrivals(lambda at: 2.0 * daylight(at), 2.0, span_s, rng)]
    arrivals += [(at_s, LARGE) for at_s in _random_arrivals(lambda at: 0.1 * daylight(at), 0.1, span_s, rng)]
    arrivals += [(at_s, VIDEO) for at_s in _random_arrivals(lambda at: 0.05 * (1 - daylight(at)), 0.05, span_s, rng)]
    return FleetLoad("daily wave", tuple(sorted(arrivals, key=lambda row: row[0])), (60.0, 180.0))


def cold_starts(seed: int) -> FleetLoad:
    """Occasionally a few jobs of one kind, and always the longest loading time."""
    rng, arrivals, at_s = random.Random(seed), [], 0.0
    for _ in range(40):
        at_s += 300 + rng.expovariate(1 / 300)
        kind, most = rng.choice(((SMALL, 80), (LARGE, 20), (VIDEO, 6)))
        arrivals += [(at_s + rng.uniform(0, 10), kind) for _ in range(rng.randint(1, most))]
    return FleetLoad("cold starts", tuple(sorted(arrivals, key=lambda row: row[0])), (180.0, 180.0))


MakeLoad: TypeAlias = Callable[[int], FleetLoad]
LOADS: tuple[MakeLoad, ...] = (bursts, daily_wave, cold_starts)
