"""Warm-up of a loaded model: compiles it, and runs forwards at the row counts in use."""

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import structlog
import torch

from shared.config.model_spec import ModelSpec
from shared.errors import JobError
from worker.engine.checks.sample_jobs import PROMPTS, SampleSize, default_size, sample_files, sample_job, sample_sizes
from worker.engine.errors import as_job_error
from worker.engine.fusion.fused_call import run_fused
from worker.engine.fusion.image_task import ImageTask
from worker.engine.models.model_cache import empty_cache
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.compiling import compile_denoiser, end_compiling, uncompile
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loaded_model import LoadedModel

log = structlog.get_logger()


def row_counts(limit: int) -> list[int]:
    """Return the powers of two below `limit`, and `limit`."""
    return [*(2**power for power in range(limit.bit_length()) if 2**power < limit), limit]


class _Group(NamedTuple):
    """Images that are generated together: all alike, or with prompts of different lengths and without guidance."""

    rows: int
    size: SampleSize
    alike: bool = True
    adapted: bool = False


def groups_of(spec: ModelSpec, *, fuses: bool) -> list[_Group]:
    """Return the groups of images to warm a model up with.

    Largest first: what is set up for many rows also serves fewer, and memory is allocated once. Compiled blocks have
    graphs for one row and for several, with a mask and without, and with adapters and without.
    """
    most, default = spec.max_batch if fuses else 1, default_size(spec)
    groups = [_Group(rows, default) for rows in reversed(row_counts(most))]
    if spec.compile == "blocks":
        groups += [_Group(rows, sample_sizes(spec)[0], alike=False) for rows in dict.fromkeys((most, 1))]
        groups += [group._replace(adapted=True) for group in groups if spec.adapter]
    return groups


def warm_up_model(model: LoadedModel, device: torch.device, note_progress: Callable[[], None]) -> None:
    """Compile the denoisers if the model's settings ask for it, and run the row counts in use at its default size.

    `note_progress` is called after each forward. If compilation fails, the model runs uncompiled and a warning is
    logged. A model on a CPU that is not compiled needs no warm-up.
    """
    if device.type == "cpu" and not model.spec.compile:
        return
    started = time.monotonic()
    denoisers = [method for method in model.denoisers if method.method == "forward" and model.spec.compile]
    for denoiser in denoisers:
        compile_denoiser(denoiser, model.spec)
    compiled = _run_groups(model, device, note_progress)
    for denoiser in denoisers:
        if compiled:
            end_compiling(denoiser, model.spec)
        else:
            uncompile(denoiser)
    if denoisers and not compiled:
        _run_groups(model, device, note_progress)
    model.release_tensors()
    seconds = round(time.monotonic() - started, 1)
    log.info("model_warmed_up", model=model.spec.id, compiled=model.compiled, seconds=seconds)


def _run_groups(model: LoadedModel, device: torch.device, note_progress: Callable[[], None]) -> bool:
    """Run the groups that fit into memory and that the pipeline can make; False if a forward failed otherwise."""
    for group in groups_of(model.spec, fuses=model.solo_reason is None):
        try:
            with ExitStack() as assumed:
                for denoiser in model.denoisers if group.adapted else ():
                    assumed.enter_context(denoiser.adapters.assumed())
                _run_group(model, group, device, note_progress)
        except torch.OutOfMemoryError:
            gc.collect()
            empty_cache(device)
        except BaseException as error:  # compilers fail in many ways, and the model can run uncompiled
            log.warning("warm_up_failed", model=model.spec.id, rows=group.rows, error=as_job_error(error).message)
            if not isinstance(error, JobError):
                return False
    return True


def _run_group(model: LoadedModel, group: _Group, device: torch.device, note_progress: Callable[[], None]) -> None:
    """Generate a group's images in fused forwards; raises the `JobError` of an image task that failed by itself."""
    tasks = [_sample_task(model, group, at) for at in range(group.rows)]
    try:
        for task in tasks:
            task.start(device)
        while parked := [(task, task.parked_call) for task in tasks if task.parked_call is not None]:
            first = min((call for _, call in parked), key=lambda call: call.shared_method.stage)
            calls = [(task, call) for task, call in parked if call.batch_key == first.batch_key]
            outputs = run_fused([call for _, call in calls])
            note_progress()
            for (task, _), output in zip(calls, outputs, strict=True):
                task.resume(device, output)
                if task.error is not None:
                    raise task.error
    finally:
        for task in tasks:
            task.abort()


def _sample_task(model: LoadedModel, group: _Group, at: int) -> ImageTask:
    prompt = "a lighthouse" if group.alike else PROMPTS[at % len(PROMPTS)]
    job = sample_job(model.spec, next(iter(model.templates)), at, prompt, group.size)
    if not group.alike:
        job = job.model_copy(update={"guidance_scale": 1.0})
    return model.image_task(job, 0, decode_inputs(job, sample_files(job)), StepCounter(lambda: None))
