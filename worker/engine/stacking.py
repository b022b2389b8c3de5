"""Putting the arguments of several calls of one method together, and its output apart again.

A call's *fit key* is equal for two calls exactly when they may share a forward: same tree of arguments, same
trailing shapes and dtypes, same values where values are not stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass
from fractions import Fraction
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from worker.engine.architectures import Argument, Kind, Rules

_EQUAL = Argument(Kind.EQUAL)
Arguments = Mapping[str, Any]


class StackingError(Exception):
    """The calls, or their output, are not what the rules say they are."""


def complete(rules: Rules, arguments: Arguments) -> dict[str, Any]:
    """Return a call's arguments with those added that stand for others where they are left out."""
    completed = dict(arguments)
    for name, rule in rules.arguments.items():
        if rule.like is not None and name not in completed and rule.like in completed:
            completed[name] = completed[rule.like]
    return completed


def count_rows(rules: Rules, arguments: Arguments) -> int:
    """Return how many rows a call brings."""
    value = arguments.get(rules.rows)
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.shape[0]
    if isinstance(value, list | tuple):
        return len(value)
    raise StackingError(f"argument {rules.rows!r} has no rows")


def fit_key(rules: Rules, arguments: Arguments) -> Hashable:
    """Return the fit key of a call; it never reads a tensor's values, which would wait for the device."""
    key = []
    for name, value in arguments.items():
        rule = rules.arguments.get(name, _EQUAL)
        fit = _FITS.get(rule.kind)
        if fit is not None:
            key.append((name, fit(value) if rule.dtype is None else rule.dtype))
        if rule.kind is Kind.GROUPED:
            key.append((f"{name}, entries a row", Fraction(value.shape[0], count_rows(rules, arguments))))
    return frozenset(key)


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


def _rows_fit(value: Any) -> Hashable:
    return value.dtype if isinstance(value, torch.Tensor) else "number"


