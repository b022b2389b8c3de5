"""The benchmark of deadlines: more are met by slack than by age, and jobs without one all end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.queue.deadline_mix import BURST, DeadlineMix
from bench.queue.deadlines import DeadlineServer, dated_jobs, main, simulate
from bench.simulate import CURVES, curve_of

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


def test_the_mix_has_the_rate_of_its_load() -> None:
    """Bursts count with all their jobs, also in a short turn."""
    jobs = DeadlineMix(load=0.8, jobs=1200, seed=2).arrivals(rate=2.0, rows=8)
    assert len(jobs) / jobs[-1].at_s == pytest.approx(1.6, rel=0.02)
    assert sum(job.limit_s is None for job in jobs) / len(jobs) == pytest.approx(0.6, abs=0.01)
    at_once = Counter(job.at_s for job in jobs)
    assert set(at_once.values()) == {1, BURST}


def test_the_figures_are_saved(tmp_path: Path) -> None:
    main(["--jobs", "40", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert {(row["curve"], row["order"]) for row in rows} == {
        (curve, order) for curve in CURVES for order in ("slack", "priority and age")
    }
