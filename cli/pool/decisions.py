"""How many workers a pool aims at, and which it starts and drains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WorkerState = Literal["starting", "ready", "failing", "draining"]


@dataclass(frozen=True)
class PoolBounds:
    """Limits of a pool; a number of wanted workers counts for `cool_down_s`."""

    min_workers: int
    max_workers: int
    cool_down_s: float


@dataclass(frozen=True)
class WantedWorkers:
    """Workers that the service wanted at `at_s`."""

    at_s: float
    workers: int


@dataclass(frozen=True)
class PoolWorker:
    """A worker of the pool by its index from 0; `running` are its jobs, None before its first heartbeat.

    A failing worker has ended more than once in a row and is not ready.
    """

    index: int
    state: WorkerState
    started_s: float
    running: int | None = None


@dataclass(frozen=True)
class WorkerChanges:
    """Indexes of workers to start and to drain."""

    start: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()


def recent_wants(
    wants: Sequence[WantedWorkers], latest: WantedWorkers, cool_down_s: float
) -> tuple[WantedWorkers, ...]:
    """Return the wants within the cool-down that exceed all later ones, the largest first.

    The result has at most one entry per number of workers.
    """
    kept = [want for want in wants if latest.at_s - want.at_s < cool_down_s and want.workers > latest.workers]
    return (*kept, latest)


def target_workers(wants: Sequence[WantedWorkers], others: int, bounds: PoolBounds) -> int:
    """Return how many workers this pool aims at; `others` are workers of the service outside this pool."""
    wanted = max((want.workers for want in wants), default=0)
    return min(bounds.max_workers, max(bounds.min_workers, wanted - others))


def plan_changes(workers: Sequence[PoolWorker], target: int, max_workers: int) -> WorkerChanges:
    """Return the changes that bring the pool to `target` workers.

    A failing worker does not count: another is started if an index is free, and it is drained once enough workers are
    ready; draining it sooner would reset its restart backoff. Surplus workers are drained if idle, youngest first.
    """
    counted = [worker for worker in workers if worker.state in ("starting", "ready")]
    missing = target - len(counted)
    if missing > 0:
        used = {worker.index for worker in workers}
        return WorkerChanges(start=tuple(index for index in range(max_workers) if index not in used)[:missing])
    idle = [worker for worker in counted if worker.state == "starting" or worker.running == 0]
    idle.sort(key=lambda worker: (worker.started_s, worker.index), reverse=True)
    surplus = [worker.index for worker in idle[: len(counted) - target]]
    enough = sum(worker.state == "ready" for worker in counted) >= target
    failing = [worker.index for worker in workers if worker.state == "failing"] if enough else []
    return WorkerChanges(drain=(*surplus, *failing))
