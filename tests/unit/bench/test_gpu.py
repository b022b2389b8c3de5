"""The measurements for a GPU run on a CPU, with tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.common import record
from bench.gpu.__main__ import STAGES
from bench.gpu.summary import summary

ENOUGH_S = "3000"


def dry_run(out: Path, *options: str) -> list[dict[str, Any]]:
    """Run stages, and return the results; raises if a case failed."""
    command = [sys.executable, "-m", "bench.gpu", "--dry", "--out", str(out), "--budget-s", ENOUGH_S, *options]
    done = subprocess.run(command, cwd=record.ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, check=False)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    assert done.returncode == 0, [line for line in lines if {"error", "stopped"} & line.keys()]
    return lines


def test_the_engine_and_the_plain_pipeline_are_measured_side_by_side(tmp_path: Path) -> None:
    lines = dry_run(tmp_path, "--stages", "speed-z-image", "speed-qwen-image")
    engine = [line for line in lines if line.get("method") == "engine"]
    assert [(line["rows"], line["rows_per_forward"]) for line in engine] == 2 * [(1, 1), (2, 2)]
    assert all(line["of_plain"] > 0 for line in engine)
    text = (tmp_path / "summary.md").read_text("utf-8")
    assert "## speed-z-image" in text
    assert "of_plain" in text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_stages_run(tmp_path: Path) -> None:
    lines = dry_run(tmp_path)
    assert {line["stage"] for line in lines} >= {stage.name for stage in STAGES}
    assert {"hardware", "commit", "command", "torch"} <= lines[0].keys()
    correct = [line for line in lines if line["stage"] == "correctness"]
    assert [line["reproducible"] for line in correct] == ["bit-identical"] * 2
    gains = [line for line in lines if line.get("mode") == "max_batch 8 relative to 1"]
    assert [line["shape"] for line in gains] == ["z-image", "flux", "qwen-image"]


def test_a_machine_without_a_gpu_is_told_about_the_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=record.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--dry" in done.stderr


def test_the_summary_has_a_table_for_cases_alike_and_a_line_for_each_that_failed(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    lines = [
        {"stage": "speed", "rows": 1, "images_s": 2.0, "card": "one"},
        {"stage": "speed", "rows": 8, "images_s": 3.0, "card": "one"},
        {"stage": "speed", "rows": 9, "error": "no memory"},
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = "## speed\n\ncard one\n\nrows|images_s\n---|---\n1|2.0\n8|3.0\n\n- 9; **error** no memory\n"
    assert summary(results) == expected
