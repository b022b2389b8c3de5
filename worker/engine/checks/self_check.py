"""The self-check at load: fused rows must equal the rows of single calls; otherwise the method runs unfused.

Rules of architectures that have none are inferred from the calls of the check.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import structlog
import torch

from shared.errors import JobError, NoSurface, OutOfMemory
from shared.job import Job
from worker.engine.checks.fused_difference import difference, difference_of_guess
from worker.engine.checks.output_check import choose_output_types
from worker.engine.checks.sample_jobs import PROMPTS, SampleSize, sample_files, sample_job, sample_sizes, with_control
from worker.engine.errors import as_job_error
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.inferred_rules import guess_rules
from worker.engine.fusion.module_proxy import ParkedCall, SharedMethod, Stage
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.noise_schedulers import allows_host
from worker.engine.pipelines.task_pipelines import takes_last_image

log = structlog.get_logger()


def run_self_check(model: LoadedModel, device: torch.device) -> None:
    """Run sample jobs with every forward both fused and call by call; disable fusing where the outputs differ.

    The images have the smallest allowed size or, where a pipeline fails at that, the model's default size. What there
    is no memory to check runs unfused until the next check, at `model.next_check_s`.
    """
    for method in model.shared_methods:
        if method.awaits_memory:
            method.use_own_rules()
    verified = model.verified
    error: JobError | None = None
    for on_host in _timestep_places(model):
        model.timesteps_on_host = on_host
        choose_output_types(model, device)
        error = _check_sizes(model, device, verified)
        if error is None or isinstance(error, OutOfMemory):
            break
    if error is not None:
        log.warning("self_check_incomplete", model=model.spec.id, error=error.message)
        for method in model.shared_methods:
            untried = method.needs_inferred_rules and not method.rejected_rules
            if (method.stacker is None and not untried) or method in verified:
                continue
            if isinstance(error, OutOfMemory):
                method.await_memory()
            else:
                method.disable_fusing(f"the self-check of {method.architecture} could not run")
    _disable_changed(model)
    if error is None:
        model.watch.settle()
    _log_denoisers(model, verified)
    model.plan_next_check()
    model.release_tensors()


def _disable_changed(model: LoadedModel) -> None:
    """Say why calls of modules that pipelines change are not fused."""
    for method in model.shared_methods:
        changed = any(method.module is module for module in model.watch.changed_modules)
        if changed and method not in model.verified and not method.awaits_memory:
            method.disable_fusing(f"the pipeline changes {method.architecture}, which jobs share, during its call")
            log.warning("fusing_disabled", method=str(method), reason=method.solo_reason)


def _timestep_places(model: LoadedModel) -> tuple[bool, ...]:
    """Return which places for timesteps to try, the host being True.

    A pipeline can join its timesteps with tensors on the device. Its own noise scheduler shows whether it does; if that
    one keeps them on the device, others that a job can name do so too.
    """
    if model.device.type == "cpu":
        return (True,)
    templates = [*model.templates.values(), *([] if model.refiner is None else [model.refiner.template])]
    return (True, False) if all(map(allows_host, templates)) else (False,)


def _check_sizes(model: LoadedModel, device: torch.device, verified: set[SharedMethod]) -> JobError | None:
    """Run sample jobs both ways at the first size that the pipeline can make; return the error of the last one."""
    error: JobError | None = None
    for size in sample_sizes(model.spec):
        error = _check_at(size, model, device, verified)
        if error is None or isinstance(error, OutOfMemory):
            break
    return error


def _check_at(
    size: SampleSize, model: LoadedModel, device: torch.device, verified: set[SharedMethod]
) -> JobError | None:
    """Run sample jobs of one size both ways; return the error of one that failed, or of the check."""
    tasks: list[ImageTask] = []
    try:
        tasks += _sample_tasks(model, size)
        return _run_both_ways(tasks, device, verified)
    except BaseException as error:
        return as_job_error(error)
    finally:
        for task in tasks:
            task.abort()


def _run_both_ways(tasks: Sequence[ImageTask], device: torch.device, verified: set[SharedMethod]) -> JobError | None:
    """Run `tasks` to their ends, adding verified methods to `verified`; return the error of one that failed."""
    for task in tasks:
        task.start(device)
    while parked := [(task, task.parked_call) for task in tasks if task.parked_call is not None]:
        calls = [call for _, call in parked]
        first = min(calls, key=lambda call: call.shared_method.stage)  # all encode first, to denoise together
        if first.shared_method.stage is Stage.DENOISE:
            _infer_missing_rules(calls)
        batch = [(task, call) for task, call in parked if call.batch_key == first.batch_key]
        outputs = _check_batch([call for _, call in batch], verified)
        for (task, _), output in zip(batch, outputs, strict=True):
            task.resume(device, output)
    errors = (task.error for task in tasks if task.error is not None)
    return next((error for error in errors if not isinstance(error, NoSurface)), None)  # all forwards have run


def _infer_missing_rules(calls: Sequence[ParkedCall]) -> None:
    for method in {call.shared_method for call in calls if call.shared_method.needs_inferred_rules}:
        parked = [call for call in calls if call.shared_method is method and not call.private]
        if len(parked) > 1:
            _use_best_guess(method, parked)


def _use_best_guess(method: SharedMethod, calls: Sequence[ParkedCall]) -> None:
    """Fuse `method` by the inferred rules that fuse most of `calls` correctly; by none if no guess fuses two."""
    try:
        singles = [call.run() for call in calls]
    except BaseException as error:
        as_job_error(error)
        return  # `_check_batch` reports it
    best, most = None, 1
    for rules in guess_rules([method.bind(call.args, call.kwargs) for call in calls]):
        if rules in method.rejected_rules:
            continue
        method.use_inferred(rules)
        batch = _largest_batch(calls)
        if len(batch) <= most:
            continue
        reason = difference_of_guess([calls[at] for at in batch], [singles[at] for at in batch])
        if reason is not None:
            method.reject_inferred(reason)
            continue
        best, most = rules, len(batch)
        if most == len(calls):
            break
    if best is None:
        method.stop_fusing()
    else:
        method.use_inferred(best)
    for call in calls:
        call.read_rules()


def _largest_batch(calls: Sequence[ParkedCall]) -> list[int]:
    """Return the indexes of the largest number of calls that can share a forward by the rules now in use."""
    batches: dict[Hashable, list[int]] = {}
    for at, call in enumerate(calls):
        call.read_rules()
        batches.setdefault(call.batch_key, []).append(at)
    return max(batches.values(), key=len)


def _log_denoisers(model: LoadedModel, verified: set[SharedMethod]) -> None:
    for method in model.denoisers:
        if method.inferred:
            log.info("rules_inferred", model=model.spec.id, method=str(method))
        elif method.stacker is not None and method not in verified:  # only its parity test verifies it
            log.info("self_check_saw_no_pair", model=model.spec.id, method=str(method))
        elif method.rejected_rules:
            log.warning("fusing_disabled", method=str(method), reason=method.solo_reason)


def _sample_tasks(model: LoadedModel, size: SampleSize) -> list[ImageTask]:
    spec, tasks = model.spec, list(model.templates)
    wider = size._replace(width=size.width + spec.limits.multiple_of)
    mixes_sizes = "size" in spec.mixed_fields and spec.limits.allows_size(wider.width, wider.height)
    image_tasks = []
    for at, prompt in enumerate(PROMPTS):
        task = tasks[at % len(tasks)]
        at_size = wider if mixes_sizes and at % 2 else size
        last_image = bool(takes_last_image(model.templates[task]))
        job = sample_job(model.spec, task, at, prompt, at_size, last_image=last_image)
        job = job.model_copy(update={"steps": 2 + at // len(tasks)})
        if at == 0:  # where guidance adds rows, this job has fewer than the others
            job = job.model_copy(update={"guidance_scale": min(1.0, job.guidance_scale)})
        image_tasks.append(_image_task(model, job))
    # Two jobs with each control: their denoiser calls meet those of jobs without one.
    added = [control for control in spec.control if control.kind != "structure"]
    for at, control in enumerate(added, len(PROMPTS)):
        templates = model.controlled_templates if control.kind == "controlnet" else model.templates
        controlled = next((task for task in templates if task.takes_controls), None)
        if controlled is None:  # no job of the model can have it
            continue
        for seed, prompt in enumerate(PROMPTS[-2:], 2 * at):
            job = sample_job(spec, controlled, seed, prompt, size)
            image_tasks.append(_image_task(model, with_control(job, control)))
    return image_tasks


def _image_task(model: LoadedModel, job: Job) -> ImageTask:
    return model.image_task(job, 0, decode_inputs(job, sample_files(job)), StepCounter(lambda: None))


def _check_batch(calls: Sequence[ParkedCall], verified: set[SharedMethod]) -> list[Any]:
    """Return the outputs of the single calls; compare them with those of one fused forward."""
    method = calls[0].shared_method
    try:
        singles = [call.run() for call in calls]
    except BaseException as error:
        failure = as_job_error(error)
        return [type(failure)(f"{method}: {failure.message}")] * len(calls)
    if method.stacker is not None and len(calls) > 1:
        reason = difference(calls, singles)
        if reason is None:
            verified.add(method)
        elif method.inferred:
            verified.discard(method)
            method.reject_inferred(reason)
        else:
            method.disable_fusing(f"{method.architecture} failed its self-check: {reason}")
            log.warning("fusing_disabled", method=str(method), reason=reason)
    return singles
