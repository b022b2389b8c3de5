"""The check before a model's first checkpoint: a sample image that continues must be the one that was not stopped.

Whether a pipeline keeps more from step to step than its noise schedulers do, such as a guider with momentum, shows only
in its images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog
import torch

from shared.errors import OutOfMemory
from shared.job import Job
from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.file_format import read, write
from worker.engine.checkpoints.identity import identity_of
from worker.engine.checkpoints.task_record import TaskRecord
from worker.engine.checkpoints.trees import NotStorable
from worker.engine.checks.sample_jobs import PROMPTS, SampleSize, sample_files, sample_job, sample_sizes, with_control
from worker.engine.errors import as_job_error
from worker.engine.fusion.module_proxy import Stage
from worker.engine.outputs import Audio, Latents, Mesh, Output
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.task_pipelines import takes_last_image

Result = Output | Audio | Mesh | Latents

log = structlog.get_logger()

STEPS = 4
MOST_LEVELS = 2
"""Difference of a pixel, or of a sample as a pixel, that a GPU can make between two equal calls; a CPU makes none."""


def check_resuming(model: LoadedModel, job: Job, device: torch.device) -> None:
    """Find out whether jobs of the task of `job`, with control nets if it has some, can continue from checkpoints.

    The outcome is in `model.resume_faults`; without memory for the check there is none yet.
    """
    fault: str | None = None
    for size in sample_sizes(model.spec):
        try:
            made = _made(model, _sample(model, job, size), device)
        except BaseException as error:
            failure = as_job_error(error)
            if isinstance(failure, OutOfMemory):
                return
            fault = f"the check of its checkpoints failed: {failure.message}"
            continue
        fault = made if isinstance(made, str) else _compared(*made, device)
        break
    if fault is not None:
        log.warning("checkpoints_disabled", model=model.spec.id, task=job.task.value, reason=fault)
    model.resume_faults[model.resume_key(job)] = fault


def _sample(model: LoadedModel, job: Job, size: SampleSize) -> Job:
    last_image = bool(takes_last_image(model.templates[job.task]))
    sample = sample_job(model.spec, job.task, 0, PROMPTS[0], size, last_image=last_image)
    nets = [control.id for control in job.controls if control.kind == "controlnet"]
    control = next((one for one in model.spec.control if one.id in nets), None)
    sample = sample if control is None else with_control(sample, control)
    return sample.model_copy(update={"steps": STEPS})


def _made(model: LoadedModel, job: Job, device: torch.device) -> tuple[Sequence[Result], Sequence[Result]] | str:
    """Return the results of a job without a stop and with one at half of its steps, or why it cannot continue there."""
    whole, taken = _run(model, job, device)
    if isinstance(taken, str):
        return taken
    if taken is None:
        return "its images have no step after which they could continue"
    identity = identity_of(model.fingerprint, job, 0, device)
    again, _ = _run(model, job, device, read(write(taken, identity), identity))
    return whole, again


def _compared(whole: Sequence[Result], again: Sequence[Result], device: torch.device) -> str | None:
    """Return how the results of a job that continued differ from the others; None if they do not."""
    try:
        off = max(_difference(one, other) for one, other in zip(whole, again, strict=True))
    except (TypeError, ValueError) as error:
        return f"the check of its checkpoints cannot compare its results: {error}"
    allowed = MOST_LEVELS if device.type == "cuda" else 0
    return f"an image that continued was off by {off:.2g} of 255 levels" if off > allowed else None


def _run(
    model: LoadedModel, job: Job, device: torch.device, checkpoint: Checkpoint | None = None
) -> tuple[Sequence[Result], Checkpoint | str | None]:
    """Return the results of a job, and its checkpoint at half of the steps, or why it has none."""
    steps = StepCounter(lambda: None)
    record = TaskRecord(device, steps, checkpoint)
    task = model.image_task(job, 0, decode_inputs(job, sample_files(job)), steps, record)
    taken: Checkpoint | str | None = None
    try:
        task.start(device)
        while (call := task.parked_call) is not None:
            at_half = call.shared_method.stage is Stage.DENOISE and 0 < steps.total <= 2 * steps.step
            if taken is None and checkpoint is None and at_half:
                taken = _taken(record)
            task.resume(device, call.run())
    finally:
        task.abort()
    if task.error is not None:
        raise task.error
    return task.result, taken


def _taken(record: TaskRecord) -> Checkpoint | str | None:
    try:
        return record.take()
    except NotStorable as error:
        return f"it has {error}"


def _difference(one: Result, other: Result) -> float:
    """Return the largest difference of pixels or samples, in levels of 255."""
    match one, other:
        case Output(), Output():
            off = float(np.abs(one.pixels.astype(np.float64) - other.pixels).max())
            if one.audio is None or other.audio is None:
                return off
            return max(off, _difference(one.audio, other.audio))
        case Audio(), Audio():
            return 255 / 2 * float(np.abs(one.samples.astype(np.float64) - other.samples).max())
        case Latents(), Latents():
            return 0.0 if one == other else 255.0
    raise TypeError(f"{type(one).__name__} and {type(other).__name__}")
