"""The preemption benchmark: the interactive job joins the next step, and images do not change."""

import json
from pathlib import Path

from bench.engine import preempt


def test_a_small_shape_is_measured_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    sizes = ["--rows", "2", "--bulk-steps", "12", "--interactive-steps", "1", "--repeats", "1"]
    preempt.main(["--models", "sd", *sizes, "--json", str(saved)])
    record = json.loads(saved.read_text())
    (result,) = record["results"]
    assert result["steps_waited"] == 0, "it joins the next forward"
    assert result["largest_difference"] <= 1
    assert result["steps_queued"] == 9, "all remaining steps of the batch"
    assert all(value > 0 for name, value in result.items() if name.endswith("_ms"))
    assert {"hardware", "commit", "command", "torch"} <= set(record["about"])
