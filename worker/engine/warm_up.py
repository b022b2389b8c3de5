"""Warm-up of a loaded model: compiles it, and runs forwards at the row counts in use."""

import gc
import time
from collections.abc import Callable

import structlog
import torch

from shared.errors import JobError
from worker.engine.fusion.fused_call import as_job_error, run_fused
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import Stage
from worker.engine.fusion.sample_jobs import default_size, sample_files, sample_job
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.pipelines.model_cache import empty_cache

log = structlog.get_logger()

COMPILER = "inductor"


def row_counts(limit: int) -> list[int]:
    """Return the powers of two below `limit`, and `limit`."""
    return [*(2**power for power in range(limit.bit_length()) if 2**power < limit), limit]


def warm_up_model(model: LoadedModel, device: torch.device, note_progress: Callable[[], None]) -> None:
    """Compile the denoisers if the model's settings ask for it, and run the row counts in use at its default size.

    `note_progress` is called after each forward. If compilation fails, the model runs uncompiled and a warning is
    logged. A model on a CPU that is not compiled needs no warm-up.
    """
    if device.type == "cpu" and not model.spec.compile:
        return
    started = time.monotonic()
    if model.spec.compile:
        for method in model.shared_methods:
            if method.stage is Stage.DENOISE:
                method.compile(COMPILER)
    if not _run_row_counts(model, device, note_progress) and model.spec.compile:
        for method in model.shared_methods:
            method.uncompile()
        _run_row_counts(model, device, note_progress)
    model.release_tensors()
    seconds = round(time.monotonic() - started, 1)
    log.info("model_warmed_up", model=model.spec.id, compiled=model.compiled, seconds=seconds)


def _run_row_counts(model: LoadedModel, device: torch.device, note_progress: Callable[[], None]) -> bool:
    """Run the row counts that fit into memory; False if a forward failed for another reason."""
    fuses = model.solo_reason is None
    # Largest first: what is set up for many rows also serves fewer, and memory is allocated once.
    for rows in reversed(row_counts(model.spec.max_batch) if fuses else [1]):
        try:
            _run_rows(model, rows, device, note_progress)
        except torch.OutOfMemoryError:
            gc.collect()
            empty_cache(device)
        except BaseException as error:  # compilers fail in many ways, and the model can run uncompiled
            log.warning("warm_up_failed", model=model.spec.id, rows=rows, error=as_job_error(error).message)
            return isinstance(error, JobError)
    return True


def _run_rows(model: LoadedModel, rows: int, device: torch.device, note_progress: Callable[[], None]) -> None:
    """Generate `rows` images in fused forwards; raises the `JobError` of an image task that failed by itself."""
    spec, tasks = model.spec, list[ImageTask]()
    for at in range(rows):
        job = sample_job(spec, next(iter(model.templates)), at, "a lighthouse", default_size(spec))
        tasks.append(model.image_task(job, 0, decode_inputs(job, sample_files(job)), StepCounter(lambda: None)))
    try:
        for task in tasks:
            task.start(device)
        while parked := [(task, task.parked_call) for task in tasks if task.parked_call is not None]:
            group = [(task, call) for task, call in parked if call.batch_key == parked[0][1].batch_key]
            outputs = run_fused([call for _, call in group])
            note_progress()
            for (task, _), output in zip(group, outputs, strict=True):
                task.resume(device, output)
                if task.error is not None:
                    raise task.error
    finally:
        for task in tasks:
            task.abort()
