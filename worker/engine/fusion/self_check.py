"""The self-check at load: fused rows must equal the rows of single calls; otherwise the method runs unfused.

Rules of architectures that have none are inferred from the calls of the check.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import torch

from shared.errors import InferenceFailed, JobError
from worker.engine.fusion.architectures import Argument, Kind, StackingRules
from worker.engine.fusion.batch_key import Arguments, is_omitted
from worker.engine.fusion.fused_call import as_job_error, run_fused
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall, SharedMethod, Stage
from worker.engine.fusion.sample_jobs import sample_files, sample_job, sample_sizes
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.pipelines.output_check import choose_output_types
from worker.engine.pipelines.task_pipelines import takes_last_image

log = structlog.get_logger()

# Largest difference allowed, relative to the largest value. Kernels sum in another order for another number of rows,
# which has an effect of the dtype's precision; a wrong rule has a much larger one.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Two have the same length, for architectures that fuse only those.
PROMPTS = ("a lighthouse", "a very small red boat beside two lighthouses in the morning", "rain", "snow")


def run_self_check(model: LoadedModel, device: torch.device) -> None:
    """Run sample jobs with every forward both fused and call by call; disable fusing where the outputs differ.

    The images have the smallest allowed size or, where a pipeline fails at that, the model's default size.
    """
    choose_output_types(model, device)
    verified: set[SharedMethod] = set()
    error: JobError | None = None
    for size in sample_sizes(model.spec):
        error = _check_at(size, model, device, verified)
        if error is None:
            break
    if error is not None:
        log.warning("self_check_incomplete", model=model.spec.id, error=error.message)
        for method in model.shared_methods:
            if method.stacker is not None and method not in verified:
                method.disable_fusing(f"the self-check of {method.architecture} could not run")
    _settle_denoisers(model, verified)
    model.release_tensors()


def _check_at(
    size: tuple[int, int], model: LoadedModel, device: torch.device, verified: set[SharedMethod]
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
        _infer_missing_rules(calls)
        first = min(calls, key=lambda call: call.shared_method.stage)  # all encode first, to denoise together
        batch = [(task, call) for task, call in parked if call.batch_key == first.batch_key]
        outputs = _check_batch([call for _, call in batch], verified)
        for (task, _), output in zip(batch, outputs, strict=True):
            task.resume(device, output)
    return next((task.error for task in tasks if task.error is not None), None)


def _infer_missing_rules(calls: Sequence[ParkedCall]) -> None:
    for method in {call.shared_method for call in calls if call.shared_method.needs_inferred_rules}:
        parked = [call for call in calls if call.shared_method is method]
        rules = infer_rules([method.bind(call.args, call.kwargs) for call in parked]) if len(parked) > 1 else None
        if rules is not None:
            method.use_inferred(rules)
            for call in parked:
                call.read_rules()


def _settle_denoisers(model: LoadedModel, verified: set[SharedMethod]) -> None:
    for method in model.shared_methods:
        if method.stacker is None or method.stage is not Stage.DENOISE:
            continue
        if not method.inferred:
            if method not in verified:  # only its parity test verifies it
                log.info("self_check_saw_no_pair", model=model.spec.id, method=str(method))
        elif method in verified:
            log.info("rules_inferred", model=model.spec.id, method=str(method))
        else:
            method.disable_fusing(f"{method.architecture} has no stacking rule, and no two calls matched to infer one")


def _sample_tasks(model: LoadedModel, size: tuple[int, int]) -> list[ImageTask]:
    spec, tasks = model.spec, list(model.templates)
    wider = (size[0] + spec.limits.multiple_of, size[1])
    other_size = wider if "size" in spec.mixed_fields and spec.limits.allows_size(*wider) else size
    image_tasks = []
    for at, prompt in enumerate(PROMPTS):
        task = tasks[at % len(tasks)]
        job = sample_job(model.spec, task, at, prompt, other_size if at % 2 else size)
        job = job.model_copy(update={"steps": 2 + at // len(tasks)})
        if job.images and takes_last_image(model.templates[task]):
            job = job.model_copy(update={"last_image": job.images[0]})
        inputs = decode_inputs(job, sample_files(job))
        image_tasks.append(model.image_task(job, 0, inputs, StepCounter(lambda: None)))
    return image_tasks


def _check_batch(calls: Sequence[ParkedCall], verified: set[SharedMethod]) -> list[Any]:
    """Return the outputs of the single calls; compare them with those of one fused forward."""
    method = calls[0].shared_method
    try:
        singles = [call.run() for call in calls]
    except BaseException as error:
        return [InferenceFailed(f"{method}: {as_job_error(error).message}")] * len(calls)
    if method.stacker is not None and len(calls) > 1:
        reason = _difference(calls, singles)
        if reason is None:
            verified.add(method)
        else:
            inferred = "has no stacking rule, and with an inferred one " if method.inferred else ""
            method.disable_fusing(f"{method.architecture} {inferred}failed its self-check: {reason}")
            log.warning("fusing_disabled", method=str(method), reason=reason)
    return singles


def _difference(calls: Sequence[ParkedCall], singles: Sequence[Any]) -> str | None:
    try:
        fused = run_fused(calls)
    except BaseException as error:  # with a wrong rule anything can fail; the model still runs unfused
        as_job_error(error)
        return f"the fused forward raised {type(error).__name__}"
    for expected, actual in zip(_leaves(singles), _leaves(fused), strict=True):
        if expected.shape != actual.shape:
            return f"fused rows have shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        if expected.numel() and expected.is_floating_point():
            largest = max(float(expected.abs().max()), 1e-6)
            off = float((expected.float() - actual.float()).abs().max()) / largest
            if not off <= TOLERANCE.get(expected.dtype, TOLERANCE[torch.bfloat16]):
                return f"fused rows are off by {off:.1e} of the largest value"
    return None


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if hasattr(tree, "parameters"):  # a distribution
        return _leaves(tree.parameters)
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, list | tuple) else []


def infer_rules(calls: Sequence[Arguments]) -> StackingRules | None:
    """Return rules inferred from `calls`, None if the number of rows is unclear.

    The first argument that is a tensor of three or more dimensions has one entry per row in dim 0. Values with as many
    entries are stacked, numbers become one per row, and other tensors must have equal values. Nothing is padded: the
    arguments do not show whether a mask hides the padding.
    """
    rows = next((name for name, value in calls[0].items() if _is_batch(value)), None)
    if rows is None or not all(_is_batch(call.get(rows)) for call in calls):
        return None
    counts = [call[rows].shape[0] for call in calls]
    names = dict.fromkeys(name for call in calls for name in call)
    kinds = {name: _infer_kind([call.get(name) for call in calls], counts) for name in names}
    return StackingRules(rows, {name: Argument(kind) for name, kind in kinds.items() if kind is not Kind.EQUAL})


def _is_batch(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 3


def _infer_kind(values: Sequence[Any], counts: Sequence[int]) -> Kind:
    """Return the kind of one argument, from its value in each call and the rows of each call."""
    present = [(value, count) for value, count in zip(values, counts, strict=True) if not is_omitted(value)]
    if not present:
        return Kind.EQUAL
    if all(_is_number(value) for value, _ in present):
        return Kind.ROWS
    if all(_has_rows(value, count) for value, count in present):
        return Kind.STACKED
    return Kind.SAME if all(isinstance(value, torch.Tensor) for value, _ in present) else Kind.EQUAL


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_rows(value: Any, count: int) -> bool:
    """Return whether all tensors in `value`, at least one, have `count` entries."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 and value.shape[0] == count
    items = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(items, list | tuple):
        return False
    leaves = [item for item in items if item is not None]
    return bool(leaves) and all(_has_rows(item, count) for item in leaves)
