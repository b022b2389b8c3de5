"""`python -m bench.swaps`: how often workers load another model, by claim policy, in simulated time.

Each worker has memory for one model, and jobs of several models arrive at random. The policy of production
(`shared/queue/order/model_loads.py`) is compared with serving the oldest job first, which ignores memory. Everything
else is the same: jobs join a running batch unless those of another model are overdue.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.simulate import CURVES, OVERDUE_S, seconds_at
from shared.queue.order import model_loads

STEPS = 28
STEP_S = 0.05
ROWS = 8
CURVE = {rows: STEP_S * rows / gain for rows, gain in CURVES["512"].items()}
SLOT_S = STEPS * CURVE[ROWS] / ROWS
SPAN_S = 4 * 3600.0


@dataclass(eq=False)
class ModelJob:
    model: int
    arrival_s: float
    steps_left: float = STEPS
    start_s: float = 0.0


@dataclass(eq=False)
class OneModelWorker:
    model: int | None = None
    ready_s: float = 0.0  # when its model is loaded
    running: list[ModelJob] = field(default_factory=list)
    at_s: float = 0.0
    version: int = 0  # outdated calendar entries have an older one


@dataclass(frozen=True)
class ModelQueue:
    """Queued jobs of a model as seen by a worker; `load_s` is 0 if it has the model, `holders` are other workers."""

    model: int
    ready_s: float
    queued: int
    load_s: float
    holders: int


class OldestFirst:
    """The longest wait first."""

    def sort_s(self, queue: ModelQueue) -> float:
        return queue.ready_s

    def free_s(self, queue: ModelQueue) -> float:
        return queue.ready_s

    def stops_admission(self, queue: ModelQueue, current: ModelQueue | None, now: float) -> bool:
        """Return whether `queue` stops admissions to a running batch of another model."""
        return self.sort_s(queue) <= now - OVERDUE_S


class InMemoryFirst(OldestFirst):
    """The queue's decision, in seconds."""

    def sort_s(self, queue: ModelQueue) -> float:
        return model_loads.sort_ms(queue.ready_s, queue.load_s, queue.holders)

    def free_s(self, queue: ModelQueue) -> float:
        return model_loads.free_at(queue.ready_s, queue.load_s, queue.holders, queue.queued * SLOT_S)

    def stops_admission(self, queue: ModelQueue, current: ModelQueue | None, now: float) -> bool:
        sort_s = self.sort_s(queue)
        if sort_s > now - OVERDUE_S:
            return False
        return not queue.load_s or (self.free_s(queue) <= now and not (current and current.ready_s <= sort_s))


@dataclass(frozen=True)
class Demand:
    """Workers, seconds to load a model, utilization of the workers with full batches, and the share of each model."""

    name: str
    workers: int
    load_s: float
    busy: float
    shares: tuple[float, ...]
    span_s: float = SPAN_S

    def arrivals(self, seed: int) -> list[ModelJob]:
        rng, now, jobs = random.Random(seed), 0.0, []
        rate = self.busy * self.workers / SLOT_S
        while (now := now + rng.expovariate(rate)) < self.span_s:
            jobs.append(ModelJob(rng.choices(range(len(self.shares)), self.shares)[0], now))
        return jobs


@dataclass(frozen=True)
class SwapOutcome:
    loads: int
    waits_s: tuple[float, ...]

    def wait_s(self, share: float) -> float:
        return self.waits_s[min(len(self.waits_s) - 1, int(share * len(self.waits_s)))]


