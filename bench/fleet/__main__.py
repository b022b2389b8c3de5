"""`python -m bench.fleet`: what makes a fleet too large, replayed in simulated time.

For each replay: the workers wanted beyond the need, GPU-seconds, waits of jobs that are not bulk, and scale changes.
"""

from __future__ import annotations

import argparse
import random

from bench.fleet.replays import REPLAYS, Replay
from bench.fleet.simulation import FleetSimulation
from bench.simulator.report import print_table

COLUMNS = (
    "replay | needed | wanted above the need | GPU-seconds | p95 wait, s"
    " | bulk jobs late | scale changes | most workers"
)


def row(replay: Replay, seed: int) -> tuple[object, ...]:
    outcome = FleetSimulation(replay.load, seed).outcome()
    has_due = any(arrival.deadline_s is not None for arrival in replay.load.arrivals)
    return (
        replay.load.name,
        " to ".join(map(str, sorted({workers for _, workers in replay.need if workers}))),
        replay.most_above(outcome),
        round(outcome.gpu_s),
        round(outcome.wait_s(0.95)) if outcome.waits_s else None,
        outcome.late if has_due else None,
        outcome.changes,
        outcome.max_workers,
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args(argv).seed
    print_table(COLUMNS, (row(make(random.Random(seed)), seed) for make in REPLAYS))


if __name__ == "__main__":
    main()
