"""Adapters per row of one forward: LoRAs add to the outputs of layers, embeddings replace rows of token embeddings."""

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shared.architectures.registry import ADAPTERS_PER_ROW
from shared.config.adapters import Adapter
from worker.engine.errors import StackingError
from worker.engine.lora.adaptable import make_adaptable
from worker.engine.lora.adapter_files import AdapterFile
from worker.engine.lora.applying import Rows, add_update
from worker.engine.lora.layer_update import LayerUpdate
from worker.engine.lora.new_tokens import NewTokens, TokenVectors, Word

Change = LayerUpdate | TokenVectors

AdapterKey = tuple[tuple[str, float], ...]
"""The adapters of a job and their scales; empty for none."""


def adapter_key(adapters: Sequence[Adapter]) -> AdapterKey:
    """Return the key of a job's adapters, in any order; an adapter of scale 0 is ignored."""
    return tuple(sorted((adapter.id, adapter.scale) for adapter in adapters if adapter.scale))


class Span(NamedTuple):
    """The rows `start` to `stop` of a forward, which have the same adapters."""

    start: int
    stop: int
    key: Hashable


def spans(keys: Sequence[AdapterKey], rows: Sequence[int], *, merge: bool) -> list[Span]:
    """Return the spans of rows with adapters, for calls of `rows` rows each.

    With `merge`, adjacent calls with one key share a span. Without, each call has its own span, so that its rows are
    bit-identical for any other rows in the forward.
    """
    result: list[Span] = []
    start = 0
    for key, count in zip(keys, rows, strict=True):
        stop = start + count
        if merge and result and result[-1].stop == start and result[-1].key == key:
            result[-1] = Span(result[-1].start, stop, key)
        elif key:
            result.append(Span(start, stop, key))
        start = stop
    return result


@dataclass
class _Forward:
    """The running forward: `whole` is the key of all its rows if they have one; else `spans` by key of its `rows` rows.

    `adapted`: whether a row has adapters. Compiled blocks read nothing else. Layers with several entries per row get
    those of a row one after the other, or with `halves` the first ones of all rows before the second ones.
    """

    halves: bool = False
    whole: Hashable = ()
    spans: Mapping[Hashable, Sequence[Span]] = field(default_factory=dict)
    rows: int = 0
    adapted: bool = False


