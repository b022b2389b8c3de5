"""A fleet in simulated time: workers need minutes to load their models and then batch continuously.

Polls, cool-down, starts and drains are those of `fusequeue pool`; `GET /v1/scale` says how many workers are wanted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fleet import decision
from bench.fleet.fleet_loads import FleetLoad
from bench.fleet.fleet_state import SMOOTHING, FleetState, FleetWorker, MeasuredCost
from bench.simulator.kinds import SimulatedJob
from bench.simulator.policies import QueueOrder
from bench.simulator.queue import SimulatedQueue
from bench.simulator.report import percentile
from bench.simulator.simulation import SimulatedWorker, Simulation
from cli.pool.pool import PoolBounds, WantedWorkers, plan_changes, recent_wants, target_workers

POLL_S = 5.0
MAX_WORKERS = 32
REFUSED_S = 10.0  # until a worker knows that the hub refuses it
RETRY_S = (5.0, 60.0)  # first and longest pause before another try to load
DRAIN_S = 25.0


@dataclass(frozen=True)
class FleetOutcome:
    """GPU-seconds over the lifetime of all workers, and how long jobs waited for a slot.

    `late` bulk jobs did not end in time. `wanted` has the number of wanted workers whenever it changed, and `changes`
    counts how often workers were started or drained.
    """

    gpu_s: float
    waits_s: Sequence[float]
    max_workers: int
    wanted: tuple[tuple[float, int], ...] = ()
    changes: int = 0
    late: int = 0

    def wait_s(self, share: float) -> float:
        """Return a percentile of the waits."""
        return percentile(self.waits_s, share)


class FleetSimulation(Simulation):
    """Simulates a load: polls, and starts, loads and drains of workers beside the jobs."""

    def __init__(self, load: FleetLoad, seed: int) -> None:
        kinds = list(dict.fromkeys(arrival.kind for arrival in load.arrivals))
        served = [kind for kind in kinds if kind not in load.unserved]
        queue = SimulatedQueue(limits=load.limits)
        super().__init__(QueueOrder(queue, [kind.model for kind in served]))
        costs = {
            kind: MeasuredCost(kind.image_s(kind.rows), kind.rows) if load.known else MeasuredCost() for kind in kinds
        }
        self._state = FleetState(queue, served, costs)
        self._load, self._rng = load, random.Random(seed)
        self._bounds = PoolBounds(0, MAX_WORKERS, load.cool_down_s)
        self._start_s = sum(load.loading_s) / 2 if load.known else None
        self._wants: tuple[WantedWorkers, ...] = ()
        self._gpu_s = 0.0
        self._max_workers = 0
        self._changes = 0
        self._wanted: list[tuple[float, int]] = []

    def outcome(self) -> FleetOutcome:
        """Simulate the load."""
        self.run(self._load.arrivals, self._load.until_s or math.inf)
        end_s = self._load.until_s or self.clock.now_s
        self._gpu_s += sum(end_s - worker.started_s for worker in self._state.workers)
        served = [job for job in self.jobs if job.kind in self._state.served]
        waits = [(job, (end_s if job.start_s is None else job.start_s) - job.arrival.at_s) for job in served]
        urgent = sorted(wait for job, wait in waits if not job.arrival.bulk)
        late = sum(job.arrival.deadline_s is not None and not job.met for job in served)
        return FleetOutcome(self._gpu_s, urgent, self._max_workers, tuple(self._wanted), self._changes, late)

    @property
    def workers(self) -> list[SimulatedWorker]:
        return [worker for worker in self._state.workers if worker.loaded_s is not None]

    def begin(self) -> None:
        self.clock.at(0.0, self._poll)

    def job_ended(self, job: SimulatedJob) -> None:
        super().job_ended(job)
        self._state.costs[job.kind].add(job)

    def event_of(self, worker: SimulatedWorker) -> None:
        super().event_of(worker)
        if self._load.limits:  # slots of a tenant have become free
            self.serve_all()

    def _poll(self) -> None:
        state = self._state
        state.now_s, state.start_s = self.clock.now_s, self._start_s or 0.0
        wanted = decision.wanted(state)
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
            state.by_index[index] = FleetWorker(index=index, started_s=state.now_s)
            self._load_models(state.by_index[index])
        self._max_workers = max(self._max_workers, len(state.by_index))
        if self.clock or state.by_index or any(kind in state.served for kind in state.queue.kinds()):
            self.clock.at(state.now_s + POLL_S, self._poll)

    def _drain(self, worker: FleetWorker) -> None:
        """Let jobs end that can within `DRAIN_S`; others are queued again, and lose what they have done."""
        now_s = self.clock.now_s
        for job in worker.advance(now_s):
            job.end_s = now_s
            self.job_ended(job)
        last_s = 0.0
        for job in reversed(worker.running):
            left_s = job.steps_left * worker.forward_s
            last_s = max(last_s, min(left_s, DRAIN_S))
            if left_s <= DRAIN_S:
                job.end_s = now_s + left_s
                self._state.queue.ended(job, now_s)
            else:
                job.steps_left = job.arrival.steps
                self._state.queue.put_back(job)
        worker.running.clear()
        worker.version += 1
        self._gpu_s += now_s + last_s - worker.started_s
        self.serve_all()

    def _load_models(self, worker: FleetWorker) -> None:
        """Schedule the end of a load, which fails if the hub is down meanwhile."""
        now = self.clock.now_s
        loading_s = self._rng.uniform(*self._load.loading_s)
        refused = self._load.hub_fails(now, now)
        fails = refused or self._load.hub_fails(now, now + loading_s)
        self.clock.at(now + (REFUSED_S if refused else loading_s), lambda: self._loaded(worker, fails))

    def _loaded(self, worker: FleetWorker, fails: bool) -> None:
        now = self.clock.now_s
        if self._state.by_index.get(worker.index) is not worker:  # it was drained while it loaded
            return
        worker.tried = True
        if fails:
            pause_s = min(RETRY_S[1], RETRY_S[0] * 2**worker.failures)
            worker.failures += 1
            self.clock.at(now + pause_s, lambda: self._load_models(worker))
            return
        loading_s = now - worker.started_s
        if not worker.failures:
            mean_s = loading_s if self._start_s is None else self._start_s
            self._start_s = mean_s + SMOOTHING * (loading_s - mean_s)
        worker.loaded_s = worker.at_s = now
        self.serve(worker)
