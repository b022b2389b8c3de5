"""`python -m bench.gpu.facts`: versions, the card and its ceilings, and what a launch costs."""

from __future__ import annotations

import subprocess

import torch

from bench.common import record
from bench.gpu.stage import DEVICE, DRY, Figures, Stage, seconds_of

QUERY = "name,driver_version,memory.total,clocks.sm,power.limit,temperature.gpu"


def machine(figures: Figures) -> None:
    figures |= record.about()
    figures["cuda"], figures["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
    if not DRY:
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
        figures["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()


def ceilings(figures: Figures) -> None:
    """Measure a device-to-device copy, a matrix product, copies from page-locked and plain memory, and a launch."""
    side, nbytes = (256, 2**22) if DRY else (8192, 2**32)
    one = torch.randn(side, side, device=DEVICE).bfloat16()
    figures["bf16_tflops"] = round(2 * side**3 / seconds_of(lambda: one @ one) / 1e12, 1)
    block = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(block)
    figures["copy_tb_s"] = round(2 * nbytes / seconds_of(lambda: other.copy_(block)) / 1e12, 2)
    part = block[: nbytes // 4]
    plain = torch.empty(nbytes // 4, dtype=torch.uint8)
    locked = plain if DRY else torch.empty(nbytes // 4, dtype=torch.uint8, pin_memory=True)
    figures["from_locked_gb_s"] = round(part.numel() / seconds_of(lambda: part.copy_(locked), 3) / 1e9, 1)
    figures["from_plain_gb_s"] = round(part.numel() / seconds_of(lambda: part.copy_(plain), 3) / 1e9, 1)
    small = torch.zeros(8, device=DEVICE)
    figures["launch_us"] = round(1e6 * seconds_of(lambda: small.add_(1), 2000), 2)


def main() -> None:
    stage = Stage("facts")
    stage.wait_for_turn()
    stage.run(machine, what="machine")
    stage.run(ceilings, what="ceilings")


if __name__ == "__main__":
    main()
