"""Updates of files for the modules of a model: whether they fit, their sum for a job, and their move to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight

from shared.errors import AdapterUnavailable
from shared.inputs.adapter_check import MAX_LOHA_RANK, MAX_RANK
from shared.signature import DENOISERS
from worker.engine.lora.layer_update import Changes, Hadamard, LayerUpdate, Product, added_up, at_scale
from worker.engine.lora.pacing import Pace, no_pace, paced

Modules = Mapping[str, Any]


def combine(adapters: Sequence[tuple[Changes, float]], modules: Modules, pace: Pace = no_pace) -> Changes:
    """Return the sum of `adapters`, each at its scale, for the weights of `modules`; their ranks add up."""
    summands: dict[str, dict[str, list[LayerUpdate]]] = {}
    for changes, scale in adapters:
        for component, layers in changes.items():
            for path, update in paced(layers.items(), pace):
                own = at_scale(update, scale, partial(_weight, modules[component], component, path), pace)
                summands.setdefault(component, {}).setdefault(path, []).append(own)
    return {
        component: {path: added_up(each) for path, each in paced(layers.items(), pace)}
        for component, layers in summands.items()
    }


def _weight(module: torch.nn.Module, component: str, path: str) -> torch.Tensor:
    """Return the weight of a layer on the CPU, one at a time."""
    layer = module.get_submodule(path)
    weight: torch.Tensor = dequantize_module_weight(layer).detach()
    outputs, inputs, kernel = _shape(layer)
    if list(weight.shape) != [outputs, inputs, *kernel]:
        kind = type(weight).__name__
        raise AdapterUnavailable(f"DoRA needs the weights of {component}.{path}, which are packed as {kind}")
    return weight.to("cpu")


def move(changes: Changes, modules: Modules, device: torch.device, pace: Pace = no_pace) -> Changes:
    """Return `changes` on `device`, in the dtypes of a model's `modules`."""

    def moved(component: str, update: LayerUpdate) -> LayerUpdate:
        dtype: torch.dtype = getattr(modules[component], "dtype", torch.float32)
        return update.converted(
            lambda one: one.to(device, dtype if one.is_floating_point() else one.dtype).contiguous()
        )

    return {
        name: {path: moved(name, update) for path, update in paced(layers.items(), pace)}
        for name, layers in changes.items()
    }


def adaptable_layers(modules: Mapping[str, torch.nn.Module]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the layers of the denoisers that adapters can change, by component and path."""
    layers = {}
    for component in DENOISERS:
        for path, layer in modules[component].named_modules() if component in modules else ():
            if _is_adaptable(layer):
                outputs, inputs, _ = _shape(layer)
                layers[f"{component}.{path}"] = inputs, outputs
    return layers


def _is_adaptable(layer: torch.nn.Module) -> bool:
    if isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d):
        return layer.groups == 1
    return isinstance(layer, torch.nn.Linear)


def _shape(layer: Any) -> tuple[int, int, tuple[int, ...]]:
    """Return the outputs, inputs and kernel of an adaptable layer."""
    if isinstance(layer, torch.nn.Linear):
        return layer.out_features, layer.in_features, ()
    return layer.out_channels, layer.in_channels, layer.kernel_size


def check_fit(changes: Changes, modules: Modules) -> None:
    """Raise `AdapterUnavailable` for the first change of a layer that `modules` lack, or of another shape."""
    for component, layers in changes.items():
        module = modules.get(component)
        if module is None:
            raise AdapterUnavailable(f"it changes {component}, which the model does not have")
        for path, update in layers.items():
            _check_layer(f"{component}.{path}", update, module, path)


def check_rank(changes: Changes) -> None:
    """Raise `AdapterUnavailable` for a change of a higher rank than uploads may have: rows of a forward share its time.

    The names of an upload do not tell: diffusers' readers make low-rank weights of others too.
    """
    for component, layers in changes.items():
        for path, update in layers.items():
            of_loha = max((one.rank for one in update.products if isinstance(one, Hadamard)), default=0)
            for rank, most in ((update.rank, MAX_RANK), (of_loha, MAX_LOHA_RANK)):
                if rank > most:
                    raise AdapterUnavailable(f"its rank for {component}.{path} is {rank}; at most {most} is allowed")


def check_size(size: Sequence[int], module: torch.nn.Module | None, component: str, path: str) -> None:
    """Raise `AdapterUnavailable` for a layer that `module` lacks, or whose weight is not `size`: [out, in * kernel].

    For matrices that are not made yet.
    """
    name = f"{component}.{path}"
    if module is None:
        raise AdapterUnavailable(f"it changes {component}, which the model does not have")
    outputs, inputs, kernel = _shape(_adaptable_layer(name, module, path))
    wanted = [outputs, inputs * torch.Size(kernel).numel()]
    if list(size) != wanted:
        raise _misfit(name, size, wanted)


def _misfit(name: str, found: Sequence[int], wanted: Sequence[int]) -> AdapterUnavailable:
    return AdapterUnavailable(f"its product for {name} is {list(found)}, but the layer takes {list(wanted)}")


def _adaptable_layer(name: str, module: torch.nn.Module, path: str) -> Any:
    try:
        layer: Any = module.get_submodule(path)
    except AttributeError:
        raise AdapterUnavailable(f"it changes {name}, which the model does not have") from None
    if not _is_adaptable(layer) or getattr(layer, "padding_mode", "zeros") != "zeros":
        raise AdapterUnavailable(
            f"it changes {name}, a {type(layer).__name__}: only linear layers and convolutions can be"
        )
    return layer


def _check_layer(name: str, update: LayerUpdate, module: torch.nn.Module, path: str) -> None:
    outputs, inputs, kernel = _shape(_adaptable_layer(name, module, path))
    rank = 0 if update.down is None else update.down.shape[0]
    down, up = [rank, inputs, *kernel], [outputs, rank, *(1 for _ in kernel)]
    for tensor, shape in ((update.down, down), (update.up, up), (update.bias, up[:1])):
        if tensor is not None and list(tensor.shape) != shape:
            raise AdapterUnavailable(f"its weights for {name} are {list(tensor.shape)}, but the layer takes {shape}")
    columns = inputs * torch.Size(kernel).numel()
    for product in update.products:
        found = _product_shape(product)
        if found != [outputs, columns] or not _divides_kernel(product, columns // inputs):
            raise _misfit(name, found, [outputs, columns])
    magnitude = update.magnitude
    if magnitude is not None and magnitude.norms.shape[0] != (inputs if magnitude.of_inputs else outputs):
        wanted = f"{inputs} inputs" if magnitude.of_inputs else f"{outputs} outputs"
        raise AdapterUnavailable(
            f"its {magnitude.norms.shape[0]} norms for {name} do not fit the {wanted} of the layer"
        )


def _product_shape(product: Product) -> list[int]:
    if isinstance(product, Hadamard):
        return [product.up.shape[0], product.down.shape[1]]
    outputs = product.left[-1].shape[0] * product.right[-1].shape[0]
    if product.rows is not None:
        outputs = product.rows.shape[0]
    return [outputs, product.left[0].shape[1] * product.right[0].shape[1]]


def _divides_kernel(product: Product, kernel: int) -> bool:
    return isinstance(product, Hadamard) or product.right[0].shape[1] % kernel == 0
