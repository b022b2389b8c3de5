"""`python -m bench.gpu.doctor`: the tests that need a GPU, and what `fusequeue doctor` says of the device."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.common import record
from bench.gpu.stage import DEVICE, DRY, Figures, Stage


def own_tests(figures: Figures) -> None:
    """Run the tests that need a CUDA device."""
    tests = record.ROOT / "tests"
    marked = [str(file) for file in tests.rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8")]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not gpu" if DRY else "gpu"]
    command = [sys.executable, "-m", "pytest", *options, *marked]
    done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, timeout=100)
    print(done.stdout[-3000:], done.stderr[-3000:])
    figures["pytest"] = " ".join((done.stdout.strip().splitlines() or ["no output"])[-1].split())


def verdicts(figures: Figures) -> None:
    """Ask the part of `fusequeue doctor` that looks at the device."""
    command = [sys.executable, "-m", "worker.engine.checks.memory_fit"]
    done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, timeout=60)
    print(done.stderr[-2000:])
    for one in map(json.loads, done.stdout.splitlines()):
        figures[one["name"]] = f"{one['verdict']}, {one['seen']}"


def main() -> None:
    stage = Stage("doctor")
    stage.wait_for_turn()
    stage.run(own_tests, what="tests marked gpu")
    stage.run(verdicts, what="fusequeue doctor", device=DEVICE)


if __name__ == "__main__":
    main()
