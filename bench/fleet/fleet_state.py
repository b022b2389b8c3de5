"""What a simulated fleet consists of: jobs, lanes, workers, and the costs it has measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.fleet.fleet_loads import JobKind

TARGET_WAIT_S = 30.0
BULK_WINDOW_S = 86_400.0
SMOOTHING = 0.1  # weight of the newest job in the measured cost of its kind, like in settle.lua


@dataclass(eq=False)
class FleetJob:
    kind: JobKind
    tenant: str
    bulk: bool
    due_s: float | None
    arrival_s: float
    steps_left: float
    start_s: float | None = None
    end_s: float | None = None
    gpu_s: float = 0.0
    forward_rows: float = 0.0


class Lane(NamedTuple):
    """The jobs of one kind, tenant, priority and deadline."""

    kind: JobKind
    tenant: str
    bulk: bool
    due_s: float | None


@dataclass
class MeasuredCost:
    """Smoothed GPU-seconds per slot of a kind, and the mean rows of its forwards."""

    slot_s: float | None = None
    rows: float = 1.0

    def add(self, job: FleetJob) -> None:
        rows = job.forward_rows / job.kind.steps
        if self.slot_s is None:
            self.slot_s, self.rows = job.gpu_s, rows
        else:
            self.slot_s += SMOOTHING * (job.gpu_s - self.slot_s)
            self.rows += SMOOTHING * (rows - self.rows)


@dataclass(eq=False)
class FleetWorker:
    """A worker; it has `tried` to load its models, and has loaded them at `loaded_s`."""

    index: int
    started_s: float
    tried: bool = False
    loaded_s: float | None = None
    failures: int = 0
    kind: JobKind | None = None
    running: list[FleetJob] = field(default_factory=list)
    at_s: float = 0.0
    version: int = 0  # outdated calendar entries have an older one


@dataclass
class FleetState:
    """Jobs, workers and measurements at `now_s`."""

    limits: Mapping[str, int]
    served: Sequence[JobKind]
    curves: Mapping[JobKind, dict[int, float]]
    costs: dict[JobKind, MeasuredCost]
    now_s: float = 0.0
    start_s: float = 0.0
    lanes: dict[Lane, deque[FleetJob]] = field(default_factory=dict)
    by_index: dict[int, FleetWorker] = field(default_factory=dict)

    @property
    def workers(self) -> list[FleetWorker]:
        return list(self.by_index.values())

    @property
    def busy(self) -> int:
        return sum(bool(worker.running) for worker in self.by_index.values())

    @property
    def queued(self) -> int:
        return sum(map(len, self.lanes.values()))

    def by_kind(self) -> dict[JobKind, dict[Lane, deque[FleetJob]]]:
        """Return the lanes of each kind that ever had jobs."""
        kinds: dict[JobKind, dict[Lane, deque[FleetJob]]] = {}
        for lane, jobs in self.lanes.items():
            kinds.setdefault(lane.kind, {})[lane] = jobs
        return kinds

    def age_s(self, jobs: Sequence[FleetJob]) -> float:
        return self.now_s - jobs[0].arrival_s if jobs else 0.0

    def running(self, kind: JobKind) -> int:
        return sum(len(worker.running) for worker in self.by_index.values() if worker.kind is kind)

    def running_of(self, tenant: str) -> int:
        return sum(job.tenant == tenant for worker in self.by_index.values() for job in worker.running)

    def has_free_slots(self, tenant: str) -> bool:
        return tenant not in self.limits or self.running_of(tenant) < self.limits[tenant]

    def beyond_quota(self, tenant: str) -> bool:
        """Return whether the tenant has more jobs than its limit lets start."""
        queued = sum(len(jobs) for lane, jobs in self.lanes.items() if lane.tenant == tenant)
        return tenant in self.limits and self.running_of(tenant) + queued > self.limits[tenant]
