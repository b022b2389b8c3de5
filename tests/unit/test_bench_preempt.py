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
    assert result["interactive_set_aside_ms"] < result["interactive_in_line_ms"]
    assert {"hardware", "commit", "command", "torch"} <= set(told["about"])