@dataclass
class _Layer:
    """Forward hook of one layer, with the update of each attached adapter."""

    path: str
    forward: _Forward
    changes: dict[Hashable, Change] = field(default_factory=dict)

    def __call__(self, layer: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        forward = self.forward
        if forward.whole:
            change = self.changes.get(forward.whole)
            if change is not None:
                _apply(change, layer, [(args[0], output)])
        elif forward.spans:
            self._add_to_spans(layer, args[0], output)
        return output

    def _add_to_spans(self, layer: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor) -> None:
        # Some layers get several entries per row: Wan embeds a timestep per token, Qwen-Image-Edit 2511 a zero as well.
        entries, rest = divmod(inputs.shape[0], self.forward.rows)
        if rest:
            raise StackingError(f"{self.path} gets {inputs.shape[0]} entries for {self.forward.rows} rows")
        consecutive = 1 if self.forward.halves else entries
        for key, own in self.forward.spans.items():
            change = self.changes.get(key)
            if change is None:
                continue
            rows = [
                slice(first + start * consecutive, first + stop * consecutive)
                for start, stop, _ in own
                for first in range(0, inputs.shape[0], self.forward.rows * consecutive)
            ]
            _apply(change, layer, [(inputs[each], output[each]) for each in rows])


@dataclass
class _TokenLayer(_Layer):
    """Hooks of a token embedding: the ids of new tokens are beyond its table, which gets others in their place."""

    ids: torch.Tensor | None = None

    def before(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Keep the ids, and return arguments with ids of the table."""
        assert isinstance(layer, torch.nn.Embedding)
        self.ids = args[0]
        return (args[0].clamp(max=layer.num_embeddings - 1), *args[1:])

    def __call__(self, layer: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        ids, self.ids = self.ids, None
        return super().__call__(layer, (ids, *args[1:]), output)


def _apply(change: Change, layer: torch.nn.Module, rows: Rows) -> None:
    """Change the outputs of `rows` in place."""
    if not isinstance(change, TokenVectors):
        return add_update(layer, rows, change)
    for inputs, output in rows:
        change.fill_in(inputs, output)
    return None


class RowAdapters:
    """The adapters attached to one shared module. `per_row`: rows of one forward can have different adapters.

    A layer has a hook only while an attached adapter changes it, so a module without adapters is not slower. For use
    between forwards, on the engine's thread.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.per_row = type(module).__name__ in ADAPTERS_PER_ROW
        # With `zero_cond_t` a forward embeds the timesteps of all rows, and after them a zero for each.
        self._forward = _Forward(halves=bool(getattr(getattr(module, "config", None), "zero_cond_t", False)))
        self._paths: dict[AdapterKey, tuple[str, ...]] = {}
        self._layers: dict[str, tuple[_Layer, Sequence[Any]]] = {}

    @property
    def idle(self) -> bool:
        return not self._paths

    def changed_by(self, key: AdapterKey) -> bool:
        return key in self._paths

    def attach(self, key: AdapterKey, changes: Mapping[str, Change]) -> None:
        """Attach `changes`, which must fit the module, for rows with `key`."""
        for _ in self.attach_layers(key, changes):
            pass

    def attach_layers(self, key: AdapterKey, changes: Mapping[str, Change]) -> Iterator[None]:
        """Attach one layer of `changes` for each item of the iterator; rows use the key only when all are attached."""
        for path, change in changes.items():
            if path not in self._layers:
                self._layers[path] = self._hooked(path)
            self._layers[path][0].changes[key] = change
            yield
        self._paths[key] = tuple(changes)

    def _hooked(self, path: str) -> tuple[_Layer, Sequence[Any]]:
        part = self.module.get_submodule(path)
        if not isinstance(part, torch.nn.Embedding):
            layer = _Layer(path, self._forward)
            return layer, [part.register_forward_hook(layer)]
        tokens = _TokenLayer(path, self._forward)
        return tokens, [part.register_forward_pre_hook(tokens.before), part.register_forward_hook(tokens)]

    def detach(self, key: AdapterKey) -> None:
        for path in self._paths.pop(key, ()):
            layer, hooks = self._layers[path]
            del layer.changes[key]
            if not layer.changes:
                for hook in hooks:
                    hook.remove()
                del self._layers[path]

    @contextmanager
    def applied(self, keys: Sequence[AdapterKey], rows: Sequence[int], *, merge: bool) -> Iterator[None]:
        """Apply to the rows of each call the adapters of its key, during one forward."""
        forward = self._forward
        if (merge or not self.per_row) and all(key == keys[0] for key in keys):
            forward.whole = keys[0]
        else:
            forward.rows, by_key = sum(rows), dict[Hashable, list[Span]]()
            for span in spans(keys, rows, merge=merge):
                by_key.setdefault(span.key, []).append(span)
            forward.spans = by_key
        forward.adapted = bool(forward.whole or forward.spans)
        try:
            yield
        finally:
            forward.whole, forward.spans, forward.rows, forward.adapted = (), {}, 0, False

    def prepare_for_compiler(self, blocks: Sequence[torch.nn.Module]) -> None:
        """Make the linear layers of `blocks` adaptable ones, so that graphs of the blocks serve any adapters."""
        for layer in (layer for block in blocks for layer in block.modules()):
            if type(layer) is torch.nn.Linear:
                make_adaptable(layer, self._forward)

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Run forwards as if rows had adapters, while none is attached."""
        self._forward.adapted = True
        try:
            yield
        finally:
            self._forward.adapted = False


class ModelAdapters:
    """The adapters attached to one model, least recently used first."""

    def __init__(self, modules: Mapping[str, RowAdapters]) -> None:
        self.modules = modules
        self._sizes: dict[AdapterKey, int] = {}
        self._files: dict[AdapterKey, AdapterFile] = {}  # without their changes

    @property
    def nbytes(self) -> int:
        return sum(tuple(self._sizes.values()))  # copied first: heartbeats read it on another thread

    @property
    def attached(self) -> tuple[AdapterKey, ...]:
        return tuple(self._sizes)

    def use(self, key: AdapterKey) -> bool:
        """Return whether the adapters of `key` are attached, and mark them as used."""
        if key in self._sizes:
            self._sizes[key] = self._sizes.pop(key)
        return not key or key in self._sizes

    def warnings(self, key: AdapterKey) -> tuple[str, ...]:
        """Return what is worth a warning to jobs with the adapters of `key`."""
        return self._files[key].warnings if key in self._files else ()

    def words(self, key: AdapterKey) -> Sequence[Word]:
        """Return the words that stand for embeddings in prompts of jobs with the adapters of `key`."""
        return self._files[key].tokens.words if key in self._files else ()

    def attach(self, key: AdapterKey, file: AdapterFile) -> None:
        """Attach the changes of all modules."""
        for _ in self.attach_layers(key, file):
            pass

    def attach_layers(self, key: AdapterKey, file: AdapterFile) -> Iterator[None]:
        """Attach one layer for each item of the iterator."""
        self._files[key] = AdapterFile({}, file.warnings, NewTokens(file.tokens.words))
        for component in dict.fromkeys((*file.changes, *file.tokens.tables)):
            layers: dict[str, Change] = dict(file.changes.get(component, {}))
            if (table := file.tokens.tables.get(component)) is not None:
                layers[table.path] = table
            yield from self.modules[component].attach_layers(key, layers)
        layers_bytes = sum(change.nbytes for layers in file.changes.values() for change in layers.values())
        self._sizes[key] = layers_bytes + file.tokens.nbytes

    def trim(self, budget_bytes: int, in_use: Container[AdapterKey]) -> None:
        """Detach adapters that are not in use, least recently used first, until the rest fits into the budget."""
        for key in self.attached:
            if self.nbytes <= budget_bytes:
                return
            if key not in in_use:
                for module in self.modules.values():
                    module.detach(key)
                del self._sizes[key]
                self._files.pop(key, None)
