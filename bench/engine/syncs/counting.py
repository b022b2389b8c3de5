"""Counts what the host does between two denoiser forwards: in unmodified pipelines, and in the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.engine.syncs.pretended_device import PretendedDevice
from shared.job import Job
from worker.engine.fusion.fused_call import run_fused
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.loading import LoadedModel

CPU = torch.device("cpu")  # of generators and autocast
# The first step of a job prepares what the others use; the last forward is followed by the decoding.
SKIPPED_FIRST, SKIPPED_LAST = 2, 1


@dataclass(frozen=True)
class HostWork:
    """Between two denoiser forwards: what the host queues on the device, and how often it waits for it, at what."""

    launches: float
    waits: Mapping[str, float]

    @property
    def syncs(self) -> float:
        return sum(self.waits.values())

    def times(self, rows: int) -> HostWork:
        return HostWork(self.launches * rows, {name: count * rows for name, count in self.waits.items()})


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


def plain_work(pipeline: Any, device: PretendedDevice, arguments: dict[str, Any]) -> HostWork:
    """Count a call of an unmodified pipeline."""
    counter = ForwardCounter(device)
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    with _counted(denoiser, counter):
        pipeline(**arguments, generator=torch.Generator().manual_seed(1), output_type="latent")
    return counter.steady()


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