class SwapSimulation:
    """Simulates a demand: a calendar of arrivals, loaded models, ends of jobs, and times to claim again."""

    def __init__(self, demand: Demand, policy: OldestFirst, seed: int) -> None:
        self._demand = demand
        self._policy = policy
        self._jobs = demand.arrivals(seed)
        self._workers = [OneModelWorker() for _ in range(demand.workers)]
        self._queues: dict[int, deque[ModelJob]] = {model: deque() for model in range(len(demand.shares))}
        self._calendar: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._loads = 0

    def run(self) -> SwapOutcome:
        for job in self._jobs:
            self._schedule(job.arrival_s, lambda job=job: self._arrive(job))  # type: ignore[misc]
        while self._calendar:
            self._now, _, action = heapq.heappop(self._calendar)
            action()
        return SwapOutcome(self._loads, tuple(sorted(job.start_s - job.arrival_s for job in self._jobs)))

    def _schedule(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._calendar, (when_s, next(self._order), action))

    def _arrive(self, job: ModelJob) -> None:
        self._queues[job.model].append(job)
        for worker in self._workers:
            self._serve(worker)

    def _serve(self, worker: OneModelWorker) -> None:
        """Advance a worker to now, let it claim jobs, and schedule its next event."""
        if worker.ready_s > self._now:
            return
        self._advance(worker)
        queues = self._model_queues(worker)
        if worker.running:
            current = next((queue for queue in queues if queue.model == worker.model), None)
            others = [queue for queue in queues if queue.model != worker.model]
            if not any(self._policy.stops_admission(queue, current, self._now) for queue in others):
                self._admit(worker)
        else:
            self._start(worker, queues)
        worker.version += 1
        if worker.running:
            ends_s = max(worker.ready_s, self._now) + min(job.steps_left for job in worker.running) * self._forward_s(
                worker
            )
            self._schedule(ends_s, lambda version=worker.version: self._again(worker, version))  # type: ignore[misc]
        elif queues and (later := [at for at in map(self._policy.free_s, queues) if at > self._now]):
            self._schedule(min(later), lambda version=worker.version: self._again(worker, version))  # type: ignore[misc]

    def _again(self, worker: OneModelWorker, version: int) -> None:
        if version == worker.version:
            self._serve(worker)

    def _start(self, worker: OneModelWorker, queues: Sequence[ModelQueue]) -> None:
        free = [queue for queue in queues if self._policy.free_s(queue) <= self._now]
        if not free:
            return
        first = min(free, key=lambda queue: (self._policy.sort_s(queue), queue.model))
        if first.load_s:
            self._loads += 1
            worker.model, worker.ready_s = first.model, self._now + first.load_s
            self._schedule(worker.ready_s, lambda: self._serve(worker))
        self._admit(worker)

    def _admit(self, worker: OneModelWorker) -> None:
        assert worker.model is not None
        queue = self._queues[worker.model]
        while queue and len(worker.running) < ROWS:
            queue[0].start_s = max(self._now, worker.ready_s)
            worker.running.append(queue.popleft())

    def _advance(self, worker: OneModelWorker) -> None:
        if worker.running:
            forwards = (self._now - max(worker.at_s, worker.ready_s)) / self._forward_s(worker)
            for job in worker.running:
                job.steps_left -= forwards
            worker.running = [job for job in worker.running if job.steps_left > 1e-6]
        worker.at_s = self._now

    def _forward_s(self, worker: OneModelWorker) -> float:
        return seconds_at(CURVE, len(worker.running))

    def _model_queues(self, worker: OneModelWorker) -> list[ModelQueue]:
        holding = [other.model for other in self._workers if other is not worker]
        return [
            ModelQueue(
                model,
                queue[0].arrival_s,
                len(queue),
                0.0 if model == worker.model else self._demand.load_s,
                holding.count(model),
            )
            for model, queue in self._queues.items()
            if queue
        ]


DEMANDS = (
    Demand("2 models on 2 workers, quiet", 2, 20.0, 0.1, (1, 1)),
    Demand("3 models on 2 workers, quiet", 2, 20.0, 0.1, (1, 1, 1)),
    Demand("3 models on 2 workers", 2, 20.0, 0.5, (1, 1, 1)),
    Demand("3 models on 2 workers, busy", 2, 20.0, 0.8, (1, 1, 1)),
    Demand("one model dominates", 2, 20.0, 0.6, (8, 1, 1)),
    Demand("6 models on 4 workers", 4, 60.0, 0.5, (6, 3, 2, 1, 1, 1)),
)
POLICIES: dict[str, Callable[[], OldestFirst]] = {"oldest first": OldestFirst, "in memory first": InMemoryFirst}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(f"{SPAN_S / 3600:g} hours of arrivals, {STEPS} steps, at most {ROWS} rows, seed {options.seed}; in seconds\n")
    print("| demand | load time | policy | loads | time loading | p50 wait | p95 | longest |")
    print("|---|---|---|---|---|---|---|---|")
    for demand in DEMANDS:
        for name, make_policy in POLICIES.items():
            outcome = SwapSimulation(demand, make_policy(), options.seed).run()
            share = outcome.loads * demand.load_s / (demand.workers * demand.span_s)
            waits = " | ".join(f"{outcome.wait_s(part):.0f}" for part in (0.5, 0.95, 1.0))
            print(
                f"| {demand.name} | {demand.load_s:g} | {name} | {outcome.loads} | {share:.1%} | {waits} |", flush=True
            )


if __name__ == "__main__":
    main()
