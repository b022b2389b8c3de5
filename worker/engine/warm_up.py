"""Before a model serves: forwards of the row counts in use, so that no job's first one pays for what is set up once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import structlog
import torch

from shared.errors import JobError
from worker.engine.fusion.fused_call import run_fused
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import Stage
from worker.engine.fusion.self_check import sample_files, sample_job
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import prepare_inputs
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.pipelines.model_cache import empty_cache

log = structlog.get_logger()

COMPILER = "inductor"


def row_counts(most: int) -> list[int]:
    """Return powers of two up to `most`, and `most` itself."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def warm(model: LoadedModel, device: torch.device, tell: Callable[[], None]) -> None:
    """Compile the denoisers where the model is to be compiled, and run the row counts in use at its usual size.

    `tell` is called after each run_fused, as a sign of life. A denoiser that cannot be compiled runs as it is, and the
    log says so. An eager model on a CPU has nothing to set up.
    """
    if device.type == "cpu" and not model.spec.compile:
        return
    started = time.monotonic()
    if model.spec.compile:
        _compile(model)
    if not _run_all(model, device, tell) and model.spec.compile:
        _uncompile(model)
        _run_all(model, device, tell)
    model.release_tensors()
    seconds = round(time.monotonic() - started, 1)
    log.info("model_warm", model=model.spec.id, compiled=model.compiled, seconds=seconds)


def _compile(model: LoadedModel) -> None:
    for point in model.shared_methods:
        if point.stage is Stage.DENOISE:
            point.compile(COMPILER)


def _uncompile(model: LoadedModel) -> None:
    for point in model.shared_methods:
        point.uncompile()


def _run_all(model: LoadedModel, device: torch.device, tell: Callable[[], None]) -> bool:
    """Run all row counts that fit into memory; False when a run_fused failed for another reason."""
    fused = model.solo_reason is None
    # From many rows to few: what is set up for many serves fewer, and memory is asked for once.
    for rows in reversed(row_counts(model.spec.max_batch) if fused else [1]):
        try:
            error = _run(model, rows, device, tell)
        except torch.OutOfMemoryError:
            gc.collect()
            empty_cache(device)
            continue
        except Exception as failure:  # a compiler fails in many ways, and the model can run without
            log.warning(
                "warm_up_failed", model=model.spec.id, rows=rows, error=f"{type(failure).__name__}: {failure}"[:500]
            )
            return False
        if error is not None:
            log.warning("warm_up_failed", model=model.spec.id, rows=rows, error=error.message)
            return True
    return True


def _run(model: LoadedModel, rows: int, device: torch.device, tell: Callable[[], None]) -> JobError | None:
    """Make `rows` pictures together; returns the error of one whose own code failed."""
    spec = model.spec
    pictures: list[ImageTask] = []
    for at in range(rows):
        size = (spec.defaults.width, spec.defaults.height)
        job = sample_job(spec, next(iter(model.templates)), at, "a lighthouse", size)
        if job.task.makes_video:
            job = job.model_copy(update={"frames": spec.usual_frames})
        pictures.append(model.image_task(job, 0, prepare_inputs(job, sample_files(job)), StepCounter(lambda: None)))
    try:
        for picture in pictures:
            picture.start(device)
        while parked := [(picture, picture.call) for picture in pictures if picture.call is not None]:
            together = [(picture, call) for picture, call in parked if call.batch_key == parked[0][1].batch_key]
            outcomes = run_fused([call for _, call in together])
            tell()
            for (picture, _), outcome in zip(together, outcomes, strict=True):
                picture.resume(device, outcome)
    finally:
        for picture in pictures:
            picture.abort()
    return next((picture.error for picture in pictures if picture.error is not None), None)
