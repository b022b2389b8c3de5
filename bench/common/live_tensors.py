"""The memory of the tensors that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

import torch


def live_bytes(counts: Callable[[torch.Tensor], bool] = lambda _tensor: True) -> int:
    """Return the memory of live tensors, as far as `counts` says; tensors that share memory count once."""
    gc.collect()
    return memory_of(tensor for tensor in _tensors() if counts(tensor))


def memory_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the memory of tensors; those that share it count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors() -> Iterator[torch.Tensor]:
    return (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
