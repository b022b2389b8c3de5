"""The engine benchmark measures and saves its figures with their environment."""

import json
from pathlib import Path

import pytest

from bench.engine import comparison as engine
from bench.engine import decodes, masks, preempt


def test_a_small_shape_is_measured_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    engine.main([*["--models", "sd", "--steps", "2", "--rows", "2", "--repeats", "1", "--json"], str(saved)])
    record = json.loads(saved.read_text())
    (result,) = record["results"]
    assert result["rows_per_forward"] == 2.0
    assert min(result["fused_ms"], result["pipeline_batch_ms"], result["one_by_one_ms"]) > 0
    assert {"hardware", "commit", "command", "torch", "threads"} <= set(record["about"])


@pytest.mark.slow
def test_the_tax_of_masks_is_measured_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    masks.main(["--sides", "64", "--repeats", "1", "--json", str(saved)])
    results = json.loads(saved.read_text())["results"]
    assert [result["lengths"] for result in results] == [list(lengths) for lengths in masks.LENGTHS]
    assert all(min(result["mask"], result["grouped"], result["equal_ms"]) > 0 for result in results)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' peak of memory")
def test_the_memory_of_divided_decodes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodes, "SIDE", 128)
    saved = tmp_path / "figures.json"
    decodes.main(["--json", str(saved)])
    results = {result["keys"]: result for result in json.loads(saved.read_text())["results"]}
    assert results["both"]["peak_mib"] < results["neither"]["peak_mib"]


@pytest.mark.slow
def test_preemption_is_measured_and_saved(tmp_path: Path) -> None:
    """The interactive job joins the next step, and images do not change."""
    saved = tmp_path / "figures.json"
    sizes = ["--rows", "2", "--bulk-steps", "12", "--interactive-steps", "1", "--repeats", "1"]
    preempt.main(["--models", "sd", *sizes, "--json", str(saved)])
    (result,) = json.loads(saved.read_text())["results"]
    assert (result["steps_waited"], result["steps_queued"]) == (0, 9)
    assert result["largest_difference"] <= 1
    assert all(value > 0 for name, value in result.items() if name.endswith("_ms"))
