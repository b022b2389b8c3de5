"""Trees of values as JSON and named tensors: the forms of module outputs, and the attributes of noise schedulers.

No pickles: a file that is read runs no code. Classes of outputs are named, and looked up in modules of diffusers and
transformers that have been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

Json = Any

_LIBRARIES = ("diffusers.", "transformers.")
_PLAIN = (bool, int, float, str, type(None))
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTEGERS)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class NotStorable(Exception):
    """A value that a checkpoint cannot hold; the message says which."""


class WrongTree(ValueError):
    """JSON that describes no tree."""


def form_of(output: Any) -> Json:
    """Return the form of a module's output: its structure, with shapes and dtypes in place of tensors."""
    if isinstance(output, torch.Tensor):
        if output.dtype not in _NAMES:
            raise NotStorable(f"an output of type {output.dtype}")
        return {"shape": list(output.shape), "dtype": _NAMES[output.dtype]}
    if isinstance(output, Mapping):
        return {"items": {name: form_of(item) for name, item in output.items()}, "class": _class_name(output)}
    if type(output) in (list, tuple):
        return {type(output).__name__: [form_of(item) for item in output]}
    if isinstance(output, _PLAIN):
        return {"value": output}
    raise NotStorable(f"an output of class {type(output).__name__}")


def zeros_of(form: Json, device: torch.device) -> Any:
    """Return an output of a form whose tensors are zeros; raises `WrongTree`."""
    match form:
        case {"shape": shape, "dtype": dtype}:
            return torch.zeros(shape, dtype=_DTYPES[dtype], device=device)
        case {"items": items, "class": name}:
            made = {key: zeros_of(item, device) for key, item in items.items()}
            return made if name is None else _class_of(name)(**made)
        case {"tuple": items}:
            return tuple(zeros_of(item, device) for item in items)
        case {"list": items}:
            return [zeros_of(item, device) for item in items]
        case {"value": value}:
            return value
    raise WrongTree(f"no form of an output: {str(form)[:80]}")


def pack(value: Any, name: str, tensors: MutableMapping[str, torch.Tensor]) -> Json:
    """Return JSON of a value; its tensors are put into `tensors`, under names that begin with `name`."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in _NAMES:
            raise NotStorable(f"{name} of type {value.dtype}")
        order = _order(value)
        tensors[name] = value.permute(order)
        return {"tensor": name, "host": value.device.type == "cpu", "order": order}
    if isinstance(value, np.ndarray | np.generic):
        tensors[name] = _from_numpy(value, name)
        return {"array": name, "scalar": isinstance(value, np.generic)}
    if type(value) is dict and all(type(key) in _PLAIN for key in value):
        return {"dict": [[key, pack(item, f"{name}.{at}", tensors)] for at, (key, item) in enumerate(value.items())]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [pack(item, f"{name}.{at}", tensors) for at, item in enumerate(value)]}
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if type(value) in _PLAIN:
        return {"value": value}
    raise NotStorable(f"{name} of class {type(value).__name__}")


def unpack(packed: Json, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """Return the value of which `pack` returned JSON, with tensors of its own; raises `WrongTree`."""
    match packed:
        case {"tensor": name, "host": on_host, "order": order}:
            tensor = tensors[name].to("cpu" if on_host else device, copy=True)
            return tensor.permute([order.index(at) for at in range(len(order))])
        case {"array": name, "scalar": is_scalar}:
            array = tensors[name].numpy().copy()
            return array[()] if is_scalar else array
        case {"size": sides}:
            return torch.Size(sides)
        case {"dict": items}:
            return {key: unpack(item, tensors, device) for key, item in items}
        case {"tuple": items}:
            return tuple(unpack(item, tensors, device) for item in items)
        case {"list": items}:
            return [unpack(item, tensors, device) for item in items]
        case {"value": value}:
            return value
    raise WrongTree(f"no packed value: {str(packed)[:80]}")


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's or noise scheduler's output, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_of(item)


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions in the order of memory: kernels for channels-last tensors differ in their last bits."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda at: 0 if tensor.is_contiguous() else -strides[at])


def _from_numpy(value: Any, name: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(value))  # a copy
    except TypeError:
        raise NotStorable(f"{name} of type {value.dtype}") from None


def _class_name(output: Mapping[str, Any]) -> str | None:
    if not is_dataclass(output):
        return None
    name = f"{type(output).__module__}:{type(output).__qualname__}"
    try:
        _class_of(name)
    except WrongTree:
        raise NotStorable(f"an output of class {name}") from None
    return name


def _class_of(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found = getattr(sys.modules.get(module), qualname, None) if module.startswith(_LIBRARIES) else None
    if not (isinstance(found, type) and is_dataclass(found) and issubclass(found, dict)):
        raise WrongTree(f"no class of outputs: {name[:120]}")
    return found
