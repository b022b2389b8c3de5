"""Stacking rules inferred from the arguments of calls, for denoisers of architectures without rules of their own.

An argument can often be read in several ways: the leading dimension of a tensor can be the number of rows, or happen to
equal it. The self-check tries the guesses and uses the one that fuses most calls without changing a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, product
from typing import Any

import torch

from shared.architectures.stacking_rules import Argument, Kind, StackingRules
from worker.engine.fusion.batch_key import Arguments, is_omitted

MAX_GUESSES = 12
PER_ROW = (Kind.STACKED, Kind.GROUPED, Kind.LAYERED)


def guess_rules(calls: Sequence[Arguments]) -> Iterator[StackingRules]:
    """Yield up to `MAX_GUESSES` rules that are possible for `calls`, the most likely first.

    The first argument that is a tensor of three or more dimensions has one entry per row in dim 0; without one, nothing
    is inferred. Nothing is padded: the arguments do not show whether a mask hides the padding.
    """
    rows = next((name for name, value in calls[0].items() if _is_batch(value)), None)
    if rows is None or not all(_is_batch(call.get(rows)) for call in calls):
        return
    counts = [call[rows].shape[0] for call in calls]
    names = dict.fromkeys(name for call in calls for name in call)
    kinds = {name: _possible_kinds([call.get(name) for call in calls], counts) for name in names}
    kinds[rows] = (Kind.STACKED,)
    for chosen in islice(_choices(kinds), MAX_GUESSES):
        yield StackingRules(rows, {name: Argument(kind) for name, kind in chosen.items() if kind is not Kind.EQUAL})


def _choices(kinds: Mapping[str, Sequence[Kind]]) -> Iterator[dict[str, Kind]]:
    """Yield one kind per argument: first the likeliest of each, then those with one other kind, then with two."""
    likeliest = {name: options[0] for name, options in kinds.items()}
    unclear = [name for name, options in kinds.items() if len(options) > 1]
    for changes in range(3):
        for names in combinations(unclear, changes):
            for others in product(*(kinds[name][1:] for name in names)):
                yield likeliest | dict(zip(names, others, strict=True))


def _possible_kinds(values: Sequence[Any], counts: Sequence[int]) -> tuple[Kind, ...]:
    """Return the kinds that one argument can have, from its value in each call and the rows of each call."""
    present = [(value, count) for value, count in zip(values, counts, strict=True) if not is_omitted(value)]
    if not present:
        return (Kind.EQUAL,)
    if all(_is_number(value) for value, _ in present):
        return _kinds_of_numbers([value for value, _ in present])
    clear = len({count for _, count in present}) > 1  # different numbers of rows: no dimension just happens to match
    if not any(tensors_in(value) for value, _ in present):
        listed = all(isinstance(value, list | tuple) and len(value) == count for value, count in present)
        if not listed:
            return (Kind.EQUAL,)
        return (Kind.REPEATED, Kind.EQUAL) if clear else (Kind.EQUAL, Kind.REPEATED)
    if all(_has_rows(value, count) for value, count in present):
        alike = _some_alike([value for value, _ in present])
        return (Kind.STACKED, Kind.SAME) if alike else (Kind.STACKED,)
    others = []
    if _is_grouped(present):
        others.append(Kind.GROUPED)
    if all(_is_batch(value) and value.shape[1] == count for value, count in present):
        others.append(Kind.LAYERED)
    return (*others, Kind.SAME) if clear else (Kind.SAME, *others)


def _some_alike(values: Sequence[Any]) -> bool:
    """Return whether two of `values` have equal tensors; otherwise the first calls cannot share a forward by them."""
    trees = [tensors_in(value) for value in values]
    return any(
        len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
        for one, other in combinations(trees, 2)
    )


def _kinds_of_numbers(values: Sequence[Any]) -> tuple[Kind, ...]:
    """Return the kinds of a number: equal integers, such as a height, are more likely a setting than a time."""
    if any(isinstance(value, torch.Tensor) for value in values):
        return (Kind.ROWS, Kind.SAME) if _some_alike(values) else (Kind.ROWS,)
    if all(isinstance(value, int) for value in values) and len(set(values)) == 1:
        return (Kind.EQUAL, Kind.ROWS)
    return (Kind.ROWS, Kind.EQUAL)


def _is_batch(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 3


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_grouped(present: Sequence[tuple[Any, int]]) -> bool:
    """Return whether all values are tensors with several entries per row, the same number in all calls."""
    if not all(isinstance(value, torch.Tensor) and value.ndim for value, _ in present):
        return False
    entries = {value.shape[0] / count for value, count in present}
    return len(entries) == 1 and min(entries) > 1 and min(entries).is_integer()


def _has_rows(value: Any, count: int) -> bool:
    """Return whether all tensors in `value`, at least one, have `count` entries."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0 and value.shape[0] == count
    items = list(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(items, list | tuple):
        return False
    leaves = [item for item in items if item is not None]
    return bool(leaves) and all(_has_rows(item, count) for item in leaves)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = list(tree.values()) if isinstance(tree, Mapping) else tree
    return [leaf for item in items for leaf in tensors_in(item)] if isinstance(items, list | tuple) else []


def altered_call(rules: StackingRules, calls: Sequence[Arguments]) -> dict[str, Any] | None:
    """Return the last of `calls` with other values where those of all calls are equal; None if none are.

    Equal values do not show whether a model reads those of each row or, like positions, those of the first row only.
    """
    altered = dict(calls[-1])
    for name, rule in rules.arguments.items():
        if rule.kind in PER_ROW and name != rules.rows and all(name in call for call in calls):
            altered[name] = _alter_equal([call[name] for call in calls])
    changed = any(altered[name] is not calls[-1][name] for name in altered)
    return altered if changed else None


def _alter_equal(values: Sequence[Any]) -> Any:
    """Return the last tree of `values` with other values in tensors that have equal first entries in all trees."""
    last = values[-1]
    if isinstance(last, torch.Tensor):
        alike = all(torch.equal(value[:1], last[:1]) for value in values[:-1])
        return _other_values(last) if alike else last
    if isinstance(last, Mapping):
        items = {name: _alter_equal([value[name] for value in values]) for name in last}
        return items if any(items[name] is not last[name] for name in last) else last
    if isinstance(last, list | tuple):
        entries = [_alter_equal(column) for column in zip(*values, strict=True)]
        return type(last)(entries) if any(a is not b for a, b in zip(entries, last, strict=True)) else last
    return last


def _other_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of other values that are valid too: no index grows."""
    if tensor.ndim > 1 and tensor.shape[1] > 1:
        rolled = tensor.roll(1, dims=1)
        if not torch.equal(rolled, tensor):
            return rolled
    if tensor.dtype is torch.bool or tensor.ndim > 1:  # a mask that hides nothing
        changed = tensor.clone()
        changed.reshape(changed.shape[0], -1)[:, -1:] = 0
        return changed
    return tensor / 2 if tensor.is_floating_point() else tensor // 2
