"""The benchmarks of the queue: no operation does more work when more is queued, and jobs for later are queued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.queue import later
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
