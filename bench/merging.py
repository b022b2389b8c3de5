"""`python -m bench.merging`: half-empty batches of two workers that become one, in simulated time.

Jobs arrive at random (Poisson). By a rule, a worker hands the jobs of its batch over to another one that runs more of
the same signature and has free slots for all of them; each job stands still for `--move-s` (checkpoint, upload,
download, replay). A load of 1 is what the workers sustain with full batches.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.simulate import STEP_S, STEPS
from bench.simulator.kinds import GAINS, Arrival, JobKind, SimulatedJob, curve_of
from bench.simulator.policies import WINDOW_S, QueueOrder
from bench.simulator.queue import SimulatedQueue
from bench.simulator.report import percentile, print_table
from bench.simulator.simulation import SimulatedWorker, Simulation

CURVES = GAINS | {"Z-Image 512": {1: 1.0, 2: 1.23, 4: 1.27, 8: 1.41}}
"""Speedups by rows; the last one was measured by `bench.gpu` on an H100."""

LOADS = (0.3, 0.5, 0.7, 0.9)
LOAD_S = 20.0
"""Seconds in which a worker, which has memory for one model, loads another one."""

Rule = Callable[[bool], bool]
"""Whether a batch moves, given whether jobs of other signatures are queued."""
RULES: dict[str, Rule] = {
    "never": lambda _others_queued: False,
    "others queued": lambda others_queued: others_queued,
    "always": lambda _others_queued: True,
}


@dataclass(frozen=True)
class Fleet:
    """Workers, and signatures of the same or of different models."""

    name: str
    workers: int
    models: tuple[str, ...]
    """The model of each signature."""


FLEETS = (
    Fleet("1 signature, 4 workers", 4, ("model",)),
    Fleet("3 signatures of a model, 2 workers", 2, ("model",) * 3),
    Fleet("3 signatures of a model, 4 workers", 4, ("model",) * 3),
    Fleet("3 models, 2 workers", 2, ("a", "b", "c")),
)


class MergingSimulation(Simulation):
    """Workers that hand their batches over by a rule; the slots for jobs that move are kept."""

    def __init__(
        self, queue: SimulatedQueue, order: QueueOrder, workers: Sequence[SimulatedWorker], rule: Rule, move_s: float
    ) -> None:
        super().__init__(order, workers, by_step=True, load_s=LOAD_S)
        self.moves = 0
        self._queue, self._rule, self._move_s = queue, rule, move_s
        self._arrived: dict[SimulatedWorker, list[SimulatedJob]] = {worker: [] for worker in workers}

    def forward_ended(self, worker: SimulatedWorker) -> None:
        arrived = self._arrived[worker]
        worker.running += arrived
        worker.reserved -= len(arrived)
        arrived.clear()
        if worker.reserved or not worker.running:
            return
        others_queued = any(kind is not worker.kind for kind in self._queue.kinds())
        if self._rule(others_queued) and (target := self._target(worker)) is not None:
            self._move(worker, target)

    def _target(self, worker: SimulatedWorker) -> SimulatedWorker | None:
        """Return the fullest other worker that has slots for the batch; None if a job has no more left than a move."""
        if min(job.steps_left for job in worker.running) * worker.forward_s <= self._move_s:
            return None
        rows = len(worker.running)
        able = [
            other
            for other in self.workers
            if other is not worker and other.kind is worker.kind and rows <= min(len(other.running), other.free_slots)
        ]
        return max(able, key=lambda other: len(other.running), default=None)

    def _move(self, worker: SimulatedWorker, target: SimulatedWorker) -> None:
        moved, worker.running = worker.running, []
        self.moves += len(moved)
        target.reserved += len(moved)
        self.clock.at(self.clock.now_s + self._move_s, lambda: self._arrive_at(target, moved))

    def _arrive_at(self, target: SimulatedWorker, moved: list[SimulatedJob]) -> None:
        if target.kind is moved[0].kind:
            self._arrived[target] += moved  # they join after its forward
            return
        target.reserved -= len(moved)  # its batch has ended meanwhile
        for job in reversed(moved):
            self._queue.put_back(job)
        self.serve_all()


@dataclass(frozen=True)
class Outcome:
    """Latencies, the time of devices for forwards and loads, and moves of jobs."""

    mean_s: float
    p99_s: float
    device_s: float
    moves: int

    def __str__(self) -> str:
        return f"{self.mean_s:.2f}, {self.p99_s:.1f}, {self.device_s:.0f}"


def arrivals(fleet: Fleet, curve: str, load: float, count: int, seed: int) -> list[Arrival]:
    """Return `count` jobs at `load` times the rate that the workers of a fleet sustain with full batches."""
    rng, now_s, arriving = random.Random(seed), 0.0, []
    usual = int(statistics.mean(STEPS))
    kinds = [
        JobKind(f"signature {at}", curve_of(CURVES[curve], STEP_S), model, usual)
        for at, model in enumerate(fleet.models)
    ]
    rate = load * fleet.workers / kinds[0].image_s(kinds[0].rows)
    for _ in range(count):
        now_s += rng.expovariate(rate)
        arriving.append(Arrival(now_s, rng.choice(kinds), rng.choice(STEPS)))
    return arriving


def simulate(fleet: Fleet, arriving: Sequence[Arrival], rule: Rule, move_s: float) -> Outcome:
    workers = [SimulatedWorker(model=fleet.models[0]) for _ in range(fleet.workers)]
    queue = SimulatedQueue(WINDOW_S)
    order = QueueOrder(queue, sorted(set(fleet.models)), workers, LOAD_S)
    simulation = MergingSimulation(queue, order, workers, rule, move_s)
    simulation.run(arriving)
    latencies = sorted(job.latency_s for job in simulation.jobs)
    device_s = sum(job.gpu_s for job in simulation.jobs) + LOAD_S * simulation.loads
    return Outcome(statistics.mean(latencies), percentile(latencies, 0.99), device_s, simulation.moves)


def rows(count: int, seed: int, move_s: float) -> Iterator[Sequence[object]]:
    for curve in CURVES:
        for fleet in FLEETS:
            for load in LOADS:
                arriving = arrivals(fleet, curve, load, count, seed)
                outcomes = [simulate(fleet, arriving, rule, move_s) for rule in RULES.values()]
                yield curve, fleet.name, load, *outcomes, "/".join(str(one.moves) for one in outcomes[1:])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--move-s", type=float, default=0.5, help="seconds for which a job stands still to move")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(f"{options.jobs} jobs, steps {STEPS}; mean and p99 latency, and time of devices, in seconds\n")
    print_table(f"curve | fleet | load | {' | '.join(RULES)} | moves", rows(options.jobs, options.seed, options.move_s))


if __name__ == "__main__":
    main()
