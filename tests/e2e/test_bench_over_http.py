"""The benchmark over HTTP runs the real thing and tells what it saw."""

import json
from pathlib import Path

import pytest

from bench import beside, idle, over_http


@pytest.mark.timeout(300)  # it starts every part of fusequeue
def test_a_short_run_gives_all_figures(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    over_http.main(["--clients", "4", "--pictures", "8", "--turns", "1", "--json", str(kept)])
    told = json.loads(kept.read_text())
    assert all(rate > 0 for rate in told["pictures_a_second"].values())
    assert told["of_full_batches"].keys() == {"http", "by_request_head", "by_request_line"}
    assert all(ratio > 0 for ratio in told["of_full_batches"].values())
    assert told["rows_a_forward"] > 1
    assert 0 <= told["gpu_thread_idle_while_work_waits"] < 1
    assert {"hardware", "commit", "command"} <= set(told["about"])


@pytest.mark.timeout(300)
def test_a_short_run_against_an_s3_server_tells_the_idle_share(tmp_path: Path) -> None:
    """From the worker's own metrics: every measured picture was uploaded."""
    kept = tmp_path / "figures.json"
    idle.main(["--clients", "4", "--pictures", "24", "--json", str(kept)])
    told = json.loads(kept.read_text())
    assert 0 <= told["gpu_thread_idle_while_work_waits"] < 1
    assert told["busy_s"] > 0
    assert told["uploads"] > 0
    assert told["rows_a_forward"] > 1


@pytest.mark.timeout(300)
def test_a_short_run_beside_bulk_jobs_tells_percentiles_and_a_step(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    beside.main(["--jobs", "2", "--bulk", "256", "--turns", "1", "--json", str(kept)])
    told = json.loads(kept.read_text())
    solo, company = (told[f"interactive_{way}_ms"] for way in ("alone", "beside_bulk"))
    assert all(0 < way["p50"] <= way["p95"] for way in (solo, company))
    assert told["p95_raised_by_ms"] == pytest.approx(company["p95"] - solo["p95"], abs=0.2)
    assert told["one_step_ms"] > 0
    assert told["bulk_pictures_a_second"]["alone"] > 0
