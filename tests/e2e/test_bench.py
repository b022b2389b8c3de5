"""Short runs of the benchmarks that start all processes."""

import json
from pathlib import Path

import pytest

from bench import checkpoints, idle, interactive, over_http, step_cache

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_over_http_measures_all_figures(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    over_http.main(["--clients", "4", "--images", "8", "--turns", "1", "--json", str(saved)])
    record = json.loads(saved.read_text())
    assert all(rate > 0 for rate in record["images_per_second"].values())
    assert record["of_full_batches"].keys() == {"http", "by_request_head", "by_request_queue"}
    assert all(ratio > 0 for ratio in record["of_full_batches"].values())
    assert record["rows_per_forward"] > 1
    assert 0 <= record["gpu_thread_idle_while_queued"] < 1
    assert {"hardware", "commit", "command"} <= set(record["about"])


@pytest.mark.timeout(300)
def test_idle_measures_the_idle_share_with_an_s3_server(tmp_path: Path) -> None:
    """The figures are from the worker's metrics."""
    saved = tmp_path / "figures.json"
    idle.main(["--clients", "4", "--images", "24", "--json", str(saved)])
    record = json.loads(saved.read_text())
    assert 0 <= record["gpu_thread_idle_while_queued"] < 1
    assert record["busy_s"] > 0
    assert record["uploads"] > 0
    assert record["rows_per_forward"] > 1


@pytest.mark.timeout(300)
def test_checkpoints_compares_turns_with_and_without_them(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    checkpoints.main(["--clients", "8", "--turns", "1", "--seconds", "3", "--json", str(saved)])
    record = json.loads(saved.read_text())
    assert record["of_without"] > 0
    assert len(record["turns_of_without"]) == 1
    assert 0 < record["seconds_between_checkpoints_of_a_job"] < 60
    assert record["checkpoints_of_the_model_without"] == 0
    assert record["short_jobs"]["checkpoints"] == 0


@pytest.mark.timeout(300)
def test_interactive_measures_percentiles_and_a_step(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    interactive.main(["--jobs", "2", "--bulk", "256", "--turns", "1", "--json", str(saved)])
    record = json.loads(saved.read_text())
    solo, with_bulk = (record[f"interactive_{way}_ms"] for way in ("solo", "with_bulk"))
    assert all(0 < way["p50"] <= way["p95"] for way in (solo, with_bulk))
    assert record["p95_increase_ms"] == pytest.approx(with_bulk["p95"] - solo["p95"], abs=0.2)
    assert record["one_step_ms"] > 0
    assert record["bulk_images_per_second"]["bulk_only"] > 0


@pytest.mark.timeout(300)
def test_step_cache_compares_images_of_the_same_jobs(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    step_cache.main(["--clients", "4", "--images", "8", "--turns", "1", "--steps", "16", "--json", str(saved)])
    record = json.loads(saved.read_text())
    assert record["skipped_steps"] == 6
    assert record["gain"] > 0
    assert record["psnr_db"]["least"] > 30
    assert set(record["prompts_right"]) == {"off", "medium"}
