"""`python -m bench.fleet`: GPU-seconds and waits of a fleet by scaling policy, in simulated time.

Workers need minutes to load their models and then batch continuously. `wanted_workers`, with the measured costs of the
simulated jobs, is compared with scaling on queue length: one worker per K queued jobs. K is chosen for each load with
hindsight: the one with the fewest GPU-seconds whose 95th percentile of waits is not longer, once over all jobs and once
for each kind of job. Polls, cool-down, starts and drains are those of `fusequeue pool` for both.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from bench.fleet.fleet_loads import LARGE, LOADS, SMALL, VIDEO, FleetLoad, JobKind
from bench.simulate import seconds_at
from cli.pool.pool import PoolBounds, PoolWorker, WantedWorkers, plan_changes, recent_wants, target_workers
from shared.autoscaling import Fleet, SignatureLoad, wanted_workers
from worker.cost_curves import efficient_rows

POLL_S = 5.0
COOL_DOWN_S = 60.0
TARGET_WAIT_S = 30.0
MAX_WORKERS = 16
MAX_BATCH = 8
OVERDUE_S = 2.0
SMOOTHING = 0.1  # weight of the newest job in the measured cost of its kind, like in settle.lua
K_VALUES = (*range(1, 21), 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 400)


@dataclass(eq=False)
class FleetJob:
    kind: JobKind
    arrival_s: float
    steps_left: float = 0.0
    start_s: float = 0.0
    gpu_s: float = 0.0
    forward_rows: float = 0.0


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
    index: int
    started_s: float
    ready_s: float
    kind: JobKind | None = None
    running: list[FleetJob] = field(default_factory=list)
    at_s: float = 0.0
    version: int = 0  # outdated calendar entries have an older one


Policy: TypeAlias = Callable[[Sequence[SignatureLoad], Fleet], int]


def by_cost(loads: Sequence[SignatureLoad], fleet: Fleet) -> int:
    return wanted_workers(loads, fleet, TARGET_WAIT_S).wanted


def by_length(jobs_per_worker: int) -> Policy:
    """Return the policy of one worker per so many queued jobs, but never fewer than the busy ones."""

    def wanted(loads: Sequence[SignatureLoad], fleet: Fleet) -> int:
        return max(fleet.busy, math.ceil(sum(load.queued_slots for load in loads) / jobs_per_worker))

    return wanted


@dataclass(frozen=True)
class FleetOutcome:
    """GPU-seconds over the lifetime of all workers, and how long jobs waited for a slot."""

    gpu_s: float
    waits_s: tuple[tuple[JobKind, float], ...]
    max_workers: int

    def wait_s(self, share: float, kind: JobKind | None = None) -> float:
        """Return a percentile of the waits of all jobs, or of one kind."""
        waits = sorted(wait for job_kind, wait in self.waits_s if kind in (None, job_kind))
        return waits[min(len(waits) - 1, int(share * len(waits)))]

    def no_longer_than(self, other: FleetOutcome, *, each_kind: bool) -> bool:
        """Return whether the 95th percentile is at most the other's, over all jobs or also for each kind."""
        kinds = {kind for kind, _ in self.waits_s} if each_kind else set()
        return all(self.wait_s(0.95, kind) <= other.wait_s(0.95, kind) for kind in (None, *kinds))


