"""Simulated loads of `bench.fleet`: kinds of jobs and when they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
