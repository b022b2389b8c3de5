"""Simulated loads of `bench.fleet`: kinds of jobs and when they arrive."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from bench.simulator.kinds import GAINS, Arrival, JobKind, curve_of

SMALL = JobKind("small", curve_of(GAINS["512"], 0.05), "small", 28)
LARGE = JobKind("large", curve_of(GAINS["1024"], 0.35), "large", 40)
VIDEO = JobKind("video", curve_of({1: 1.0, 2: 1.01}, 1.2), "video", 50)


def arrival(
    at_s: float, kind: JobKind, tenant: str = "all", *, bulk: bool = False, due_s: float | None = None
) -> Arrival:
    """Return a job of the kind's usual steps; a bulk job can be due."""
    return Arrival(at_s, kind, kind.steps, tenant, bulk, due_s)


@dataclass(frozen=True)
class FleetLoad:
    """Jobs by arrival, and the least and most seconds a worker needs to load its models.

    `limits` are running slots by tenant. No worker serves the kinds in `unserved`. Loads fail while the hub is down,
    from the first to the second time of each pair. `known`: costs and start times were measured before. The simulation
    ends at `until_s`, or with the last job.
    """

    name: str
    arrivals: tuple[Arrival, ...]
    loading_s: tuple[float, float]
    limits: Mapping[str, int] = field(default_factory=dict)
    unserved: tuple[JobKind, ...] = ()
    hub_down: tuple[tuple[float, float], ...] = ()
    known: bool = False
    until_s: float | None = None
    cool_down_s: float = 60.0

    def hub_fails(self, from_s: float, to_s: float) -> bool:
        """Return whether the hub is down at any time between the two."""
        return any(from_s < end and to_s >= begin for begin, end in self.hub_down)


def by_time(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    return tuple(sorted(arrivals, key=lambda one: one.at_s))


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
        arrivals += [arrival(60 + 1200 * number + rng.uniform(0, 30), kind) for _ in range(count)]
    return FleetLoad("bursts", by_time(arrivals), (60.0, 180.0))


def daily_wave(seed: int) -> FleetLoad:
    """A day in eight hours: small and large images during the day, videos mostly at night."""
    rng, span_s = random.Random(seed), 8 * 3600.0

    def daylight(at_s: float) -> float:
        return 0.5 - 0.5 * math.cos(2 * math.pi * at_s / span_s)

    arrivals = [arrival(at_s, SMALL) for at_s in _random_arrivals(lambda at: 2.0 * daylight(at), 2.0, span_s, rng)]
    arrivals += [arrival(at_s, LARGE) for at_s in _random_arrivals(lambda at: 0.1 * daylight(at), 0.1, span_s, rng)]
    arrivals += [
        arrival(at_s, VIDEO) for at_s in _random_arrivals(lambda at: 0.05 * (1 - daylight(at)), 0.05, span_s, rng)
    ]
    return FleetLoad("daily wave", by_time(arrivals), (60.0, 180.0))


def cold_starts(seed: int) -> FleetLoad:
    """Occasionally a few jobs of one kind, and always the longest loading time."""
    rng, arrivals, at_s = random.Random(seed), [], 0.0
    for _ in range(40):
        at_s += 300 + rng.expovariate(1 / 300)
        kind, most = rng.choice(((SMALL, 80), (LARGE, 20), (VIDEO, 6)))
        arrivals += [arrival(at_s + rng.uniform(0, 10), kind) for _ in range(rng.randint(1, most))]
    return FleetLoad("cold starts", by_time(arrivals), (180.0, 180.0))


MakeLoad: TypeAlias = Callable[[int], FleetLoad]
LOADS: tuple[MakeLoad, ...] = (bursts, daily_wave, cold_starts)
