"""A fleet in simulated time: workers need minutes to load their models and then batch continuously.

Polls, cool-down, starts and drains are those of `fusequeue pool`; a policy says how many workers are wanted.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from bench.fleet import decision
from bench.fleet.fleet_loads import Arrival, FleetLoad, JobKind
from bench.fleet.fleet_state import SMOOTHING, FleetJob, FleetState, FleetWorker, Lane, MeasuredCost
from bench.simulate import seconds_at
from cli.pool.pool import PoolBounds, WantedWorkers, plan_changes, recent_wants, target_workers
from shared.autoscaling.efficient_rows import efficient_rows

POLL_S = 5.0
MAX_WORKERS = 16
MAX_BATCH = 8
OVERDUE_S = 2.0
REFUSED_S = 10.0  # until a worker knows that the hub refuses it
RETRY_S = (5.0, 60.0)  # first and longest pause before another try to load
DRAIN_S = 25.0

Policy: TypeAlias = Callable[[FleetState], int]


@dataclass(frozen=True)
class FleetOutcome:
    """GPU-seconds over the lifetime of all workers, and how long jobs waited for a slot.

    `late` bulk jobs did not end in time. `wanted` has the number of wanted workers whenever it changed, and `changes`
    counts how often workers were started or drained.
    """

    gpu_s: float
    waits_s: tuple[tuple[JobKind, float], ...]
    max_workers: int
    wanted: tuple[tuple[float, int], ...] = ()
    changes: int = 0
    late: int = 0

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

    def __init__(self, load: FleetLoad, policy: Policy, seed: int, max_workers: int = MAX_WORKERS) -> None:
        self._load = load
        self._policy = policy
        self._rng = random.Random(seed)
        self._bounds = PoolBounds(0, max_workers, load.cool_down_s)
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        kinds = list(dict.fromkeys(arrival.kind for arrival in load.arrivals))
        curves = {kind: kind.curve() for kind in kinds}
        self._rows = {kind: efficient_rows(curve, MAX_BATCH) for kind, curve in curves.items()}
        served = [kind for kind in kinds if kind not in load.unserved]
        self._state = FleetState(load.limits, served, curves, {kind: self._known_cost(kind) for kind in kinds})
        self._start_s = sum(load.loading_s) / 2 if load.known else None
        self._wants: tuple[WantedWorkers, ...] = ()
        self._jobs: list[FleetJob] = []
        self._gpu_s = 0.0
        self._max_workers = 0
        self._changes = 0
        self._wanted: list[tuple[float, int]] = []

    def _known_cost(self, kind: JobKind) -> MeasuredCost:
        rows = self._rows[kind]
        return MeasuredCost(kind.image_s(rows), rows) if self._load.known else MeasuredCost()

    def run(self) -> FleetOutcome:
        for arrival in self._load.arrivals:
            self._schedule(arrival.at_s, lambda arrival=arrival: self._arrive(arrival))  # type: ignore[misc]
        self._schedule(0.0, self._poll)
        until_s = self._load.until_s
        while self._calendar and (until_s is None or self._calendar[0][0] <= until_s):
            self._state.now_s, _, action = heapq.heappop(self._calendar)
            action()
        end_s = until_s or self._state.now_s
        self._gpu_s += sum(end_s - worker.started_s for worker in self._state.workers)
        served = [job for job in self._jobs if job.kind in self._state.served]
        waits = [(job, (end_s if job.start_s is None else job.start_s) - job.arrival_s) for job in served]
        urgent = tuple((job.kind, wait) for job, wait in waits if not job.bulk)
        late = sum((job.end_s or end_s + 1) > job.due_s for job in served if job.due_s is not None)
        return FleetOutcome(self._gpu_s, urgent, self._max_workers, tuple(self._wanted), self._changes, late)

    def _schedule(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (when_s, next(self._order), action))

    def _arrive(self, arrival: Arrival) -> None:
        job = FleetJob(*arrival[1:], arrival_s=arrival.at_s, steps_left=arrival.kind.steps)
        self._jobs.append(job)
        self._state.lanes.setdefault(Lane(*arrival[1:]), deque()).append(job)
        self._serve_all()

    def _serve_all(self) -> None:
        for worker in self._state.workers:
            if worker.loaded_s is not None:
                self._serve(worker)

    def _startable(self) -> list[tuple[Lane, deque[FleetJob]]]:
        """Return the lanes with jobs that can start, in the order in which they are served."""
        state = self._state
        lanes = [
            (lane, jobs)
            for lane, jobs in state.lanes.items()
            if jobs and lane.kind in state.served and state.has_free_slots(lane.tenant)
        ]
        return sorted(lanes, key=lambda row: (row[0].bulk, row[1][0].arrival_s))

    def _serve(self, worker: FleetWorker) -> None:
        """Advance a worker to now, let it claim jobs, and schedule its next end of a job."""
        self._advance(worker)
        while not worker.running or len(worker.running) < self._rows[worker.running[0].kind]:
            lanes = self._startable()
            if worker.running:
                lanes = [row for row in lanes if row[0].kind is worker.kind or self._overdue(row)]
            if not lanes or (worker.running and lanes[0][0].kind is not worker.kind):
                break
            job = lanes[0][1].popleft()
            worker.kind = job.kind
            job.start_s = self._state.now_s if job.start_s is None else job.start_s
            worker.running.append(job)
        worker.version += 1
        if worker.running:
            first = min(job.steps_left for job in worker.running) * self._forward_s(worker)
            end_s = self._state.now_s + first
            self._schedule(end_s, lambda version=worker.version: self._end(worker, version))  # type: ignore[misc]

    def _overdue(self, row: tuple[Lane, deque[FleetJob]]) -> bool:
        return self._state.age_s(row[1]) > OVERDUE_S

    def _advance(self, worker: FleetWorker) -> None:
        elapsed, rows = self._state.now_s - worker.at_s, len(worker.running)
        worker.at_s = self._state.now_s
        if not rows:
            return
        forwards = elapsed / self._forward_s(worker)
        for job in worker.running:
            job.steps_left -= forwards
            job.gpu_s += elapsed / rows
            job.forward_rows += forwards * rows
        for job in [job for job in worker.running if job.steps_left < 1e-6]:
            worker.running.remove(job)
            self._state.costs[job.kind].add(job)
            job.end_s = self._state.now_s

    def _forward_s(self, worker: FleetWorker) -> float:
        assert worker.kind is not None
        return seconds_at(self._state.curves[worker.kind], len(worker.running))

    def _end(self, worker: FleetWorker, version: int) -> None:
        if version == worker.version:
            self._serve(worker)
            if self._load.limits:  # slots of a tenant have become free
                self._serve_all()

    def _poll(self) -> None:
        state = self._state
        state.start_s = self._start_s or 0.0
        wanted = self._policy(state)
        if not self._wanted or self._wanted[-1][1] != wanted:
            self._wanted.append((state.now_s, wanted))
        self._wants = recent_wants(self._wants, WantedWorkers(state.now_s, wanted), self._bounds.cool_down_s)
        target = target_workers(self._wants, 0, self._bounds)
        workers = [decision.pool_worker(state, worker) for worker in state.workers]
        changes = plan_changes(workers, target, self._bounds.max_workers)
        self._changes += bool(changes.start or changes.drain)
        for index in changes.drain:
            self._drain(state.by_index.pop(index))
        for index in changes.start:
            state.by_index[index] = FleetWorker(index, state.now_s)
            self._load_models(state.by_index[index])
        self._max_workers = max(self._max_workers, len(state.by_index))
        if (
            self._calendar
            or state.by_index
            or any(jobs for lane, jobs in state.lanes.items() if lane.kind in state.served)
        ):
            self._schedule(state.now_s + POLL_S, self._poll)

    def _drain(self, worker: FleetWorker) -> None:
        """Let jobs end that can within `DRAIN_S`; others are queued again, and lose what they have done."""
        self._advance(worker)
        last_s = 0.0
        for job in reversed(worker.running):
            left_s = job.steps_left * self._forward_s(worker)
            last_s = max(last_s, min(left_s, DRAIN_S))
            if left_s <= DRAIN_S:
                job.end_s = self._state.now_s + left_s
            else:
                job.steps_left = job.kind.steps
                self._state.lanes[Lane(job.kind, job.tenant, job.bulk, job.due_s)].appendleft(job)
        worker.running.clear()
        worker.version += 1
        self._gpu_s += self._state.now_s + last_s - worker.started_s
        self._serve_all()

    def _load_models(self, worker: FleetWorker) -> None:
        """Schedule the end of a load, which fails if the hub is down meanwhile."""
        now = self._state.now_s
        loading_s = self._rng.uniform(*self._load.loading_s)
        refused = self._load.hub_fails(now, now)
        fails = refused or self._load.hub_fails(now, now + loading_s)
        self._schedule(now + (REFUSED_S if refused else loading_s), lambda: self._loaded(worker, fails))

    def _loaded(self, worker: FleetWorker, fails: bool) -> None:
        now = self._state.now_s
        if self._state.by_index.get(worker.index) is not worker:  # it was drained while it loaded
            return
        worker.tried = True
        if fails:
            pause_s = min(RETRY_S[1], RETRY_S[0] * 2**worker.failures)
            worker.failures += 1
            self._schedule(now + pause_s, lambda: self._load_models(worker))
            return
        loading_s = now - worker.started_s
        if not worker.failures:
            mean_s = loading_s if self._start_s is None else self._start_s
            self._start_s = mean_s + SMOOTHING * (loading_s - mean_s)
        worker.loaded_s = worker.at_s = now
        self._serve(worker)
