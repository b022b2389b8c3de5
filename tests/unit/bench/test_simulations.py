"""The queue's order in simulated time: short waits, more deadlines met by slack than by age, few loads of models."""

from __future__ import annotations

import json
from pathlib import Path

from bench.queue.deadlines import DeadlineMix, figures, main, run
from bench.simulate import measure
from bench.simulator.kinds import GAINS
from bench.swaps import Demand, simulate

MIX = DeadlineMix(load=0.8, jobs=400, seed=3)


def test_waits_are_shorter_than_with_whole_batches() -> None:
    mean, p99, rate = measure("fusequeue", "512", load=1.5, count=200, seed=2)
    for other in ("one at a time", "fixed window", "strict FIFO"):
        other_mean, other_p99, other_rate = measure(other, "512", load=1.5, count=200, seed=2)
        assert mean < other_mean
        assert p99 < other_p99
        assert rate >= other_rate


def test_jobs_run_one_at_a_time_where_batches_gain_nothing() -> None:
    assert measure("fusequeue", "1024", 0.9, 200, seed=2) == measure("one at a time", "1024", 0.9, 200, seed=2)


def test_more_deadlines_are_met_by_slack_than_by_priority_and_age() -> None:
    by_age, by_slack = (figures("512", MIX, by_slack=order).met or 0.0 for order in (False, True))
    assert by_slack >= 0.95
    assert by_slack > by_age + 0.2


def test_jobs_without_a_deadline_are_not_starved() -> None:
    """All end, though jobs with deadlines go first."""
    jobs = run("512", MIX, by_slack=True)
    assert all(job.end_s is not None for job in jobs if job.arrival.deadline_s is None)


def test_the_figures_are_saved(tmp_path: Path) -> None:
    main(["--jobs", "40", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert {(row["curve"], row["order"]) for row in rows} == {
        (curve, order) for curve in GAINS for order in ("slack", "priority and age")
    }


def test_serving_models_in_memory_first_saves_loads_and_waits() -> None:
    """Compared with the oldest job first, on the same jobs."""
    demand = Demand("three on two", 2, 20.0, 0.6, (3, 2, 1), span_s=1800.0)
    in_memory, oldest = (simulate(demand, seed=2, in_memory_first=first) for first in (True, False))
    assert len(in_memory.waits_s) == len(oldest.waits_s) == len(demand.arrivals(2))
    assert 2 * in_memory.loads < oldest.loads
    assert in_memory.wait_s(0.95) < oldest.wait_s(0.95)
