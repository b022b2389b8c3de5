"""Adapters that differ from row to row of one forward, added to the outputs of the layers that they change."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shared.job import Adapter
from shared.mixing import ADAPTERS_PER_ROW
from worker.engine.fusion.batch_key import StackingError
from worker.engine.lora.adapter_files import Changes, LowRank

# What tells apart what is added to a job's forwards: its adapters and their scales; empty for none.
AdapterKey = tuple[tuple[str, float], ...]


def adapter_key(adapters: Sequence[Adapter]) -> AdapterKey:
    """Return the key of a job's adapters; their order does not matter, and one of scale 0 is none."""
    return tuple(sorted((adapter.id, adapter.scale) for adapter in adapters if adapter.scale))


class Span(NamedTuple):
    """The rows `start` to `stop` of a forward, which take the same adapters."""

    start: int
    stop: int
    key: Hashable


def spans(keys: Sequence[AdapterKey], rows: Sequence[int], *, merge: bool) -> list[Span]:
    """Return the rows that take adapters, for calls of so many `rows` each.

    With `merge` neighbours of one key become one span. Without, each call is a span of its own, so that how its
    rows are computed, to the last bit, does not hang on who else is in the forward.
    """
    found: list[Span] = []
    start = 0
    for key, count in zip(keys, rows, strict=True):
        stop = start + count
        if merge and found and found[-1].stop == start and found[-1].key == key:
            found[-1] = Span(found[-1].start, stop, key)
        elif key:
            found.append(Span(start, stop, key))
        start = stop
    return found


@dataclass
class _Forward:
    """The forward under way: `whole` is the key of all its rows, if it is one; else `spans` of `rows` rows."""

    whole: Hashable = ()
    spans: Sequence[Span] = ()
    rows: int = 0


@dataclass
class _Layer:
    """One layer and what each attached adapter adds to it; called after the layer's own forward."""

    path: str
    forward: _Forward
    changes: dict[Hashable, LowRank] = field(default_factory=dict)

    def __call__(self, layer: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        forward = self.forward
        if forward.whole:
            change = self.changes.get(forward.whole)
            if change is not None:
                output += _added(layer, args[0], change)
        elif forward.spans:
            self._add_to_spans(layer, args[0], output)
        return output

    def _add_to_spans(self, layer: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor) -> None:
        # Some layers are given several entries a row, one row after the other: Wan embeds a timestep a token.
        each, rest = divmod(inputs.shape[0], self.forward.rows)
        if rest:
            raise StackingError(f"{self.path} is given {inputs.shape[0]} entries for {self.forward.rows} rows")
        for start, stop, key in self.forward.spans:
            change = self.changes.get(key)
            if change is not None:
                rows = slice(start * each, stop * each)
                output[rows] += _added(layer, inputs[rows], change)


def _added(layer: torch.nn.Module, inputs: torch.Tensor, change: LowRank) -> torch.Tensor:
    inputs = inputs.to(change.down.dtype)
    if isinstance(layer, torch.nn.Linear):
        return F.linear(F.linear(inputs, change.down), change.up, change.bias)
    convolve: Any = F.conv2d if isinstance(layer, torch.nn.Conv2d) else F.conv3d
    inner = convolve(inputs, change.down, None, layer.stride, layer.padding, layer.dilation)
    added: torch.Tensor = convolve(inner, change.up, change.bias)
    return added


class RowAdapters:
    """The adapters attached to one shared module. `per_row`: rows of one forward can have different adapters.

    A layer is touched only while an adapter that changes it is attached: without adapters nothing is slower.
    Only to be used between forwards, on the engine's thread.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.per_row = type(module).__name__ in ADAPTERS_PER_ROW
        self._forward = _Forward()
        self._paths: dict[AdapterKey, tuple[str, ...]] = {}
        self._layers: dict[str, tuple[_Layer, Any]] = {}

    @property
    def idle(self) -> bool:
        return not self._paths

    def changed_by(self, key: AdapterKey) -> bool:
        """Tell whether the adapters of `key` change this module."""
        return key in self._paths

    def attach(self, key: AdapterKey, changes: Mapping[str, LowRank]) -> None:
        """Make the rows that ask for `key` take `changes`, which must fit the module."""
        for path, change in changes.items():
            if path not in self._layers:
                layer = _Layer(path, self._forward)
                self._layers[path] = layer, self.module.get_submodule(path).register_forward_hook(layer)
            self._layers[path][0].changes[key] = change
        self._paths[key] = tuple(changes)

    def detach(self, key: AdapterKey) -> None:
        """Forget the adapters of `key`; unknown ones are ignored."""
        for path in self._paths.pop(key, ()):
            layer, hook = self._layers[path]
            del layer.changes[key]
            if not layer.changes:
                hook.remove()
                del self._layers[path]

    @contextmanager
    def applied(self, keys: Sequence[AdapterKey], rows: Sequence[int], *, merge: bool) -> Iterator[None]:
        """Give each call's rows the adapters of its key during a forward."""
        forward = self._forward
        alike = all(key == keys[0] for key in keys)
        if alike and (merge or not self.per_row):
            forward.whole = keys[0]
        else:
            forward.spans, forward.rows = spans(keys, rows, merge=merge), sum(rows)
        try:
            yield
        finally:
            forward.whole, forward.spans, forward.rows = (), (), 0


class ModelAdapters:
    """The adapters attached to one loaded model, the least recently used first out."""

    def __init__(self, modules: Mapping[str, RowAdapters]) -> None:
        self.modules = modules
        self._sizes: dict[AdapterKey, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(tuple(self._sizes.values()))  # copied at once: heartbeats ask from another thread

    @property
    def attached(self) -> tuple[AdapterKey, ...]:
        """Those attached, the least recently used first."""
        return tuple(self._sizes)

    def use(self, key: AdapterKey) -> bool:
        """Tell whether rows may take `key`, and note that they do."""
        if key in self._sizes:
            self._sizes[key] = self._sizes.pop(key)
        return not key or key in self._sizes

    def attach(self, key: AdapterKey, changes: Changes) -> None:
        """Attach what fits this model."""
        for component, layers in changes.items():
            self.modules[component].attach(key, layers)
        self._sizes[key] = sum(change.nbytes for layers in changes.values() for change in layers.values())

    def trim(self, budget_bytes: int, in_use: Container[AdapterKey]) -> None:
        """Detach what is not in use, the least recently used first, until the rest fits into the budget."""
        for key in self.attached:
            if self.nbytes <= budget_bytes:
                return
            if key not in in_use:
                for module in self.modules.values():
                    module.detach(key)
                del self._sizes[key]
