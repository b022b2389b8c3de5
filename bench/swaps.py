"""`python -m bench.swaps`: how often workers load another model, by claim policy, in simulated time.

Each worker has memory for one model, and jobs of several models arrive at random. The order of the queue is compared
with the same order where models in memory do not go first (`shared/queue/order/model_loads.py`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.simulator.kinds import GAINS, MAX_BATCH, Arrival, JobKind, curve_of
from bench.simulator.policies import QueueOrder
from bench.simulator.queue import SimulatedQueue
from bench.simulator.report import percentile, print_table
from bench.simulator.simulation import SimulatedWorker, Simulation

STEPS = 28
CURVE = curve_of(GAINS["512"], step_s=0.05)
SPAN_S = 4 * 3600.0
POLICIES = {"oldest first": False, "in memory first": True}
"""By name whether models in memory go first."""


@dataclass(frozen=True)
class Demand:
    """Workers, seconds to load a model, utilization of the workers with full batches, and the share of each model."""

    name: str
    workers: int
    load_s: float
    busy: float
    shares: tuple[float, ...]
    span_s: float = SPAN_S

    def arrivals(self, seed: int) -> list[Arrival]:
        rng, now_s, arrivals = random.Random(seed), 0.0, []
        kinds = [JobKind(f"model {at}", CURVE, f"model {at}", STEPS) for at in range(len(self.shares))]
        rate = self.busy * self.workers / kinds[0].image_s(MAX_BATCH)
        while (now_s := now_s + rng.expovariate(rate)) < self.span_s:
            arrivals.append(Arrival(now_s, rng.choices(kinds, self.shares)[0], STEPS))
        return arrivals


@dataclass(frozen=True)
class SwapOutcome:
    """Loads of models, and the waits of jobs, the shortest first."""

    loads: int
    waits_s: tuple[float, ...]

    def wait_s(self, share: float) -> float:
        return percentile(self.waits_s, share)


def simulate(demand: Demand, seed: int, *, in_memory_first: bool) -> SwapOutcome:
    workers, arrivals = [SimulatedWorker() for _ in range(demand.workers)], demand.arrivals(seed)
    models = sorted({arrival.kind.model for arrival in arrivals})
    order = QueueOrder(SimulatedQueue(), models, workers, demand.load_s if in_memory_first else 0.0)
    simulation = Simulation(order, workers, load_s=demand.load_s)
    simulation.run(arrivals)
    waits = (job.start_s - job.arrival.at_s for job in simulation.jobs if job.start_s is not None)
    return SwapOutcome(simulation.loads, tuple(sorted(waits)))


DEMANDS = (
    Demand("2 models on 2 workers, quiet", 2, 20.0, 0.1, (1, 1)),
    Demand("3 models on 2 workers, quiet", 2, 20.0, 0.1, (1, 1, 1)),
    Demand("3 models on 2 workers", 2, 20.0, 0.5, (1, 1, 1)),
    Demand("3 models on 2 workers, busy", 2, 20.0, 0.8, (1, 1, 1)),
    Demand("one model dominates", 2, 20.0, 0.6, (8, 1, 1)),
    Demand("6 models on 4 workers", 4, 60.0, 0.5, (6, 3, 2, 1, 1, 1)),
)


def rows(seed: int) -> Iterator[tuple[object, ...]]:
    for demand in DEMANDS:
        for name, in_memory_first in POLICIES.items():
            outcome = simulate(demand, seed, in_memory_first=in_memory_first)
            share = outcome.loads * demand.load_s / (demand.workers * demand.span_s)
            waits = (f"{outcome.wait_s(part):.0f}" for part in (0.5, 0.95, 1.0))
            yield demand.name, f"{demand.load_s:g}", name, outcome.loads, f"{share:.1%}", *waits


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args(argv).seed
    print(f"{SPAN_S / 3600:g} hours of arrivals, {STEPS} steps, at most {MAX_BATCH} rows, seed {seed}; in seconds\n")
    print_table("demand | load time | policy | loads | time loading | p50 wait | p95 | longest", rows(seed))


if __name__ == "__main__":
    main()
