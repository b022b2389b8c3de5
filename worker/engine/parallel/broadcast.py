"""The arguments of a forward, from rank 0 to the other ranks: the tensors through the group, the rest as a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorPlace:
    """Stands for a tensor in a message; the tensors follow in the order of their places."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool


@dataclass(frozen=True)
class ForwardMessage:
    """A forward to run: the component's name, arguments with places for tensors, and autocast's device and dtype."""

    component: str
    arguments: Any
    autocast: tuple[str, torch.dtype] | None


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return `value` with a place for each tensor, which is added to `tensors`."""

    def place(tensor: torch.Tensor) -> TensorPlace:
        tensors.append(tensor)
        return TensorPlace(tuple(tensor.shape), tensor.dtype, tensor.device.type == "cpu")

    return _replaced(value, torch.Tensor, place)


def send(tensors: list[torch.Tensor]) -> None:
    """Send tensors to all ranks."""
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(_as_bytes(tensor.contiguous()), 0)


def receive(arguments: Any, device: torch.device) -> Any:
    """Return described arguments with the tensors that rank 0 sends."""

    def read(place: TensorPlace) -> torch.Tensor:
        tensor = torch.empty(place.shape, dtype=place.dtype, device="cpu" if place.on_host else device)
        if tensor.numel():
            dist.broadcast(_as_bytes(tensor), 0)
        return tensor

    return _replaced(arguments, TensorPlace, read)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor: gloo does not know every dtype. One of one value can have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _replaced(value: Any, kind: type[Any], replace: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, dict):
        return {name: _replaced(one, kind, replace) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(one, kind, replace) for one in value)
    return value
