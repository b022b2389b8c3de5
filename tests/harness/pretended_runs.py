"""Runs jobs in the engine on a pretended device, and counts what the host does between two denoiser forwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.engine.runner import bench_job, prompt
from harness.pretended_device import DEVICE, PretendedDevice
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.job import Job
from worker.engine.fusion.fused_call import run_fused
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.loading import load

CPU = torch.device("cpu")  # of generators and autocast
# The first step of a job prepares what the others use; the last forward is followed by the decoding.
SKIPPED_FIRST, SKIPPED_LAST = 2, 1


@dataclass(frozen=True)
class HostWork:
    """Between two denoiser forwards: what the host queues on the device, and how often it waits for it, at what."""

    launches: float
    waits: Mapping[str, float]


class ForwardCounter:
    """Records the host's work between the forwards of a pipeline's denoisers."""

    def __init__(self, device: PretendedDevice) -> None:
        self._device = device
        self._between: list[tuple[int, Counter[str]]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward runs inside: its own operations are not counted."""
        self._between.append((self._device.launches, self._device.waits.copy()))
        with self._device.paused():
            yield
        self._device.reset()

    def steady(self) -> HostWork:
        """Return the mean over the forwards in the middle."""
        middle = self._between[SKIPPED_FIRST : len(self._between) - SKIPPED_LAST + 1]
        waits = sum((waits for _, waits in middle), Counter[str]())
        mean = {name: count / len(middle) for name, count in waits.items()}
        return HostWork(sum(launches for launches, _ in middle) / len(middle), mean)


@contextmanager
def _counted(module: torch.nn.Module, counter: ForwardCounter) -> Iterator[None]:
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with counter.forward():
            return run(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def fused_work(model: LoadedModel, device: PretendedDevice, jobs: list[Job]) -> tuple[HostWork, list[Any]]:
    """Count the fused forwards of jobs in the engine; also return the pixels of their images."""
    counter = ForwardCounter(device)
    tasks = [model.image_task(job, 0, InputImages(), StepCounter(lambda: None)) for job in jobs]
    for task in tasks:
        task.start(CPU)
    denoiser = model.denoisers[0].module
    with _counted(denoiser, counter):
        while parked := [(task, task.parked_call) for task in tasks if task.parked_call is not None]:
            _run_group(parked)
    for task in tasks:
        if task.error is not None:
            raise task.error
    return counter.steady(), [task.result[0].pixels for task in tasks]


def _run_group(parked: list[tuple[ImageTask, ParkedCall]]) -> None:
    first = min((call for _, call in parked), key=lambda call: call.shared_method.stage)
    group = [(task, call) for task, call in parked if call.batch_key == first.batch_key]
    for (task, _), output in zip(group, run_fused([call for _, call in group]), strict=True):
        task.resume(CPU, output)


def load_pretended(folder: Path) -> LoadedModel:
    """Load an image model onto the pretended device; its tensors do not support the inference mode."""
    limits = Limits(multiple_of=16, max_images=1)
    model = load(ModelSpec(id="model", source=str(folder), max_batch=4, limits=limits), folder, DEVICE)
    for method in model.shared_methods:
        method.lean = False
    return model


def sample_jobs(spec: ModelSpec, scheduler: str, steps: int, rows: int) -> list[Job]:
    fields: dict[str, Any] = {"steps": steps, "scheduler": scheduler}
    return [bench_job(f"job-{at}", spec, 64, prompt(at), seed=at, **fields) for at in range(rows)]
