"""`python -m bench.engine.syncs`: syncs and launches per noise scheduler, in eight plain pipeline calls and the engine.

Runs small pipelines with their values on a pretended device, which counts and needs no GPU. The counts depend on the
versions of diffusers and torch, not on the machine or the size of the model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from bench.engine import shapes
from bench.engine.runner import GUIDANCE, bench_job, prompt
from bench.engine.syncs.counting import HostWork, fused_work, plain_work
from bench.engine.syncs.pretended_device import DEVICE, PretendedDevice
from shared.config.models_file import Defaults, Limits, ModelSpec
from shared.config.scheduler_choices import SchedulerChoice
from shared.job import Job
from shared.job_fields import Task
from shared.runtime import log
from worker.engine.pipelines.chosen_schedulers import make_scheduler
from worker.engine.pipelines.loading import LoadedModel, load

SIDE = 64
STEPS = 8
FRAMES = 5

NOISE_SCHEDULERS = {
    "sd": (
        "DDIMScheduler",
        "DDPMScheduler",
        "DEISMultistepScheduler",
        "DPMSolverMultistepScheduler",
        "DPMSolverSinglestepScheduler",
        "EulerAncestralDiscreteScheduler",
        "EulerDiscreteScheduler",
        "HeunDiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "LCMScheduler",
        "PNDMScheduler",
        "SASolverScheduler",
        "TCDScheduler",
        "UniPCMultistepScheduler",
    ),
    "flux": ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"),
    "wan": ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"),
}


@dataclass(frozen=True)
class SyncRow:
    """A row of the table, for the rows of one denoiser forward."""

    shape: str
    scheduler: str
    plain: HostWork
    fused: HostWork

    def __str__(self) -> str:
        counts = (self.plain.syncs, self.fused.syncs, self.plain.launches, self.fused.launches)
        waits = ", ".join(f"{count:.0f} x {name}" for name, count in sorted(self.plain.waits.items()))
        cells = (self.shape, self.scheduler.removesuffix("Scheduler"), *(f"{count:.0f}" for count in counts), waits)
        return f"| {' | '.join(cells)} |"


class SyncCounter:
    """Counts the noise schedulers of one shape; for use while the pretended device is entered."""

    def __init__(self, shape: str, folder: Path, device: PretendedDevice, rows: int) -> None:
        self._shape = shape
        self._device = device
        self._rows = rows
        self._pipeline: Any = DiffusionPipeline.from_pretrained(folder).to(DEVICE)
        self._scheduler = self._pipeline.scheduler
        self.model = load_pretended(spec_of(shape, folder, rows), folder)

    def count(self, scheduler: str) -> SyncRow:
        fused, _ = fused_work(self.model, self._device, sample_jobs(self.model.spec, scheduler, self._rows))
        self._pipeline.scheduler = make_scheduler(SchedulerChoice(name=scheduler), self._scheduler)
        self._pipeline.set_progress_bar_config(disable=True)
        size = {"height": SIDE, "width": SIDE, **({"num_frames": FRAMES} if self._shape in shapes.VIDEO_SHAPES else {})}
        guidance = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE}
        plain = plain_work(self._pipeline, self._device, {"prompt": prompt(0), **size, **guidance})
        return SyncRow(self._shape, scheduler, plain.times(self._rows), fused)


def spec_of(shape: str, folder: Path, rows: int) -> ModelSpec:
    fields: dict[str, Any] = {"id": shape, "source": str(folder), "max_batch": rows}
    if shape not in shapes.VIDEO_SHAPES:
        return ModelSpec(**fields, limits=Limits(multiple_of=16, max_images=1))
    limits = Limits(multiple_of=16, max_images=1, max_frames=FRAMES, frames_multiple=4)
    return ModelSpec(**fields, limits=limits, tasks=(Task.TEXT_TO_VIDEO,), defaults=Defaults(frames=FRAMES, fps=8))


def sample_jobs(spec: ModelSpec, scheduler: str, rows: int) -> list[Job]:
    fields: dict[str, Any] = {"steps": STEPS, "scheduler": scheduler}
    if Task.TEXT_TO_VIDEO in spec.tasks:
        fields |= {"task": Task.TEXT_TO_VIDEO, "frames": FRAMES}
    return [bench_job(f"job-{at}", spec, SIDE, prompt(at), seed=at, **fields) for at in range(rows)]


def load_pretended(spec: ModelSpec, folder: Path) -> LoadedModel:
    """Load a model onto the pretended device; its tensors do not support the inference mode."""
    model = load(spec, folder, DEVICE)
    for method in model.shared_methods:
        method.lean = False
    return model


def count_all(shapes_counted: Sequence[str], rows: int) -> Iterator[SyncRow]:
    for shape in shapes_counted:
        with tempfile.TemporaryDirectory() as folder, PretendedDevice() as device:
            with device.paused():
                shapes.save(shape, Path(folder))
            counter = SyncCounter(shape, Path(folder), device, rows)
            for scheduler in NOISE_SCHEDULERS[shape]:
                yield counter.count(scheduler)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--shapes", nargs="+", choices=[*NOISE_SCHEDULERS], default=[*NOISE_SCHEDULERS])
    options = parser.parse_args(argv)
    log.configure("WARNING")
    warnings.simplefilter("ignore", DeprecationWarning)  # some schedulers, under numpy 2.4
    shapes.disable_progress_bars()
    torch.set_grad_enabled(False)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("diffusers", "torch"))
    print(f"Between two denoiser forwards of {options.rows} rows, guidance doubled; {versions}\n")
    print(
        "| pipeline | noise scheduler | syncs, plain | syncs, engine | launches, plain | launches, engine | at what |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in count_all(options.shapes, options.rows):
        print(row, flush=True)


if __name__ == "__main__":
    main()