def _value_fit(value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return ("dict", frozenset((name, _value_fit(item)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(_value_fit(item) for item in value))
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return (type(value), value)
    return ("object", id(value))  # a tensor too: only the very same one is surely equal


# What has no entry may be there in one call and not in another.
_FITS: dict[Kind, Callable[[Any], Hashable]] = {
    Kind.STACKED: _tree_fit,
    Kind.GROUPED: _tree_fit,
    Kind.SHARED: _whole_fit,
    Kind.PADDED: _padded_fit,
    Kind.LISTED: _listed_fit,
    Kind.ROWS: _rows_fit,
    Kind.EQUAL: _value_fit,
}


class Stacker:
    """Stacks the calls of one method; remembers what it made of arguments that stay the same from step to step.

    Text embeddings are the same tensors at every step: copying them together again took 3% of a small
    UNet's forward. A tensor changed in place is noticed by its version.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._made: dict[str, tuple[tuple[tuple[int, int], ...], Sequence[torch.Tensor], torch.Tensor]] = {}

    def forget(self) -> None:
        """Let go of all remembered tensors."""
        self._made.clear()

    def stack(self, calls: Sequence[Arguments], rows: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of one forward for all of `calls`, which fit; `rows` counts each one's rows."""
        stacked: dict[str, Any] = {}
        for name, first in calls[0].items():
            rule = self.rules.arguments.get(name, _EQUAL)
            if rule.kind not in _FITS:
                continue
            values = [call[name] for call in calls]
            match rule.kind:
                case Kind.STACKED:
                    stacked[name] = self._stack_tree(name, values, rows)
                case Kind.GROUPED:
                    stacked[name] = self._stack_groups(name, values, rows)
                case Kind.LISTED:
                    stacked[name] = [item for value in values for item in value]
                case Kind.ROWS:
                    stacked[name] = _to_rows(values, rows, rule, _device_of(calls[0][self.rules.rows]))
                case Kind.PADDED:
                    stacked[name] = _pad(values, max(value.shape[1] for value in values))
                case _:
                    stacked[name] = first
        stacked.update(self._masks(calls))
        return stacked

    def _stack_tree(self, path: str, values: Sequence[Any], rows: Sequence[int]) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            for value, count in zip(values, rows, strict=True):
                if value.shape[0] != count:
                    raise StackingError(f"{path} has {value.shape[0]} rows, not {count}")
            return self._join(path, values)
        if isinstance(first, Mapping):
            return {key: self._stack_tree(f"{path}.{key}", [value[key] for value in values], rows) for key in first}
        if isinstance(first, list | tuple):
            columns = zip(*values, strict=True)
            return type(first)(self._stack_tree(f"{path}.{at}", column, rows) for at, column in enumerate(columns))
        return first

    def _stack_groups(self, name: str, values: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
        several = values[0].shape[0] // rows[0]
        for value, count in zip(values, rows, strict=True):
            if value.shape[0] != several * count:
                raise StackingError(f"{name} has {value.shape[0]} entries, not {several} for each of {count} rows")
        return self._join(name, values)

    def _join(self, path: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if path == self.rules.rows:
            return torch.cat(list(tensors))
        identity = tuple((id(tensor), tensor._version) for tensor in tensors)
        made = self._made.get(path)
        if made is not None and made[0] == identity:
            return made[2]
        joined = torch.cat(list(tensors))
        self._made[path] = (identity, tensors, joined)
        return joined

    def _masks(self, calls: Sequence[Arguments]) -> dict[str, Any]:
        masks: dict[str, Any] = {}
        for name, rule in self.rules.arguments.items():
            if rule.kind is Kind.PADDED and rule.mask is not None and name in calls[0]:
                given = [call.get(rule.mask) for call in calls]
                mask = _mask([call[name] for call in calls], given, self.rules.arguments[rule.mask])
                if mask is not None:
                    masks[rule.mask] = mask
        return masks


def _device_of(value: Any) -> torch.device:
    while isinstance(value, list | tuple):
        value = value[0]
    device: torch.device = value.device
    return device


def _to_rows(values: Sequence[Any], rows: Sequence[int], rule: Argument, device: torch.device) -> torch.Tensor:
    """Join `values` to one entry a row; where one of them has several a row (a time for each token), all have."""
    dtype = None if rule.dtype is None else getattr(torch, rule.dtype)
    entries = [torch.as_tensor(value, dtype=dtype, device=device) for value in values]
    row_shape = max((entry.shape[1:] for entry in entries), key=len)
    parts = []
    for entry, count in zip(entries, rows, strict=True):
        given = entry.shape[0] if entry.ndim else 1
        if given not in (1, count):
            raise StackingError(f"{given} entries for {count} rows")
        spread = entry.reshape(given, *entry.shape[1:], *[1] * (len(row_shape) - max(0, entry.ndim - 1)))
        parts.append(spread.expand(count, *row_shape))
    return torch.cat(parts)


def _pad(values: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Join `values` [rows, len, ...] along dim 0, each filled up with zeros to `length`."""
    padded = []
    for value in values:
        missing = length - value.shape[1]
        if missing:
            filler = value.new_zeros((value.shape[0], missing, *value.shape[2:]))
            value = torch.cat([value, filler], dim=1)
        padded.append(value)
    return torch.cat(padded)


def _mask(values: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], rule: Argument) -> torch.Tensor | None:
    """Return the mask [rows, longest] that hides the padding, or None where there is nothing to hide.

    A pipeline may drop a mask that is all ones; without it the padding would be attended to.
    """
    length = max(value.shape[1] for value in values)
    if all(mask is None for mask in given) and all(value.shape[1] == length for value in values):
        return None
    known = next((mask.dtype for mask in given if mask is not None), getattr(torch, rule.dtype or "bool"))
    masks = [
        torch.ones(value.shape[:2], dtype=known, device=value.device) if mask is None else mask
        for value, mask in zip(values, given, strict=True)
    ]
    return _pad(masks, length)


def split(output: Any, rows: Sequence[int], listed: bool = False) -> list[Any]:
    """Return each call's part of a fused forward's output, of the same type as a lone call's."""
    if isinstance(output, torch.Tensor):
        if output.ndim == 0 or output.shape[0] != sum(rows):
            raise StackingError(f"the output has shape {tuple(output.shape)}, not {sum(rows)} rows")
        return list(torch.split(output, list(rows)))
    if isinstance(output, DiagonalGaussianDistribution):
        parts = split(output.parameters, rows)
        return [DiagonalGaussianDistribution(part, deterministic=output.deterministic) for part in parts]
    if isinstance(output, Mapping):
        columns = {name: split(item, rows, listed) for name, item in output.items()}
        return [_remake(output, {name: column[at] for name, column in columns.items()}) for at in range(len(rows))]
    if listed and isinstance(output, list):
        return _split_list(output, rows)
    if isinstance(output, list | tuple):
        columns_list = [split(item, rows, listed) for item in output]
        return [type(output)(column[at] for column in columns_list) for at in range(len(rows))]
    return [output] * len(rows)


def _split_list(output: list[Any], rows: Sequence[int]) -> list[Any]:
    if len(output) != sum(rows):
        raise StackingError(f"the output lists {len(output)} entries, not {sum(rows)}")
    parts, start = [], 0
    for count in rows:
        parts.append(output[start : start + count])
        start += count
    return parts


def _remake(like: Mapping[str, Any], items: dict[str, Any]) -> Any:
    # The output classes of diffusers and transformers are dataclasses that are mappings too.
    return type(like)(**items) if is_dataclass(like) else items
