"""`python -m bench.checkpoint_memory`: tensors between forwards with a checkpoint after every step, and without any.

Runs eight jobs of a small Stable Diffusion and of a small FLUX in an engine in this process, in turns without and with
checkpoints, and counts the memory of all live tensors after each step: the weights, what the pipelines hold, and what
is held for checkpoints. After the last step there are copies on the host, which on a CPU count too; on a GPU the figure
is what torch has allocated there. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.common import record
from bench.common.live_tensors import live_bytes
from bench.engine.runner import EngineRunner, bench_job, prompt
from bench.engine.shapes import SHAPES, disable_progress_bars, save
from shared.config.model_spec import ModelSpec
from worker.engine.protocol import CheckpointTaken, EngineEvent, JobProgress


class MemoryMeter(EngineRunner):
    """Notes the memory of tensors after each step of the first job, on the engine's thread."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        self.held: list[int] = []
        self.checkpoints = 0
        self._on_gpu = torch.device(device).type == "cuda"
        super().__init__(spec, device, threads=1)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case JobProgress(claim_key="job-0"):
                self._note()
            case CheckpointTaken():
                self.checkpoints += len([image for image in event.images if image is not None])
        super().on_event(event)

    def _note(self) -> None:
        if self._on_gpu:
            self.held.append(torch.cuda.memory_allocated())
        else:
            self.held.append(live_bytes(lambda tensor: tensor.dtype != torch.uint8))  # states of random generators


def measure(shape: str, folder: Path, *, jobs: int, steps: int, side: int, device: str) -> dict[str, Any]:
    """Return the memory after each step without and with checkpoints, in bytes; the first pair of turns warms up."""
    save(shape, folder)
    spec = ModelSpec(id=shape, source=str(folder), max_batch=jobs)
    meter = MemoryMeter(spec, device)
    figures: dict[str, Any] = {}
    for turn in range(4):
        meter.held, meter.checkpoints = [], 0
        name, checkpoint_s = ("with", 0.0) if turn % 2 else ("without", None)
        meter.run(
            [bench_job(f"job-{at}", spec, side, prompt(at), seed=at, steps=steps) for at in range(jobs)], checkpoint_s
        )
        figures[name] = {"bytes_after_steps": meter.held, "checkpoints": meter.checkpoints}
    meter.close()
    return figures


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--side", type=int, default=256, help="of the images, in pixels")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        sizes = {"jobs": options.jobs, "steps": options.steps, "side": options.side, "device": options.device}
        figures = {shape: measure(shape, Path(scratch) / shape, **sizes) for shape in SHAPES}
    record.report(options.json, figures, **sizes)


if __name__ == "__main__":
    main()
