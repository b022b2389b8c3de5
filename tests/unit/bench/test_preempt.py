"""The benchmark of interactive jobs shows what it claims: the next step, and unchanged pictures."""

import json
from pathlib import Path

from bench import preempt


def test_a_small_shape_is_measured_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    sizes = ["--rows", "2", "--bulk-steps", "12", "--interactive-steps", "1", "--repeats", "1"]
    preempt.main(["--models", "sd", *sizes, "--json", str(kept)])
    told = json.loads(kept.read_text())
    (result,) = told["results"]
    assert result["steps_waited"] == 0, "it takes part in the next forward"
    assert result["largest_difference"] <= 1
    assert result["steps_in_line"] == 9, "all that the batch has left"
    assert all(value > 0 for name, value in result.items() if name.endswith("_ms"))
    assert {"hardware", "commit", "command", "torch"} <= set(told["about"])
