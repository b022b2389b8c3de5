"""A pretended device: tensors that say they are on a device, with their values on the CPU.

It counts what a real device would be asked to do, and refuses to mix devices as a real one does. Its name is a torch
device type that no build implements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("lazy", 0)

_aten = torch.ops.aten
# The host waits for these, because the shape of their result depends on values.
_WAITING = {_aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim, _aten.equal, _aten.bincount}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_}
_COPYING = {_aten._to_copy, _aten.copy_}
_JOINING = {_aten.cat, _aten.stack}  # these refuse single numbers of another device too
_FREE = {_aten.detach, _aten.alias, _aten.lift_fresh, _aten.empty, _aten.empty_like, _aten.empty_strided}


class PretendedTensor(torch.Tensor):
    """A tensor on the pretended device; `on_cpu` has its values."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> PretendedTensor:
        wrapper: PretendedTensor = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.shape, strides=on_cpu.stride(), dtype=on_cpu.dtype, device=DEVICE
        )
        wrapper.on_cpu = on_cpu
        return wrapper

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.on_cpu!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Makes `DEVICE` usable while entered. Counts launches, and waits by operation, while not `paused`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0
        self.waits: Counter[str] = Counter()
        self._paused = 0

    def __enter__(self) -> Self:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes a copy that is counted
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch._C._set_only_lift_cpu_tensors(False)

    def reset(self) -> None:
        self.launches = 0
        self.waits.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._paused:
            self.launches += launches(func, args, kwargs)
            wait = wait_of(func, args, kwargs)
            if wait is not None:
                self.waits[wait] += 1
        return _run(func, args, kwargs)


def launches(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation is queued on the device: not one that only makes a view, or runs on the CPU."""
    if func.is_view or func.overloadpacket in _FREE:
        return False
    return any(map(_is_pretended, tree_leaves((args, kwargs)))) or _names_device(kwargs)


def wait_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return a name of an operation at which the host waits for the device, None for any other."""
    operation, name = func.overloadpacket, func.overloadpacket.__name__
    if operation in _COPYING:
        return _wait_of_copy(operation is _aten.copy_, args, kwargs)
    if operation in _INDEXING:
        indexes = [index for index in args[1] if index is not None]
        if any(_is_pretended(index) and index.dtype in (torch.bool, torch.uint8) for index in indexes):
            return f"{name} by a mask"
        elsewhere = any(_is_pretended(index) != _is_pretended(args[0]) for index in indexes)
        return f"{name} by an index that is elsewhere" if elsewhere else None
    if not any(map(_is_pretended, args)):
        return None
    if operation is _aten._local_scalar_dense:
        return "read of a value"
    counts_repeats = operation is _aten.repeat_interleave and _is_pretended(args[-1])
    return name if operation in _WAITING or counts_repeats else None


def _wait_of_copy(in_place: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    source = args[1] if in_place else args[0]
    to_device = _is_pretended(args[0]) if in_place else _goes_to_device(args, kwargs)
    if to_device == _is_pretended(source):
        return None
    if not to_device:
        return "copy to the host"
    without_waiting = kwargs.get("non_blocking") or (in_place and len(args) > 2 and args[2])
    return None if without_waiting else "copy to the device"


def _is_pretended(value: Any) -> bool:
    return isinstance(value, PretendedTensor)


def _names_device(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == DEVICE.type


def _goes_to_device(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the result of an operation is on the device."""
    if kwargs.get("device") is not None:
        return _names_device(kwargs)
    return any(map(_is_pretended, tree_leaves((args, kwargs))))


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    operation = func.overloadpacket
    if operation in _INDEXING | {_aten.copy_}:
        to_device = _is_pretended(args[0])
    else:
        to_device = _goes_to_device(args, kwargs) and operation is not _aten._local_scalar_dense
        if to_device and operation is not _aten._to_copy:
            _refuse_mixed(operation, tree_leaves((args, kwargs)))
    values, options = tree_map_only(PretendedTensor, lambda tensor: tensor.on_cpu, (args, dict(kwargs)))
    if options.get("device") is not None:
        options["device"] = torch.device("cpu")
    result = func(*values, **options)
    if operation.__name__.endswith("_") and not operation.__name__.endswith("__"):
        return args[0]  # changed in place
    return tree_map_only(torch.Tensor, PretendedTensor, result) if to_device else result


def _refuse_mixed(operation: Any, leaves: Sequence[Any]) -> None:
    elsewhere = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not _is_pretended(leaf)]
    if any(tensor.ndim or operation in _JOINING for tensor in elsewhere):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {operation} got {DEVICE} and cpu")
