"""Reports of the benchmarks that no test runs: they start many servers, or others' from their packages."""

from __future__ import annotations

from bench import cost
from bench.peers import peer_report
from bench.peers.side_by_side import MeasuredRow


def test_the_cost_of_each_part_is_the_median_without_the_model() -> None:
    assert cost.part_of("/venv/bin/python -P -m api.chores") == "chores"
    turns = [({"engine": 60.0}, 40.0), ({"engine": 70.0}, 50.0), ({"engine": 90.0}, 60.0)]
    assert cost.figures_of(turns)["engine, less model"] == 20.0


def test_fusequeue_is_compared_with_the_peer_that_is_best_at_the_median() -> None:
    ratios = {"fusequeue": [0.9, 0.8, 0.1], "mosec": [0.5, 0.4, 0.9], "ray": [0.3, 0.3, 0.3]}
    measured = [
        MeasuredRow(server, "closed-8", turn, ratio, value=1.0)
        for server, turns in ratios.items()
        for turn, ratio in enumerate(turns)
    ]
    medians = peer_report.medians(measured)
    assert medians == {"closed-8": {"fusequeue": 0.8, "mosec": 0.5, "ray": 0.3}}
    assert peer_report.to_best_peer(medians) == {"closed-8": 0.8 / 0.5}