class FleetSimulation:
    """Simulates a load: a calendar of arrivals, polls, loaded models and ends of jobs."""

    def __init__(self, load: FleetLoad, policy: Policy, seed: int) -> None:
        self._load = load
        self._policy = policy
        self._rng = random.Random(seed)
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._queues: dict[JobKind, deque[FleetJob]] = {}
        self._costs: dict[JobKind, MeasuredCost] = {}
        self._curves = {kind: kind.curve() for kind in {kind for _, kind in load.arrivals}}
        self._rows = {kind: efficient_rows(curve, MAX_BATCH) for kind, curve in self._curves.items()}
        self._workers: dict[int, FleetWorker] = {}
        self._wants: tuple[WantedWorkers, ...] = ()
        self._ended: list[FleetJob] = []
        self._gpu_s = 0.0
        self._start_s: float | None = None
        self._max_workers = 0

    def run(self) -> FleetOutcome:
        for at_s, kind in self._load.arrivals:
            self._schedule(at_s, lambda kind=kind: self._arrive(kind))  # type: ignore[misc]
        self._schedule(0.0, self._poll)
        while self._calendar:
            self._now, _, action = heapq.heappop(self._calendar)
            action()
        return FleetOutcome(
            self._gpu_s, tuple((job.kind, job.start_s - job.arrival_s) for job in self._ended), self._max_workers
        )

    def _schedule(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (when_s, next(self._order), action))

    def _arrive(self, kind: JobKind) -> None:
        self._queues.setdefault(kind, deque()).append(FleetJob(kind, self._now, steps_left=kind.steps))
        for worker in self._workers.values():
            if worker.ready_s <= self._now:
                self._serve(worker)

    def _serve(self, worker: FleetWorker) -> None:
        """Advance a worker to now, let it claim jobs, and schedule its next end of a job."""
        self._advance(worker)
        if not worker.running:
            heads = [queue[0] for queue in self._queues.values() if queue]
            worker.kind = min(heads, key=lambda job: job.arrival_s).kind if heads else None
        kind = worker.kind
        if kind is not None and not (worker.running and self._overdue(kind)):
            queue = self._queues.get(kind, deque())
            while queue and len(worker.running) < self._rows[kind]:
                queue[0].start_s = self._now
                worker.running.append(queue.popleft())
        worker.version += 1
        if worker.running:
            first = min(job.steps_left for job in worker.running) * self._forward_s(worker)
            self._schedule(self._now + first, lambda version=worker.version: self._end(worker, version))  # type: ignore[misc]

    def _overdue(self, running: JobKind) -> bool:
        return any(
            queue and self._now - queue[0].arrival_s > OVERDUE_S
            for kind, queue in self._queues.items()
            if kind != running
        )

    def _advance(self, worker: FleetWorker) -> None:
        elapsed, rows = self._now - worker.at_s, len(worker.running)
        worker.at_s = self._now
        if not rows:
            return
        forwards = elapsed / self._forward_s(worker)
        for job in worker.running:
            job.steps_left -= forwards
            job.gpu_s += elapsed / rows
            job.forward_rows += forwards * rows
        for job in [job for job in worker.running if job.steps_left < 1e-6]:
            worker.running.remove(job)
            self._costs.setdefault(job.kind, MeasuredCost()).add(job)
            self._ended.append(job)

    def _forward_s(self, worker: FleetWorker) -> float:
        assert worker.kind is not None
        return seconds_at(self._curves[worker.kind], len(worker.running))

    def _end(self, worker: FleetWorker, version: int) -> None:
        if version == worker.version:
            self._serve(worker)

    def _poll(self) -> None:
        alive = self._workers.values()
        fleet = Fleet(
            alive=len(alive),
            busy=sum(bool(worker.running) for worker in alive),
            starting=sum(worker.ready_s > self._now for worker in alive),
            settled_s=min((self._now - worker.ready_s for worker in alive), default=None),
            start_s=self._start_s or 0.0,
        )
        latest = WantedWorkers(self._now, self._policy(self._loads(), fleet))
        self._wants = recent_wants(self._wants, latest, COOL_DOWN_S)
        target = target_workers(self._wants, 0, PoolBounds(0, MAX_WORKERS, COOL_DOWN_S))
        changes = plan_changes(self._pool_workers(), target, MAX_WORKERS)
        for index in changes.drain:
            self._gpu_s += self._now - self._workers.pop(index).started_s
        for index in changes.start:
            ready_s = self._now + self._rng.uniform(*self._load.loading_s)
            worker = self._workers[index] = FleetWorker(index, self._now, ready_s, at_s=ready_s)
            self._schedule(ready_s, lambda worker=worker: self._loaded(worker))  # type: ignore[misc]
        self._max_workers = max(self._max_workers, len(self._workers))
        if self._calendar or self._workers or any(self._queues.values()):
            self._schedule(self._now + POLL_S, self._poll)

    def _loaded(self, worker: FleetWorker) -> None:
        if self._workers.get(worker.index) is worker:  # it may have been drained while it loaded
            loading_s = worker.ready_s - worker.started_s
            self._start_s = (
                loading_s if self._start_s is None else self._start_s + SMOOTHING * (loading_s - self._start_s)
            )
            self._serve(worker)

    def _pool_workers(self) -> list[PoolWorker]:
        return [
            PoolWorker(one.index, "ready" if one.ready_s <= self._now else "starting", one.started_s, len(one.running))
            for one in self._workers.values()
        ]

    def _loads(self) -> list[SignatureLoad]:
        running = [job.kind for worker in self._workers.values() for job in worker.running]
        loads = []
        for kind, queue in self._queues.items():
            cost = self._costs.get(kind, MeasuredCost())
            loads.append(
                SignatureLoad(
                    signature=kind.name,
                    queued_slots=len(queue),
                    running_slots=running.count(kind),
                    oldest_wait_s=self._now - queue[0].arrival_s if queue else 0.0,
                    slot_s=cost.slot_s,
                    rows=cost.rows,
                    cost_curve=self._curves[kind] if cost.slot_s is not None else None,
                )
            )
        return loads


