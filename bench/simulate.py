"""`python -m bench.simulate`: latency under load by batching policy, in simulated time.

Jobs arrive at random (Poisson) in two signatures, with 20 to 40 steps. The queue's own order and readiness and
`shared.autoscaling.efficient_rows` decide, and are compared with three policies of other servers. A load of 1 is what a
server without batching can sustain.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence

from bench.simulator.kinds import GAINS, Arrival, JobKind, curve_of
from bench.simulator.policies import WINDOW_S, QueueOrder, WholeBatches, fixed_window, one_at_a_time, strict_fifo
from bench.simulator.queue import SimulatedQueue
from bench.simulator.report import percentile, print_table
from bench.simulator.simulation import Policy, SimulatedWorker, Simulation

STEP_S = 0.05
STEPS = (20, 28, 40)
MODEL = "model"
LOADS = (0.3, 0.6, 0.9, 1.5, 2.2)
POLICIES: dict[str, Callable[[], Policy]] = {
    "one at a time": lambda: WholeBatches(one_at_a_time),
    "fixed window": lambda: WholeBatches(fixed_window),
    "strict FIFO": lambda: WholeBatches(strict_fifo),
    "fusequeue": lambda: QueueOrder(SimulatedQueue(WINDOW_S), [MODEL]),
}


def two_kinds(curve: str) -> list[JobKind]:
    """Return two signatures of one model with the same published cost curve."""
    return [JobKind(name, curve_of(GAINS[curve], STEP_S), MODEL, 0) for name in ("a", "b")]


def poisson(kinds: Sequence[JobKind], load: float, count: int, seed: int) -> list[Arrival]:
    """Return `count` jobs at `load` times the rate that a server without batching sustains."""
    rng, arrivals, now_s = random.Random(seed), [], 0.0
    rate = load / (STEP_S * statistics.mean(STEPS))
    for _ in range(count):
        now_s += rng.expovariate(rate)
        arrivals.append(Arrival(now_s, kinds[0 if rng.random() < 0.7 else 1], rng.choice(STEPS)))
    return arrivals


def measure(policy: str, curve: str, load: float, count: int, seed: int) -> tuple[float, float, float]:
    """Return mean latency and 99th percentile (s) and throughput (jobs/s)."""
    simulation = Simulation(POLICIES[policy](), [SimulatedWorker()], by_step=True)
    simulation.run(poisson(two_kinds(curve), load, count, seed))
    latencies = sorted(job.latency_s for job in simulation.jobs)
    span_s = simulation.clock.now_s - simulation.jobs[0].arrival.at_s
    return statistics.mean(latencies), percentile(latencies, 0.99), count / span_s


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(
        f"{options.jobs} jobs, steps {STEPS}, {STEP_S * 1000:.0f} ms per step of one row, "
        f"window {WINDOW_S * 1000:.0f} ms\n"
    )
    cases = ((curve, load, policy) for curve in GAINS for load in LOADS for policy in POLICIES)
    figures = ((case, measure(case[2], *case[:2], options.jobs, options.seed)) for case in cases)
    print_table(
        "curve | load | policy | mean s | p99 s | jobs/s",
        ((*case, f"{mean:.2f}", f"{p99:.2f}", f"{rate:.3f}") for case, (mean, p99, rate) in figures),
    )


if __name__ == "__main__":
    main()
