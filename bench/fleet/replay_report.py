"""`python -m bench.fleet --replays`: workers wanted beyond the need, GPU-seconds, waits and scale changes."""

from __future__ import annotations

import random

from bench.fleet import decision
from bench.fleet.replays import REPLAYS, Replay
from bench.fleet.simulation import FleetSimulation
from bench.simulator.report import print_table

MAX_WORKERS = 32
COLUMNS = (
    "replay | needed | wanted above the need | GPU-seconds | p95 wait, s"
    " | bulk jobs late | scale changes | most workers"
)


def print_replays(seed: int) -> None:
    print_table(COLUMNS, (row(make(random.Random(seed)), seed) for make in REPLAYS))


def row(replay: Replay, seed: int) -> tuple[object, ...]:
    outcome = FleetSimulation(replay.load, decision.wanted, seed, MAX_WORKERS).outcome()
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
