"""Rules for architectures that have none, guessed from the arguments of real calls; the self-check decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from worker.engine.fusion.architectures import Argument, Kind, StackingRules
from worker.engine.fusion.batch_key import Arguments, is_nothing


def infer_rules(calls: Sequence[Arguments]) -> StackingRules | None:
    """Return rules under which `calls` may be fused, None if their rows cannot be made out.

    The first argument that is a tensor of three or more dimensions is taken to count the rows. What has as many
    entries is stacked, numbers become one a row, and other tensors must hold the same values. Nothing is padded:
    whether a mask hides padding is not to be seen from outside.
    """
    rows = next((name for name, value in calls[0].items() if _is_batch(value)), None)
    if rows is None or not all(_is_batch(call.get(rows)) for call in calls):
        return None
    counts = [call[rows].shape[0] for call in calls]
    names = dict.fromkeys(name for call in calls for name in call)
    arguments = {}
    for name in names:
        kind = _kind([call.get(name) for call in calls], counts)
        if kind is not Kind.EQUAL:
            arguments[name] = Argument(kind)
    return StackingRules(rows, arguments)


def _is_batch(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 3


def _kind(values: Sequence[Any], counts: Sequence[int]) -> Kind:
    """Return the kind of one argument, given its value in each call and each call's rows."""
    given = [(value, count) for value, count in zip(values, counts, strict=True) if not is_nothing(value)]
    if not given:
        return Kind.EQUAL
    if all(_is_number(value) for value, _ in given):
        return Kind.ROWS
    if all(_has_rows(value, count) for value, count in given):
        return Kind.STACKED
    return Kind.SAME if all(isinstance(value, torch.Tensor) for value, _ in given) else Kind.EQUAL


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_rows(value: Any, count: int) -> bool:
    """Tell whether all tensors in `value`, at least one, have `count` entries."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 and value.shape[0] == count
    items = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(items, list | tuple):
        return False
    leaves = [item for item in items if item is not None]
    return bool(leaves) and all(_has_rows(item, count) for item in leaves)
