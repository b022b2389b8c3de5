"""Batch keys: which calls of one method can share a forward.

Two calls have equal batch keys exactly when they can share a forward: the same tree of arguments, the same trailing
shapes and dtypes, and the same values where values are not stacked.
"""

import hashlib
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from shared.architectures.stacking_rules import EQUAL, Kind, StackingRules
from worker.engine.errors import StackingError

PLAIN = bool | int | float | str | torch.dtype | torch.device | None
Arguments = Mapping[str, Any]


def add_substitutes(rules: StackingRules, arguments: Arguments) -> dict[str, Any]:
    """Return a call's arguments with values for omitted ones that have a substitute."""
    completed = dict(arguments)
    for name, like in rules.substitutes.items():
        if name not in completed and like in completed:
            completed[name] = completed[like]
    return completed


def count_rows(rules: StackingRules, arguments: Arguments) -> int:
    value = arguments.get(rules.rows)
    if isinstance(value, torch.Tensor) and value.ndim:
        return value.shape[0]
    if isinstance(value, list | tuple):
        return len(value)
    raise StackingError(f"argument {rules.rows!r} has no rows")


def batch_key(rules: StackingRules, arguments: Arguments) -> Hashable:
    """Return the batch key of a call. Reads tensor values (which waits for the device) of SAME arguments only."""
    key = []
    for name, value in arguments.items():
        rule = rules.arguments.get(name, EQUAL)
        key_of = KEYS.get(rule.kind)
        if key_of is not None and not is_omitted(value):
            key.append((name, key_of(value) if rule.dtype is None else rule.dtype))
        if rule.kind is Kind.GROUPED and value is not None:
            key.append((f"{name} entries per row", Fraction(value.shape[0], count_rows(rules, arguments))))
    return frozenset(key)


def exact_key(rules: StackingRules, arguments: Arguments) -> Hashable:
    """Return what calls must share, in addition to their batch key, for bit-identical rows.

    Padded and listed arguments depend on the longest of the batch. The model can drop a given mask that hides nothing.
    """
    key: list[tuple[str, Hashable]] = []
    for name, value in arguments.items():
        kind = rules.arguments.get(name, EQUAL).kind
        if kind is Kind.PADDED:
            key.append((name, _tree_key(value)))
        elif kind is Kind.LISTED:
            key.append((name, frozenset(_shape_key(item) for item in value)))
        elif kind is Kind.MASK and value is not None:
            key.append((name, (id(value),)))
        elif kind is Kind.JOINT_MASK:
            key.append((name, is_omitted(value)))
    return frozenset(key)


def holds_objects(rules: StackingRules, arguments: Arguments) -> bool:
    """Return whether an argument without a rule is, or holds, a tensor or another object.

    Only calls with the same object share a forward. It can have entries for the rows, so that copies of the call must
    not fill a forward up: the pixels of the images in a prompt's tokens, for example.
    """
    unruled = [value for name, value in arguments.items() if rules.arguments.get(name, EQUAL).kind is Kind.EQUAL]
    return any(_is_object(value) for value in unruled)


def _is_object(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_is_object(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_is_object(item) for item in value)
    return not isinstance(value, PLAIN)


def is_omitted(value: Any) -> bool:
    """Return whether an argument equals an omitted one: some pipelines pass no options, others an empty dict."""
    return value is None or (isinstance(value, dict) and not value)


def _map_leaves(value: Any, key_of: Callable[[Any], Hashable]) -> Hashable:
    """Return the key of a tree, made of the keys of its leaves."""
    if isinstance(value, Mapping):
        return ("dict", frozenset((name, _map_leaves(item, key_of)) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(_map_leaves(item, key_of) for item in value))
    return key_of(value)


def _tree_key(value: Any) -> Hashable:
    return _map_leaves(value, lambda leaf: (leaf.shape[1:], leaf.dtype) if _is_tensor(leaf) else _value_key(leaf))


def _shape_key(value: Any) -> Hashable:
    return _map_leaves(value, lambda leaf: (leaf.shape, leaf.dtype) if _is_tensor(leaf) else _value_key(leaf))


def _form_key(value: Any) -> Hashable:
    return _map_leaves(value, lambda leaf: (leaf.ndim, leaf.dtype) if _is_tensor(leaf) else _value_key(leaf))


def _length_free_key(value: Any) -> Hashable:
    return _map_leaves(value, lambda leaf: (leaf.shape[2:], leaf.dtype))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _repeated_key(value: Sequence[Any]) -> Hashable:
    entries = {_value_key(item) for item in value}
    return entries.pop() if len(entries) == 1 else ("object", id(value))


_DIGESTS: dict[int, tuple[weakref.ref[torch.Tensor], int, bytes]] = {}  # by id, while the tensor lives


def _content_key(value: Any) -> Hashable:
    return _map_leaves(value, _digest_key)


def _digest_key(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return _value_key(value)
    key = id(value)
    known = _DIGESTS.get(key)
    if known is None or known[0]() is not value or known[1] != value._version:
        flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)  # it can be expanded
        content = flat.view(torch.uint8).numpy().tobytes()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        known = (weakref.ref(value, lambda _gone: _DIGESTS.pop(key, None)), value._version, digest)
        _DIGESTS[key] = known
    return (value.shape, value.dtype, known[2])


def _cache_key(value: Any) -> Hashable:
    idle = all(layer.mode in (None, "skip") for layer in value.caches)
    return None if idle else ("object", id(value))


def _value_key(value: Any) -> Hashable:
    # Tensors are compared by identity: comparing values would wait for the device.
    return _map_leaves(value, lambda leaf: (type(leaf), leaf) if isinstance(leaf, PLAIN) else ("object", id(leaf)))


# A kind without an entry does not affect the key: such an argument can be given in one call and omitted in another.
KEYS: dict[Kind, Callable[[Any], Hashable]] = {
    Kind.STACKED: _tree_key,
    Kind.FRESH: _tree_key,
    Kind.GROUPED: _tree_key,
    Kind.LAYERED: lambda value: (value.shape[0], value.shape[2:], value.dtype),
    Kind.SHARED: _shape_key,
    Kind.PADDED: _length_free_key,
    Kind.LONGEST: lambda value: (value.shape[1:], value.dtype),
    Kind.LISTED: lambda value: frozenset(_form_key(item) for item in value),
    Kind.ROWS: lambda value: value.dtype if isinstance(value, torch.Tensor) else "number",
    Kind.EQUAL: _value_key,
    Kind.SAME: _content_key,
    Kind.REPEATED: _repeated_key,
    Kind.CACHE: _cache_key,
}
