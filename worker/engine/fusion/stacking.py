"""Putting the arguments of several calls of one method together, and its output apart again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from worker.engine.fusion.architectures import Argument, Kind, StackingRules
from worker.engine.fusion.batch_key import EQUAL, FITS, Arguments, StackingError, is_nothing


class Stacker:
    """Stacks the calls of one method; remembers what it made of arguments that stay the same from step to step.

    Text embeddings are the same tensors at every step: copying them together again took 3% of a small
    UNet's forward. A tensor changed in place is noticed by its version.
    """

    def __init__(self, rules: StackingRules) -> None:
        self.rules = rules
        self._made: dict[str, tuple[tuple[tuple[int, int], ...], Sequence[torch.Tensor], torch.Tensor]] = {}

    def release_tensors(self) -> None:
        """Let go of all remembered tensors."""
        self._made.clear()

    def stack(self, calls: Sequence[Arguments], rows: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of one forward for all of `calls`, which fit; `rows` counts each one's rows."""
        stacked: dict[str, Any] = {}
        for name, first in calls[0].items():
            rule = self.rules.arguments.get(name, EQUAL)
            if rule.kind not in FITS:
                continue
            if is_nothing(first) and not all(name in call for call in calls):
                continue
            values = [call[name] for call in calls]
            match rule.kind:
                case Kind.STACKED:
                    stacked[name] = self._stack_tree(name, values, rows)
                case Kind.GROUPED:
                    stacked[name] = self._stack_groups(name, values, rows)
                case Kind.LISTED | Kind.REPEATED:
                    stacked[name] = [item for value in values for item in value]
                case Kind.ROWS:
                    stacked[name] = _to_rows(values, rows, rule, _device_of(calls[0][self.rules.rows]))
                case Kind.CACHE:
                    continue
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

    def formed(self, arguments: Arguments, part: Any) -> Any:
        """Return a call's part of the output as a tuple, if the call asked for one where others may not have."""
        rule = self.rules.arguments.get("return_dict")
        if rule is None or rule.kind is not Kind.FORM or arguments.get("return_dict", True):
            return part
        return part.to_tuple()


def _device_of(value: Any) -> torch.device:
    while isinstance(value, list | tuple):
        value = value[0]
    device: torch.device = value.device
    return device


def _to_rows(values: Sequence[Any], rows: Sequence[int], rule: Argument, device: torch.device) -> torch.Tensor:
    """Join `values` to one entry a row; where one of them has several a row (a time for each token), all have."""
    dtype = None if rule.dtype is None else getattr(torch, rule.dtype)
    entries = [torch.as_tensor(value, dtype=dtype, device=device) for value in values]
    if len(set(rows)) == 1 and all(entry.ndim == 0 for entry in entries):  # mostly so, and twice as fast
        return torch.stack(entries).repeat_interleave(rows[0])
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
        return list(output.split_with_sizes(list(rows)))
    if isinstance(output, DiagonalGaussianDistribution):
        parts = split(output.parameters, rows)
        return [DiagonalGaussianDistribution(part, deterministic=output.deterministic) for part in parts]
    if isinstance(output, Mapping):
        columns = {name: split(item, rows, listed) for name, item in output.items()}
        return [_remake(output, {name: column[at] for name, column in columns.items()}) for at in range(len(rows))]
    if listed and isinstance(output, list):
        return _split_list(output, rows)
    if isinstance(output, list | tuple):
        if not output:
            return [output] * len(rows)
        columns_list = [split(item, rows, listed) for item in output]
        return [type(output)(parts) for parts in zip(*columns_list, strict=True)]
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


def mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree of outputs of the same form, with each of its tensors changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return _remake(tree, {name: mapped(item, change) for name, item in tree.items()})
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(item, change) for item in tree)
    return tree
