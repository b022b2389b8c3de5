"""The queue's order in simulated time: short waits, more deadlines met by slack than by age, few loads of models.

Batches that move to other workers are simulated too.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.merging import FLEETS, RULES, Outcome, arrivals
from bench.merging import simulate as simulate_moves
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


def moving(rule: str, signatures: int, curve: str = "512") -> Outcome:
    """Return what 200 jobs of so many signatures of a model see on four workers."""
    fleet = next(one for one in FLEETS if one.workers == 4 and len(one.models) == signatures)
    return simulate_moves(fleet, arrivals(fleet, curve, 0.6, 200, seed=2), RULES[rule], move_s=0.1)


def test_a_batch_moves_only_for_jobs_of_other_signatures() -> None:
    assert moving("others queued", signatures=1) == moving("never", signatures=1)
    assert moving("others queued", signatures=3).moves > 0


def test_batches_that_always_move_save_device_time_and_delay_jobs() -> None:
    never, always = moving("never", signatures=1), moving("always", signatures=1)
    assert always.device_s < 0.9 * never.device_s
    assert always.mean_s > never.mean_s


def test_no_batch_moves_where_rows_gain_nothing() -> None:
    assert moving("always", signatures=3, curve="1024").moves == 0
