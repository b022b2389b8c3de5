"""`python -m bench.gpu`: correctness, speed at real sizes and the served comparison, on this machine's GPU.

Stages run one after another, the most valuable first, each within its limit. Results are in the folder `--out`: a line
for each case in `results.jsonl`, written at once, `summary.md`, made anew after each stage, and `log.txt`. `--dry` runs
the same stages on a CPU with tiny models; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import torch

from bench.common import record
from bench.gpu.summary import summary

OUT = record.ROOT / "bench/results/gpu"
SHORTEST_S = 15.0  # a stage with less time is not begun
DRY_LIMITS = 8  # times longer on a CPU


class PlannedStage(NamedTuple):
    """A stage, and its commands, which run at once."""

    name: str
    limit_s: float
    commands: tuple[str, ...]


STAGES = (
    PlannedStage("facts", 20, ("facts",)),
    PlannedStage("correctness", 120, ("correctness float32", "correctness bfloat16", "memory")),
    PlannedStage("speed-z-image", 80, ("speed z-image",)),
    PlannedStage("served-z-image", 120, ("served z-image",)),
    PlannedStage("speed-flux", 80, ("speed flux",)),
    PlannedStage("served-flux", 150, ("served flux",)),
    PlannedStage("served-qwen-image", 150, ("served qwen-image",)),
    PlannedStage("speed-sdxl", 60, ("speed sdxl",)),
    PlannedStage("extras", 90, ("extras",)),
    PlannedStage("speed-qwen-image", 70, ("speed qwen-image",)),
    PlannedStage("speed-wan-2.1-t2v", 60, ("speed wan-2.1-t2v",)),
    PlannedStage("doctor", 60, ("doctor",)),
)


class RunningStage:
    """The processes of a stage, which import their libraries and wait for their turn."""

    def __init__(self, stage: PlannedStage, environment: Mapping[str, str], log: IO[bytes]) -> None:
        self.stage = stage
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-u", "-m", *f"bench.gpu.{command}".split()],
                cwd=record.ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for command in stage.commands
        ]

    def finish(self, limit_s: float) -> bool:
        """Give the stage its turn; False if it had to be ended after the limit."""
        ends_s = time.monotonic() + limit_s
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has failed; the log says why
                self._begin(process, limit_s)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, ends_s - time.monotonic()))
        in_time = all(process.poll() is not None for process in self._processes)
        self.end()
        return in_time

    def end(self) -> None:
        """End all processes of the stage, and what they started."""
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @staticmethod
    def _begin(process: subprocess.Popen[bytes], limit_s: float) -> None:
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(f"{limit_s}\n".encode())


def run(stages: Sequence[PlannedStage], out: Path, budget_s: float, *, dry: bool) -> bool:
    """Run `stages` within `budget_s`, and return whether every case succeeded."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    results.write_text("")
    path = os.pathsep.join(str(record.ROOT / folder) for folder in (".", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "BENCH_GPU_RESULTS": str(results), "BENCH_GPU_AWAITS_TURN": "1"}
    environment |= {"BENCH_GPU_DRY": str(int(dry)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ends_s = time.monotonic() + budget_s
    with (out / "log.txt").open("wb") as log:
        following = RunningStage(stages[0], environment, log)
        for at, stage in enumerate(stages):
            current, left_s = following, ends_s - time.monotonic()
            if left_s < SHORTEST_S:
                current.end()
                note(results, stage.name, f"not begun: {left_s:.0f} s left of the budget")
                break
            if at + 1 < len(stages):
                following = RunningStage(stages[at + 1], environment, log)
            began_s, limit_s = time.monotonic(), min(stage.limit_s * (DRY_LIMITS if dry else 1), left_s)
            if not current.finish(limit_s):
                note(results, stage.name, f"after its limit of {limit_s:.0f} s")
            (out / "summary.md").write_text(summary(results), "utf-8")
            print(f"{stage.name}: {time.monotonic() - began_s:.0f} s", flush=True)
    lines = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    return not any({"error", "stopped"} & line.keys() for line in lines)


def note(results: Path, stage: str, reason: str) -> None:
    """Write that a stage did not run to its end."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage": stage, "stopped": reason}) + "\n")


def main(argv: list[str] | None = None) -> None:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", nargs="+", choices=names, default=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument("--budget-s", type=float, default=1200.0, help="for all stages together")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--dry", action="store_true", help="on a CPU with tiny models; the figures mean nothing")
    options = parser.parse_args(argv)
    if not options.dry and not torch.cuda.is_available():
        sys.exit("bench.gpu: torch sees no CUDA device; --dry runs the stages on a CPU with tiny models")
    if options.dry and options.out == OUT:
        sys.exit("bench.gpu: --dry needs --out FOLDER, as its figures do not belong among the recorded ones")
    chosen = [stage for stage in STAGES if stage.name in options.stages]
    succeeded = run(chosen, options.out, options.budget_s, dry=options.dry)
    print((options.out / "summary.md").read_text("utf-8"))
    if not succeeded:
        sys.exit("bench.gpu: cases failed, or a stage was ended; the summary above and log.txt say which")


if __name__ == "__main__":
    main()
