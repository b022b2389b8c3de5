"""Which calls of one method may share a forward.

A call's *fit key* is equal for two calls exactly when they may share a forward: same tree of arguments, same
trailing shapes and dtypes, same values where values are not stacked.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from worker.engine.fusion.architectures import Argument, Kind, StackingRules

EQUAL = Argument(Kind.EQUAL)
PLAIN = bool | int | float | str | torch.dtype | torch.device | None
Arguments = Mapping[str, Any]


class StackingError(Exception):
    """The calls, or their output, are not what the rules say they are."""


def complete(rules: StackingRules, arguments: Arguments) -> dict[str, Any]:
    """Return a call's arguments with those added that stand for others where they are left out."""
    completed = dict(arguments)
    for name, like in rules.stand_ins.items():
        if name not in completed and like in completed:
            completed[name] = completed[like]
    return completed


def count_rows(rules: StackingRules, arguments: Arguments) -> int:
    """Return how many rows a call brings."""
    value = arguments.get(rules.rows)
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.shape[0]
    if isinstance(value, list | tuple):
        return len(value)
    raise StackingError(f"argument {rules.rows!r} has no rows")


def batch_key(rules: StackingRules, arguments: Arguments) -> Hashable:
    """Return the fit key of a call; it reads no tensor's values, which would wait for the device, but those of SAME."""
    key = []
    for name, value in arguments.items():
        rule = rules.arguments.get(name, EQUAL)
        fit = FITS.get(rule.kind)
        if fit is not None and not is_nothing(value):
            key.append((name, fit(value) if rule.dtype is None else rule.dtype))
        if rule.kind is Kind.GROUPED and value is not None:
            key.append((f"{name}, entries a row", Fraction(value.shape[0], count_rows(rules, arguments))))
    return frozenset(key)


def exact_key(rules: StackingRules, arguments: Arguments) -> Hashable:
    """Return what calls must have in common, beside their fit key, for a row to come out the same to the last bit.

    What is padded, or comes in a list, depends on the longest of its company; a mask that was given may be dropped
    by the code where it hides nothing.
    """
    key = []
    for name, value in arguments.items():
        kind = rules.arguments.get(name, EQUAL).kind
        if kind is Kind.PADDED:
            key.append((name, tuple(value.shape[1:])))
        elif kind is Kind.LISTED:
            key.append((name, tuple(sorted({tuple(item.shape) for item in value}))))
        elif kind is Kind.MASK and value is not None:
            key.append((name, (id(value),)))
    return frozenset(key)


def is_nothing(value: Any) -> bool:
    """Tell whether an argument is as good as left out: some pipelines give no options, some an empty dict of them."""
    return value is None or (isinstance(value, dict) and not value)


def _tree_fit(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (value.shape[1:], value.dtype)
    if isinstance(value, Mapping):
        return ("dict", frozenset((name, _tree_fit(item)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(_tree_fit(item) for item in value))
    return _value_fit(value)


def _whole_fit(value: Any) -> Hashable:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else _value_fit(value)


def _padded_fit(value: torch.Tensor) -> Hashable:
    return (value.shape[2:], value.dtype)


def _listed_fit(value: Sequence[torch.Tensor]) -> Hashable:
    return frozenset((item.ndim, item.dtype) for item in value)


def _repeated_fit(value: Sequence[Any]) -> Hashable:
    entries = {_value_fit(item) for item in value}
    return entries.pop() if len(entries) == 1 else ("object", id(value))


_READ: dict[int, tuple[weakref.ref[torch.Tensor], int, bytes]] = {}  # by id, as long as the tensor lives


def _same_fit(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return _value_fit(value)
    key = id(value)
    known = _READ.get(key)
    if known is None or known[0]() is not value or known[1] != value._version:
        content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        known = (weakref.ref(value, lambda _gone: _READ.pop(key, None)), value._version, digest)
        _READ[key] = known
    return (value.shape, value.dtype, known[2])


def _cache_fit(value: Any) -> Hashable:
    idle = all(layer.mode in (None, "skip") for layer in value.caches)
    return None if idle else ("object", id(value))


def _rows_fit(value: Any) -> Hashable:
    return value.dtype if isinstance(value, torch.Tensor) else "number"


def _value_fit(value: Any) -> Hashable:
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, Mapping):
        return ("dict", frozenset((name, _value_fit(item)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(_value_fit(item) for item in value))
    return ("object", id(value))  # a tensor too: only the very same one is surely equal


# What has no entry may be there in one call and not in another.
FITS: dict[Kind, Callable[[Any], Hashable]] = {
    Kind.STACKED: _tree_fit,
    Kind.GROUPED: _tree_fit,
    Kind.SHARED: _whole_fit,
    Kind.PADDED: _padded_fit,
    Kind.LISTED: _listed_fit,
    Kind.ROWS: _rows_fit,
    Kind.EQUAL: _value_fit,
    Kind.SAME: _same_fit,
    Kind.REPEATED: _repeated_fit,
    Kind.CACHE: _cache_fit,
}
