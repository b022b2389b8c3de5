"""The memory of the tensors that are alive in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def live_bytes(counts: Callable[[torch.Tensor], bool] = lambda _tensor: True) -> int:
    """Return the memory of live tensors, as far as `counts` says; tensors that share memory count once."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors if counts(tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
