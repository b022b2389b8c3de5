"""Texts encoded once: the output of a text encoder is kept for jobs that give it the same tokens.

Negative prompts are mostly alike, the pictures of one job have one prompt, and a client tries many seeds of one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from shared.errors import JobError
from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.fusion.stacking import mapped

KEPT_BYTES = 64 * 1024 * 1024
"""Of one model. What takes more than a quarter of it (every layer's states of a large language model) is not kept."""

LONGEST_TOKENS = 4096


class TextCache:
    """What the text encoders of one model gave, the least recently used going first."""

    def __init__(self, room_bytes: int = KEPT_BYTES) -> None:
        self._room_bytes = room_bytes
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.nbytes = 0

    def get(self, call: ParkedCall) -> Any | None:
        """Return the outcome of a call of known tokens, which shares no memory; None where it has to be run."""
        key = tokens_of(call)
        found = None if key is None else self._find(key)
        return None if found is None else _copy_of(found)

    def get_or_run(self, calls: Sequence[ParkedCall], run: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
        """Return the outcome of each call: `run(which)` gives those of the calls that are not known, equal ones once.

        No two share memory, as pipelines may change what they are given. What cannot be copied, for want of memory too,
        is run for each.
        """
        # A number stands for a call that is not of tokens alone: it is equal to no other.
        keys = [tokens_of(call) or at for at, call in enumerate(calls)]
        known = {key: found for key in keys if (found := self._find(key)) is not None}
        which = [at for at, key in enumerate(keys) if key not in known and key not in keys[:at]]
        ran = dict(zip(which, run(which), strict=True)) if which else {}
        for at, outcome in ran.items():
            known[keys[at]] = outcome
            self._keep(keys[at], outcome)
        told = [ran[at] if at in ran else _copy_of(known[key]) for at, key in enumerate(keys)]
        rest = [at for at, outcome in enumerate(told) if outcome is None]
        for at, outcome in zip(rest, run(rest), strict=True) if rest else ():
            told[at] = outcome
        return told

    def _find(self, key: Hashable) -> Any:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def _keep(self, key: Hashable, outcome: Any) -> None:
        if isinstance(key, int) or isinstance(outcome, JobError) or not is_plain(outcome):
            return
        size = bytes_of(outcome)
        copy = None if size == 0 or size > self._room_bytes // 4 else _copy_of(outcome)
        if copy is None:
            return
        self._kept[key] = copy, size
        self.nbytes += size
        while self.nbytes > self._room_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self.nbytes -= freed

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()
        self.nbytes = 0


def tokens_of(call: ParkedCall) -> Hashable | None:
    """Return what is equal for calls of equal output; None for one that is not of tokens alone."""
    if call.shared_method.stage is not Stage.ENCODE or call.shared_method.method != "forward":
        return None
    parts: list[Hashable] = []
    tokens = 0
    for name, value in (*enumerate(call.args), *sorted(call.kwargs.items())):
        if isinstance(value, torch.Tensor):
            if value.is_floating_point() or value.numel() > LONGEST_TOKENS:
                return None
            tokens += value.numel()
            parts.append((name, value.dtype, value.shape, value.cpu().numpy().tobytes()))
        elif value is None or isinstance(value, bool | int | float | str):
            parts.append((name, value))
        else:
            return None
    return (id(call.shared_method), call.adapter, call.autocast, *parts) if tokens else None


def _copy_of(outcome: Any) -> Any:
    """Return a copy of its own, None where there can be none: that must not end the engine's thread."""
    try:
        return copied(outcome)
    except (RuntimeError, TypeError):  # no memory; an output class that is made otherwise
        return None


def copied(tree: Any) -> Any:
    """Return a tree of outputs with tensors of its own."""
    return mapped(tree, lambda tensor: tensor.clone())


def is_plain(tree: Any) -> bool:
    """Return whether a tree holds tensors and plain values alone.

    What else there may be, such as a language model's cache of keys and values, is neither copied nor counted: it can
    be many times as large as the states beside it.
    """
    if isinstance(tree, Mapping):
        return all(is_plain(item) for item in tree.values())
    if isinstance(tree, list | tuple):
        return all(is_plain(item) for item in tree)
    return tree is None or isinstance(tree, torch.Tensor | bool | int | float | str)


def bytes_of(tree: Any) -> int:
    """Return how much memory the tensors of a tree take."""
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(bytes_of(item) for item in tree.values())
    return sum(bytes_of(item) for item in tree) if isinstance(tree, list | tuple) else 0
