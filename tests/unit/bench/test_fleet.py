"""The simulation of fleets: scaling on measured costs wants few workers beyond the need."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bench.fleet.replays import REPLAYS, Replay
from bench.fleet.simulation import FleetSimulation

LONG = {"batch_with_window", "bulk_behind_bursts"}  # four and seven seconds; the others half a second


@pytest.mark.parametrize(
    "make_replay",
    [pytest.param(one, marks=[pytest.mark.slow] if one.__name__ in LONG else []) for one in REPLAYS],
)
def test_a_replay_wants_at_most_one_worker_above_its_need(make_replay: Callable[[random.Random], Replay]) -> None:
    """Another seed than that of the recorded table; batches end in time."""
    replay = make_replay(random.Random(2))
    outcome = FleetSimulation(replay.load, seed=2).outcome()
    assert replay.most_above(outcome) <= 1
    assert outcome.late == 0