@dataclass(frozen=True)
class FleetComparison:
    """A load scaled by cost, and by length with the cheapest K among those with no longer waits."""

    load: FleetLoad
    cost: FleetOutcome
    length: tuple[FleetOutcome, int]
    length_each_kind: tuple[FleetOutcome, int]


def compare(load: FleetLoad, seed: int, k_values: Sequence[int] = K_VALUES) -> FleetComparison:
    """Simulate a load with both policies; raises `ValueError` if no K keeps the waits as short."""
    cost = FleetSimulation(load, by_cost, seed).run()
    outcomes = [(FleetSimulation(load, by_length(k), seed).run(), k) for k in k_values]

    def cheapest(each_kind: bool) -> tuple[FleetOutcome, int]:
        fair = [row for row in outcomes if row[0].no_longer_than(cost, each_kind=each_kind)]
        if not fair:
            raise ValueError(f"{load.name}: no K waits {cost.wait_s(0.95):.0f} s or less")
        return min(fair, key=lambda row: row[0].gpu_s)

    return FleetComparison(load, cost, cheapest(each_kind=False), cheapest(each_kind=True))


def table(comparison: FleetComparison) -> Iterator[str]:
    """Yield the table rows of one load."""
    (length, k), (each, k_each) = comparison.length, comparison.length_each_kind
    outcomes = {
        "cost": comparison.cost,
        f"length, K = {k}: p95 not longer": length,
        f"length, K = {k_each}: nor that of any kind": each,
    }
    for name, outcome in outcomes.items():
        waits = " | ".join(f"{outcome.wait_s(0.95, kind):.0f}" for kind in (None, SMALL, LARGE, VIDEO))
        more = "" if outcome is comparison.cost else f" (+{100 * (outcome.gpu_s / comparison.cost.gpu_s - 1):.0f}%)"
        yield f"| {comparison.load.name} | {name} | {waits} | {outcome.gpu_s:.0f}{more} | {outcome.max_workers} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(
        f"{TARGET_WAIT_S:g} s target wait, polls every {POLL_S:g} s, cool-down {COOL_DOWN_S:g} s, "
        f"at most {MAX_WORKERS} workers, seed {options.seed}; waits are 95th percentiles, in seconds\n"
    )
    print("| load | scaled by | wait | small | large | video | GPU-seconds | most workers |")
    print("|---|---|---|---|---|---|---|---|")
    for make_load in LOADS:
        for row in table(compare(make_load(options.seed), options.seed)):
            print(row, flush=True)
