"""The check at load: do fused rows come out as the same rows alone? What fails it runs unfused, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
import torch

from shared.config.models_file import ModelSpec
from shared.errors import JobError
from worker.engine.fusion.image_task import ImageTask, forward
from worker.engine.fusion.inferred_rules import infer_rules
from worker.engine.fusion.module_proxy import ParkedCall, SharedMethod, Stage
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import prepare_inputs
from worker.engine.pipelines.model_cache import LoadedModel
from worker.engine.pipelines.sample_jobs import sample_files, sample_job
from worker.engine.pipelines.task_pipelines import takes_last_image

log = structlog.get_logger()

# Largest difference allowed, relative to the largest value. Kernels sum in another order for another number of
# rows; what that does depends on the precision alone, while a wrong rule is off by much more.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# Two of one length, for architectures that fuse no others.
PROMPTS = ("a lighthouse", "a very small red boat beside two lighthouses in the morning", "rain", "snow")


def run_self_check(model: LoadedModel, device: torch.device) -> None:
    """Make a few pictures with every ruled forward run both ways; refuse the rules that do not hold.

    They are the smallest that are allowed or, where a pipeline fails at those, of the model's usual size. A denoiser
    without rules is tried with inferred ones.
    """
    limits, usual = model.spec.limits, model.spec.defaults
    side = -(-limits.min_side // limits.multiple_of) * limits.multiple_of
    verified: set[SharedMethod] = set()
    error: JobError | None = None
    for size in dict.fromkeys(((side, side), (usual.width, usual.height))):
        error = _run_both_ways(_pictures(model, size), device, verified)
        if error is None:
            break
    if error is not None:
        _refuse_unverified(model, verified, error)
    _settle_unseen(model, verified)
    model.release_tensors()


def _run_both_ways(pictures: Sequence[ImageTask], device: torch.device, verified: set[SharedMethod]) -> JobError | None:
    """Run `pictures` to their ends, adding to `verified` what held; returns the error of one that failed."""
    for picture in pictures:
        picture.start(device)
    while parked := [picture for picture in pictures if picture.call is not None]:
        calls = [picture.call for picture in parked if picture.call is not None]
        _infer_rules(calls)
        lead = min(
            calls, key=lambda call: call.shared_method.stage
        )  # all encode first, so that all meet at the denoiser
        together = [at for at, call in enumerate(calls) if call.batch_key == lead.batch_key]
        outcomes = _both_ways([calls[at] for at in together], verified)
        for at, outcome in zip(together, outcomes, strict=True):
            parked[at].resume(device, outcome)
    return next((picture.error for picture in pictures if picture.error is not None), None)


def _infer_rules(calls: Sequence[ParkedCall]) -> None:
    for point in {call.shared_method for call in calls if call.shared_method.unruled}:
        parked = [call for call in calls if call.shared_method is point]
        rules = infer_rules([point.named(call.args, call.kwargs) for call in parked]) if len(parked) > 1 else None
        if rules is not None:
            point.adopt(rules)
            for call in parked:
                call.read_rules()


def _settle_unseen(model: LoadedModel, verified: set[SharedMethod]) -> None:
    for point in model.shared_methods:
        if point.stacker is None or point.stage is not Stage.DENOISE:
            continue
        if not point.inferred:
            if point not in verified:  # proven by its parity test alone
                log.info("self_check_saw_no_pair", model=model.spec.id, point=str(point))
        elif point in verified:
            log.info("rules_inferred", model=model.spec.id, point=str(point))
        else:
            point.refuse(f"{point.architecture} has no stacking rule, and no two calls of it fitted to infer one")


def _pictures(model: LoadedModel, size: tuple[int, int]) -> list[ImageTask]:
    tasks = list(model.templates)
    pictures = []
    for at, prompt in enumerate(PROMPTS):
        task = tasks[at % len(tasks)]
        own_size = _other(size, model.spec) if at % 2 else size
        job = sample_job(model.spec, task, at, prompt, own_size).model_copy(update={"steps": 2 + at // len(tasks)})
        if job.images and takes_last_image(model.templates[task]):
            job = job.model_copy(update={"last_image": job.images[0]})
        pictures.append(model.image_task(job, 0, prepare_inputs(job, sample_files(job)), StepCounter(lambda: None)))
    return pictures


def _other(size: tuple[int, int], spec: ModelSpec) -> tuple[int, int]:
    """Return a size that shares forwards with `size`: another one where the model mixes them."""
    wider = (size[0] + spec.limits.multiple_of, size[1])
    return wider if "size" in spec.mixed_fields and spec.limits.allows_size(*wider) else size


def _both_ways(calls: Sequence[ParkedCall], verified: set[SharedMethod]) -> list[Any]:
    try:
        solo = [call.run() for call in calls]
    except (RuntimeError, ValueError, TypeError) as error:
        return [JobError(f"{calls[0].shared_method}: {error}")] * len(calls)
    point = calls[0].shared_method
    if point.stacker is not None and len(calls) > 1:
        reason = _difference(calls, solo)
        if reason is None:
            verified.add(point)
        else:
            without = "has no stacking rule, and with an inferred one " if point.inferred else ""
            point.refuse(f"{point.architecture} {without}failed its self-check: {reason}")
            log.warning("runs_unfused", point=str(point), reason=reason)
    return solo


def _difference(calls: Sequence[ParkedCall], solo: Sequence[Any]) -> str | None:
    try:
        fused = forward(calls)
    except Exception as error:  # whatever a wrong rule provokes, the model still runs unfused
        return f"the fused forward raised {type(error).__name__}"
    for mine, theirs in zip(_leaves(solo), _leaves(fused), strict=True):
        if mine.shape != theirs.shape:
            return f"fused rows have shape {tuple(theirs.shape)} instead of {tuple(mine.shape)}"
        if mine.numel() and mine.is_floating_point():
            largest = max(float(mine.abs().max()), 1e-6)
            off = float((mine.float() - theirs.float()).abs().max()) / largest
            if not off <= TOLERANCE.get(mine.dtype, TOLERANCE[torch.bfloat16]):
                return f"fused rows are off by {off:.1e} of the largest value"
    return None


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if hasattr(tree, "parameters"):  # a distribution
        return _leaves(tree.parameters)
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in _leaves(item)]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in _leaves(item)]
    return []


def _refuse_unverified(model: LoadedModel, verified: set[SharedMethod], error: JobError) -> None:
    log.warning("self_check_incomplete", model=model.spec.id, error=error.message)
    for point in model.shared_methods:
        if point.stacker is not None and point not in verified:
            point.refuse(f"the self-check of {point.architecture} could not run")
