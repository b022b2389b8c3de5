"""Which weights of a file have a part in what a reader makes of them: diffusers' readers drop some without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


class TracedWeight(torch.Tensor):
    """A weight of a file: whatever is computed from it has its name among `sources`."""

    sources: frozenset[str]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        sources = frozenset[str]().union(*(one.sources for one in _traced((args, kwargs or {}))))
        for one in _traced(result):
            one.sources = sources
        return result


def _traced(value: Any) -> Iterator[TracedWeight]:
    """Yield the traced weights in a value of lists, tuples and dictionaries."""
    if isinstance(value, TracedWeight):
        if not hasattr(value, "sources"):
            value.sources = frozenset()
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _traced(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _traced(item)


def traced(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a file as traced ones."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        weight = tensor.as_subclass(TracedWeight)
        weight.sources = frozenset((name,))
        result[name] = weight
    return result


def untraced(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as plain tensors."""
    return {name: tensor.as_subclass(torch.Tensor) for name, tensor in weights.items()}


def without_effect(file: Mapping[str, torch.Tensor], made: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of the weights of a file that have no part in `made` and are not 0.

    Alphas do not count: readers take their values, which cannot be traced.
    """
    used = frozenset[str]().union(*(one.sources for one in _traced(made)))
    unused = (name for name in sorted(file) if name not in used and not name.endswith((".alpha", ".scale")))
    return tuple(name for name in unused if bool(file[name].as_subclass(torch.Tensor).any()))
