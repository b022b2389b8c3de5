"""Stacking the arguments of several calls of one method, and splitting the output by rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from shared.architectures.stacking_rules import EQUAL, Argument, Kind, StackingRules
from worker.engine.device import send
from worker.engine.errors import StackingError
from worker.engine.fusion.batch_key import KEYS, Arguments, is_omitted


class Stacker:
    """Stacks the calls of one method; keeps the joined tensors of arguments that stay the same from step to step.

    Text embeddings are the same tensors at every step; joining them again took 3% of a small UNet's forward. The
    tensor's version shows a change in place.
    """

    def __init__(self, rules: StackingRules) -> None:
        self.rules = rules
        self._joined: dict[str, tuple[tuple[tuple[int, int], ...], Sequence[torch.Tensor], torch.Tensor]] = {}

    def release_tensors(self) -> None:
        self._joined.clear()

    def stack(self, calls: Sequence[Arguments], rows: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of one forward of `calls`, which have one batch key; `rows` has the rows of each."""
        stacked: dict[str, Any] = {}
        for name, first in calls[0].items():
            rule = self.rules.arguments.get(name, EQUAL)
            if rule.kind not in KEYS:
                continue
            if is_omitted(first) and not all(name in call for call in calls):
                continue
            values = [call[name] for call in calls]
            match rule.kind:
                case Kind.STACKED:
                    stacked[name] = self._stack_tree(name, values, rows)
                case Kind.GROUPED:
                    entries = values[0].shape[0] // rows[0]
                    stacked[name] = self._stack_tree(name, values, [entries * count for count in rows])
                case Kind.LAYERED:
                    stacked[name] = self._stack_tree(name, values, rows, dim=1)
                case Kind.LISTED | Kind.REPEATED:
                    stacked[name] = [item for value in values for item in value]
                case Kind.ROWS:
                    stacked[name] = _to_rows(values, rows, rule, _device_of(calls[0][self.rules.rows]))
                case Kind.CACHE | Kind.FRESH:
                    continue
                case Kind.PADDED:
                    stacked[name] = self._pad_tree(name, values)
                case Kind.LONGEST:
                    stacked[name] = max(values, key=len)
                case _:
                    stacked[name] = first
        return stacked | self._fresh(calls, rows) | self._masks(calls)

    def _fresh(self, calls: Sequence[Arguments], rows: Sequence[int]) -> dict[str, Any]:
        names = [name for name, rule in self.rules.arguments.items() if rule.kind in (Kind.FRESH, Kind.ADDED)]
        columns = {name: [call.get(name) for call in calls] for name in names}
        given = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        return {name: _stack_added(values, rows) for name, values in given.items()}

    def _stack_tree(self, path: str, values: Sequence[Any], rows: Sequence[int], dim: int = 0) -> Any:
        first = values[0]
        if isinstance(first, torch.Tensor):
            for value, count in zip(values, rows, strict=True):
                if value.shape[dim] != count:
                    raise StackingError(f"{path} has {value.shape[dim]} entries, not {count}")
            return self._join(path, values, partial(torch.cat, dim=dim))
        if isinstance(first, Mapping):
            return {key: self._stack_tree(f"{path}.{key}", [value[key] for value in values], rows) for key in first}
        if isinstance(first, list | tuple):
            columns = zip(*values, strict=True)
            return type(first)(self._stack_tree(f"{path}.{at}", column, rows) for at, column in enumerate(columns))
        return first

    def _pad_tree(self, path: str, values: Sequence[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return self._join(path, values, _pad)
        if isinstance(values[0], Mapping):
            return {name: self._pad_tree(f"{path}.{name}", [one[name] for one in values]) for name in values[0]}
        columns = zip(*values, strict=True)
        return [self._pad_tree(f"{path}.{at}", column) for at, column in enumerate(columns)]

    def _join(
        self, path: str, tensors: Sequence[torch.Tensor], join: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        if path == self.rules.rows:
            return join(list(tensors))
        identity = tuple((id(tensor), tensor._version) for tensor in tensors)
        kept = self._joined.get(path)
        if kept is not None and kept[0] == identity:
            return kept[2]
        joined = join(list(tensors))
        self._joined[path] = (identity, tensors, joined)  # with the tensors, so that no id is reused
        return joined

    def _masks(self, calls: Sequence[Arguments]) -> dict[str, Any]:
        masks: dict[str, Any] = {}
        for name, rule in self.rules.arguments.items():
            if rule.kind is Kind.PADDED and rule.mask is not None and name in calls[0]:
                values, given = [call[name] for call in calls], [call.get(rule.mask) for call in calls]
                mask_rule = self.rules.arguments[rule.mask]
                if mask_rule.kind is Kind.JOINT_MASK:
                    masks[rule.mask] = _joint_mask(values, given, [call[self.rules.rows] for call in calls])
                else:
                    masks[rule.mask] = _mask(values, given, mask_rule)
        return {name: mask for name, mask in masks.items() if mask is not None}

    def in_requested_form(self, arguments: Arguments, output: Any) -> Any:
        """Return a call's output as a tuple if the call asks for one; other calls of the forward can differ."""
        rule = self.rules.arguments.get("return_dict")
        if rule is None or rule.kind is not Kind.FORM or arguments.get("return_dict", True):
            return output
        return output.to_tuple()


def _stack_added(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Join trees of tensors, of which some can be None or broadcast to the others; None adds zeros."""
    given = next(value for value in values if value is not None)
    if isinstance(given, list | tuple):
        columns = zip(*(value or [None] * len(given) for value in values), strict=True)
        return [_stack_added(column, rows) for column in columns]
    shape = torch.broadcast_shapes(*(value.shape[1:] for value in values if value is not None))
    parts = [given.new_zeros(1) if value is None else value for value in values]
    return torch.cat([part.expand(count, *shape) for part, count in zip(parts, rows, strict=True)])


def _device_of(value: Any) -> torch.device:
    while isinstance(value, list | tuple):
        value = value[0]
    device: torch.device = value.device
    return device


def _to_rows(values: Sequence[Any], rows: Sequence[int], rule: Argument, device: torch.device) -> torch.Tensor:
    """Join `values` to one entry per row; if one value has several per row (a time per token), all get as many.

    Values on the host are joined there, and sent to the device together.
    """
    dtype = None if rule.dtype is None else getattr(torch, rule.dtype)
    entries = [torch.as_tensor(value, dtype=dtype) for value in values]
    if any(entry.device != entries[0].device for entry in entries):
        entries = [send(entry, device) for entry in entries]
    return send(_join_rows(entries, rows), device)


def _join_rows(entries: list[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    if len(set(rows)) == 1 and all(entry.ndim == 0 for entry in entries):  # the usual case, in half the time
        return torch.stack(entries).repeat_interleave(rows[0])
    if all(entry.shape == (count,) for entry, count in zip(entries, rows, strict=True)):  # 11 us instead of 51
        return torch.cat(entries)
    dims = max(1, *(entry.ndim for entry in entries))
    spread = [entry.reshape(*entry.shape, *[1] * (dims - entry.ndim)) for entry in entries]
    row_shape = torch.broadcast_shapes(*(entry.shape[1:] for entry in spread))
    expanded = []
    for entry, count in zip(spread, rows, strict=True):
        if entry.shape[0] not in (1, count):
            raise StackingError(f"{entry.shape[0]} entries for {count} rows")
        expanded.append(entry.expand(count, *row_shape))
    return torch.cat(expanded)


def _pad(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join `values` [rows, len, ...] along dim 0, each padded with zeros to the longest."""
    length = max(value.shape[1] for value in values)
    padded = []
    for value in values:
        missing = length - value.shape[1]
        if missing:
            filler = value.new_zeros((value.shape[0], missing, *value.shape[2:]))
            value = torch.cat([value, filler], dim=1)
        padded.append(value)
    return torch.cat(padded)


def _mask(values: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None], rule: Argument) -> torch.Tensor | None:
    """Return the mask [rows, longest] of the padding, or None if there is no padding and no mask.

    A pipeline drops a mask that is all ones; without one, attention would include the padding.
    """
    length = max(value.shape[1] for value in values)
    if all(mask is None for mask in given) and all(value.shape[1] == length for value in values):
        return None
    dtype = next((mask.dtype for mask in given if mask is not None), getattr(torch, rule.dtype or "bool"))
    masks = [
        torch.ones(value.shape[:2], dtype=dtype, device=value.device) if mask is None else mask
        for value, mask in zip(values, given, strict=True)
    ]
    return _pad(masks)


def _joint_mask(
    values: Sequence[torch.Tensor], given: Sequence[Mapping[str, torch.Tensor] | None], samples: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Return a mask of the keys: the padded `values`, then the samples, which all count.

    None if there is no padding and no mask.
    """
    length = max(value.shape[1] for value in values)
    if all(is_omitted(options) for options in given) and all(value.shape[1] == length for value in values):
        return None
    of_values, of_samples = [], []
    for value, options, sample in zip(values, given, samples, strict=True):
        rows, own = value.shape[:2]
        keys = own + sample.shape[1]
        if options and options.keys() != {"attention_mask"}:
            raise StackingError(f"no rule for {sorted(options)}")
        mask = options["attention_mask"] if options else torch.ones(rows, 1, 1, keys, dtype=torch.bool)
        if mask.shape != (rows, 1, 1, keys):
            raise StackingError(f"the mask has shape {tuple(mask.shape)}, not {(rows, 1, 1, keys)}")
        mask = mask.to(value.device)[:, 0, 0]
        of_values.append(mask[:, :own])
        of_samples.append(mask[:, own:])
    return {"attention_mask": torch.cat([_pad(of_values), torch.cat(of_samples)], dim=1)[:, None, None]}


def split(output: Any, rows: Sequence[int], listed: bool = False) -> list[Any]:
    """Return each call's rows of a fused forward's output, of the type that the call would get by itself."""
    if isinstance(output, torch.Tensor):
        if output.ndim == 0 or output.shape[0] != sum(rows):
            raise StackingError(f"the output has shape {tuple(output.shape)}, not {sum(rows)} rows")
        return list(output.split_with_sizes(list(rows)))
    if isinstance(output, DiagonalGaussianDistribution):
        return [
            DiagonalGaussianDistribution(parameters, deterministic=output.deterministic)
            for parameters in split(output.parameters, rows)
        ]
    if isinstance(output, Mapping):
        columns = {name: split(item, rows, listed) for name, item in output.items()}
        return [_rebuild(output, {name: column[at] for name, column in columns.items()}) for at in range(len(rows))]
    if listed and isinstance(output, list):
        return _split_list(output, rows)
    if isinstance(output, list | tuple):
        if not output:
            return [output] * len(rows)
        return [type(output)(items) for items in zip(*(split(item, rows, listed) for item in output), strict=True)]
    return [output] * len(rows)


def _split_list(output: list[Any], rows: Sequence[int]) -> list[Any]:
    if len(output) != sum(rows):
        raise StackingError(f"the output lists {len(output)} entries, not {sum(rows)}")
    entries = iter(output)
    return [[next(entries) for _ in range(count)] for count in rows]


def _rebuild(like: Mapping[str, Any], items: dict[str, Any]) -> Any:
    # The output classes of diffusers and transformers are dataclasses that are mappings too.
    return type(like)(**items) if is_dataclass(like) else items


def in_one_memory_format(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a forward with rows-first tensors.

    Joined tensors are channels-last if all of their parts are, and kernels for both formats differ in their last bits:
    an image made from an image was off by 6e-6 among images made from noise.
    """
    return {
        name: map_tensors(value, _rows_first) if isinstance(value, torch.Tensor | dict | list) else value
        for name, value in arguments.items()
    }


def _rows_first(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor with dimensions of one entry counts as contiguous in both formats; only a copy has definite strides.
    return tensor if tensor.ndim < 4 else tensor.clone(memory_format=torch.contiguous_format)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree of outputs of the same form with `change` applied to each tensor."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return _rebuild(tree, {name: map_tensors(item, change) for name, item in tree.items()})
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(item, change) for item in tree)
    return tree
