"""The benchmarks of the queue: no operation does more work when more is queued or waits; jobs for later are queued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.queue import children, later
from bench.queue.__main__ import main

NOT_GROWING = ("submit", "next_ready_ms", "renew", "report_progress", "release", "settle", "cancel_jobs", "heartbeat")


@pytest.mark.slow
def test_a_small_form_runs_and_no_operation_needs_more_commands_for_a_longer_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "figures.json"
    sizes = ["--jobs", "3000", "--signatures", "300", "--tenants", "300", "--rounds", "30"]
    first, *_, last = main([*sizes, "--json", str(saved)])
    assert (first["jobs"], last["jobs"]) == (100, 3000)
    assert 1_000 < last["bytes_per_job"] < 20_000
    for name in NOT_GROWING:
        most = [step["operations"][name]["max_commands"] for step in (first, last)]
        assert most[1] <= 1.5 * most[0] + 10, f"{name}: {most}"
    assert json.loads(saved.read_text())["steps"][-1] == last
    assert "| claim |" in capsys.readouterr().out


@pytest.mark.slow
def test_jobs_for_later_are_queued_by_heartbeats() -> None:
    (figures,) = later.main(["--jobs", "400", "--workers", "2"])
    assert (figures.jobs, figures.early) == (400, 0)


@pytest.mark.slow
def test_no_operation_needs_more_commands_when_more_jobs_wait_for_others() -> None:
    figures = children.main(["--waiting", "0", "2000", "--rounds", "2"])
    few, many = [step["operations"] for step in figures["steps"]]
    for name in few:
        assert many[name]["max_commands"] <= 1.1 * few[name]["max_commands"] + 10, name
    assert figures["all_told"]["told_and_queued"] == 2 * 2000
