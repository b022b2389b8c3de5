"""Compares the rows of a fused forward with the outputs of single calls."""

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from shared.errors import OutOfMemory
from worker.engine.errors import as_job_error
from worker.engine.fusion.fused_call import run_fused
from worker.engine.fusion.inferred_rules import altered_call
from worker.engine.fusion.module_proxy import ParkedCall
from worker.engine.fusion.stacking import map_tensors

# Largest difference allowed, relative to the largest value. Kernels sum in another order for another number of rows,
# which has an effect of the dtype's precision; a wrong rule has a much larger one.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# A model that rounds inside, as Kandinsky 5 does to bfloat16, changes as much as after small changes of its samples.
NUDGE = 1e-6
NUDGES = 4
AMPLIFIED = 4.0  # the largest difference allowed, relative to that of the nudges
MOST_AMPLIFIED = 1e-2


def difference(calls: Sequence[ParkedCall], singles: Sequence[Any]) -> str | None:
    """Return how a fused forward's rows differ from `singles`; of fewer calls, but two, where memory is scarce.

    Raises `OutOfMemory` if there is none for two.
    """
    while True:
        try:
            fused = run_fused(calls)
            return next(filter(None, map(_difference_of_one, calls, singles, fused)), None)
        except BaseException as error:  # with a wrong rule anything can fail; the model still runs unfused
            failure, reason = as_job_error(error), f"the fused forward raised {type(error).__name__}"
        if not isinstance(failure, OutOfMemory):
            return reason
        gc.collect()  # outside the except block: the failed forward's frames, and what they held, have been released
        torch.cuda.empty_cache()
        if len(calls) == 2:
            raise failure
        kept = max(2, len(calls) // 2)
        calls, singles = calls[-kept:], singles[-kept:]  # the last can be a call with other values


def difference_of_guess(calls: Sequence[ParkedCall], singles: Sequence[Any]) -> str | None:
    """Compare a fused forward with single calls, also with other values where those of all rows are equal."""
    method, stacker = calls[0].shared_method, calls[0].shared_method.stacker
    reason = difference(calls, singles)
    arguments = None if stacker is None else altered_call(stacker.rules, [call.arguments for call in calls])
    if reason is not None or arguments is None:
        return reason
    altered = ParkedCall(method, (), arguments)
    altered.autocast = calls[0].autocast
    try:
        single = altered.run()
    except BaseException as error:
        failure = as_job_error(error)
        if isinstance(failure, OutOfMemory):
            raise failure from None
        return None  # other values are not valid, so they show nothing
    if not all(bool(torch.isfinite(leaf).all()) for leaf in _leaves(single)):
        return None
    return difference([*calls[:-1], altered], [*singles[:-1], single])


def _difference_of_one(call: ParkedCall, single: Any, fused: Any) -> str | None:
    for expected, actual in zip(_leaves(single), _leaves(fused), strict=True):
        if expected.shape != actual.shape:
            return f"fused rows have shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    off = _largest_difference(single, fused)
    if all(value <= TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) for dtype, value in off.items()):
        return None
    largest = max(off.values())
    if off.keys() == {torch.float32} and largest <= min(MOST_AMPLIFIED, AMPLIFIED * _amplification(call, single)):
        return None
    return f"fused rows are off by {largest:.1e} of the largest value"


def _largest_difference(one: Any, other: Any) -> dict[torch.dtype, float]:
    """Return the largest difference, relative to the largest value of `one`, of the tensors of each dtype."""
    off: dict[torch.dtype, float] = {}
    for expected, actual in zip(_leaves(one), _leaves(other), strict=True):
        if expected.numel() and expected.is_floating_point():
            largest = max(float(expected.abs().max()), 1e-6)
            value = float((expected.float() - actual.float()).abs().max()) / largest
            off[expected.dtype] = max(off.get(expected.dtype, 0.0), value if value == value else float("inf"))
    return off


def _amplification(call: ParkedCall, single: Any) -> float:
    """Return the largest difference of a call's output after its samples change by `NUDGE`."""
    nudged = (_largest_difference(single, output) for output in _nudged_outputs(call))
    return max(value for off in nudged for value in off.values())


def _nudged_outputs(call: ParkedCall) -> Iterator[Any]:
    method, stacker = call.shared_method, call.shared_method.stacker
    if stacker is None:
        return
    samples = call.arguments[stacker.rules.rows]
    for shift in range(1, NUDGES + 1):
        changed = map_tensors(samples, partial(_nudge, shift=shift))
        nudged = ParkedCall(method, (), {**call.arguments, stacker.rules.rows: changed})
        nudged.autocast = call.autocast
        yield nudged.run()


def _nudge(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    return tensor + NUDGE * tensor.roll(shift, dims=-1)


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if hasattr(tree, "parameters"):  # a distribution
        return _leaves(tree.parameters)
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, list | tuple) else []
