"""What a simulated fleet consists of: its queue, workers, and the costs it has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulator.kinds import JobKind, SimulatedJob
from bench.simulator.queue import LaneJobs, SimulatedQueue
from bench.simulator.simulation import SimulatedWorker

TARGET_WAIT_S = 30.0
BULK_WINDOW_S = 86_400.0
SMOOTHING = 0.1  # weight of the newest job in the measured cost of its kind, like in settle.lua


@dataclass
class MeasuredCost:
    """Smoothed GPU-seconds per slot of a kind, and the mean rows of its forwards."""

    slot_s: float | None = None
    rows: float = 1.0

    def add(self, job: SimulatedJob) -> None:
        rows = job.forward_rows / job.arrival.steps
        if self.slot_s is None:
            self.slot_s, self.rows = job.gpu_s, rows
        else:
            self.slot_s += SMOOTHING * (job.gpu_s - self.slot_s)
            self.rows += SMOOTHING * (rows - self.rows)


@dataclass(eq=False, kw_only=True)
class FleetWorker(SimulatedWorker):
    """A worker; it has `tried` to load its models, and has loaded them at `loaded_s`."""

    index: int
    started_s: float
    tried: bool = False
    loaded_s: float | None = None
    failures: int = 0


@dataclass
class FleetState:
    """Queue, workers and measurements at `now_s`; `start_s` is the measured time of a start."""

    queue: SimulatedQueue
    served: Sequence[JobKind]
    costs: dict[JobKind, MeasuredCost]
    now_s: float = 0.0
    start_s: float = 0.0
    by_index: dict[int, FleetWorker] = field(default_factory=dict)

    @property
    def workers(self) -> list[FleetWorker]:
        return list(self.by_index.values())

    def age_s(self, jobs: LaneJobs) -> float:
        return self.now_s - jobs.oldest_s if jobs else 0.0

    def running(self, kind: JobKind) -> int:
        return sum(len(worker.running) for worker in self.by_index.values() if worker.kind is kind)

    def beyond_quota(self, tenant: str) -> bool:
        """Return whether the tenant has more jobs than its limit lets start."""
        if tenant not in self.queue.limits:
            return False
        queued = sum(len(jobs) for lane, jobs in self.queue.lanes() if lane.tenant == tenant)
        return self.queue.running[tenant] + queued > self.queue.limits[tenant]
