"""The engine benchmark measures and saves its figures with their environment."""

import json
from pathlib import Path

from bench.engine import comparison as engine


def test_a_small_shape_is_measured_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    engine.main([*["--models", "sd", "--steps", "2", "--rows", "2", "--repeats", "1", "--json"], str(saved)])
    record = json.loads(saved.read_text())
    (result,) = record["results"]
    assert result["rows_per_forward"] == 2.0
    assert min(result["fused_ms"], result["pipeline_batch_ms"], result["one_by_one_ms"]) > 0
    assert {"hardware", "commit", "command", "torch", "threads"} <= set(record["about"])
