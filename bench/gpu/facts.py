"""`python -m bench.gpu.facts`: versions, and the card."""

from __future__ import annotations

import subprocess

import torch

from bench.common import record
from bench.gpu.stage import DRY, Figures, Stage

QUERY = "name,driver_version,memory.total,clocks.sm,power.limit,temperature.gpu"


def machine(figures: Figures) -> None:
    figures |= record.about()
    figures["cuda"], figures["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    if not DRY:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        figures["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


def main() -> None:
    stage = Stage("facts")
    stage.wait_for_turn()
    stage.run(machine, what="machine")


if __name__ == "__main__":
    main()
