"""The queue's order in simulated time: more deadlines are met by slack than by age, and models in memory go first."""

from __future__ import annotations

import json
from pathlib import Path

from bench.queue.deadline_mix import DeadlineMix
from bench.queue.deadlines import DeadlineServer, dated_jobs, main, simulate
from bench.simulate import CURVES, curve_of
from bench.swaps import Demand, InMemoryFirst, OldestFirst, SwapSimulation

MIX = DeadlineMix(load=0.8, jobs=400, seed=3)


def test_more_deadlines_are_met_by_slack_than_by_priority_and_age() -> None:
    by_age, by_slack = (simulate("512", MIX, order).met or 0.0 for order in (False, True))
    assert by_slack >= 0.95
    assert by_slack > by_age + 0.2


def test_jobs_without_a_deadline_are_not_starved() -> None:
    """All end, though jobs with deadlines go first."""
    jobs = dated_jobs(curve_of(CURVES["512"]), MIX)
    DeadlineServer(jobs, curve_of(CURVES["512"]), by_slack=True).run()
    assert all(job.end_s > job.arrival_s for job in jobs if job.deadline_s is None)


def test_the_figures_are_saved(tmp_path: Path) -> None:
    main(["--jobs", "40", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert {(row["curve"], row["order"]) for row in rows} == {
        (curve, order) for curve in CURVES for order in ("slack", "priority and age")
    }


def test_serving_models_in_memory_first_saves_loads_and_waits() -> None:
    """Compared with the oldest job first, on the same jobs."""
    demand = Demand("three on two", 2, 20.0, 0.6, (3, 2, 1), span_s=1800.0)
    in_memory, oldest = (SwapSimulation(demand, policy, seed=2).run() for policy in (InMemoryFirst(), OldestFirst()))
    assert len(in_memory.waits_s) == len(oldest.waits_s) == len(demand.arrivals(2))
    assert 2 * in_memory.loads < oldest.loads
    assert in_memory.wait_s(0.95) < oldest.wait_s(0.95)
