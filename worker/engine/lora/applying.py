"""Updates of layers in a forward: what a hook adds to the output of its layer, for the inputs of some rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from worker.engine.lora.adaptable import AdaptableLinear
from worker.engine.lora.layer_update import Hadamard, Kronecker, LayerUpdate

Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Inputs of a layer and the layer's outputs for them."""


def add_update(layer: torch.nn.Module, rows: Rows, update: LayerUpdate) -> None:
    """Add an update of a layer to the outputs of `rows`, each by itself."""
    for inputs, output in rows:
        _add_without_products(layer, inputs, output, update)
    for product in update.products:
        if isinstance(product, Kronecker):
            for inputs, output in rows:
                output += _of_kronecker(layer, inputs, product)
        else:
            _add_hadamard(layer, rows, product)


def _add_without_products(
    layer: torch.nn.Module, inputs: torch.Tensor, output: torch.Tensor, update: LayerUpdate
) -> None:
    if update.gain is not None:  # the first, as it needs the output of the layer alone
        output += _across(layer, update.gain) * _without_bias(layer, output)
    if update.input_gain is not None:
        gained = inputs * _across(layer, update.input_gain)
        output += _without_bias(layer, _own_output(layer, gained.to(inputs.dtype)))
    if update.down is not None and update.up is not None:
        output += _low_rank(layer, inputs.to(update.down.dtype), update.down, update.up, update.bias)
    elif update.bias is not None:
        output += _across(layer, update.bias)


def _low_rank(
    layer: torch.nn.Module, inputs: torch.Tensor, down: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(layer, torch.nn.Linear):
        return F.linear(F.linear(inputs, down), up, bias)
    return _convolve_of(layer)(_convolved(layer, inputs, down), up, bias)


def _add_hadamard(layer: torch.nn.Module, rows: Rows, product: Hadamard) -> None:
    """Add a product whose matrices are computed once for all rows, as they can be as large as that of the layer."""
    halves, linear = product.halves(), isinstance(layer, torch.nn.Linear)
    down, up = (product.weight(), None) if halves is None else halves
    if not linear:
        down, up = _with_kernel(layer, down), None if up is None else _pointwise(layer, up)
    for inputs, output in rows:
        own = inputs.to(product.up.dtype)
        if up is not None:
            output += _low_rank(layer, own, down, up, None)
        else:
            output += F.linear(own, down) if linear else _convolved(layer, own, down)


def _of_kronecker(layer: torch.nn.Module, inputs: torch.Tensor, product: Kronecker) -> torch.Tensor:
    """Return the product's output, from one factor after the other: theirs is the size of its matrix."""
    inputs = inputs.to(product.left[0].dtype)
    if product.input_gain is not None:
        inputs = inputs * _across(layer, product.input_gain)
    linear = isinstance(layer, torch.nn.Linear)
    output = (_linear_kronecker if linear else _convolved_kronecker)(layer, inputs, product)
    if product.rows is not None:
        output = output.index_select(-1 if linear else 1, product.rows)
    return output if product.gain is None else output * _across(layer, product.gain)


def _linear_kronecker(_layer: torch.nn.Module, inputs: torch.Tensor, product: Kronecker) -> torch.Tensor:
    inner: torch.Tensor = inputs.unflatten(-1, (product.left[0].shape[1], -1))
    if product.is_right_first(inputs.shape[-1]):
        inner = _chained(_chained(inner, product.right).transpose(-1, -2), product.left).transpose(-1, -2)
    else:
        inner = _chained(_chained(inner.transpose(-1, -2), product.left).transpose(-1, -2), product.right)
    output: torch.Tensor = inner.flatten(-2)
    return output


def _chained(inputs: torch.Tensor, factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    for factor in factors:
        inputs = F.linear(inputs, factor)
    return inputs


def _convolved_kronecker(layer: torch.nn.Module, inputs: torch.Tensor, product: Kronecker) -> torch.Tensor:
    across = product.left[0].shape[1]
    inner = inputs.unflatten(1, (across, -1))  # [rows, left, right, *space]
    if product.is_right_first(inputs.shape[1]):
        inner = _times_left(_convolved_right(layer, inner, product), product)
    else:
        inner = _convolved_right(layer, _times_left(inner, product), product)
    output: torch.Tensor = inner.flatten(1, 2)
    return output


def _times_left(inputs: torch.Tensor, product: Kronecker) -> torch.Tensor:
    inner, others = inputs.flatten(2), inputs.shape[2:]
    for factor in product.left:
        inner = factor @ inner
    output: torch.Tensor = inner.unflatten(2, others)
    return output


def _convolved_right(layer: torch.nn.Module, inputs: torch.Tensor, product: Kronecker) -> torch.Tensor:
    first, *others = product.right
    inner = _convolved(layer, inputs.flatten(0, 1), _with_kernel(layer, first))
    for factor in others:
        inner = _convolve_of(layer)(inner, _pointwise(layer, factor), None)
    output: torch.Tensor = inner.unflatten(0, inputs.shape[:2])
    return output


def _with_kernel(layer: Any, matrix: torch.Tensor) -> torch.Tensor:
    """Return [out, in * kernel] as the weight of a convolution like the layer."""
    return matrix.reshape(matrix.shape[0], -1, *layer.kernel_size)


def _pointwise(layer: Any, matrix: torch.Tensor) -> torch.Tensor:
    """Return [out, in] as the weight of a convolution without a kernel."""
    return matrix.reshape(*matrix.shape, *(1 for _ in layer.kernel_size))


def _convolved(layer: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _convolve_of(layer)(inputs, weight, None, layer.stride, layer.padding, layer.dilation)


def _convolve_of(layer: torch.nn.Module) -> Callable[..., torch.Tensor]:
    return F.conv2d if isinstance(layer, torch.nn.Conv2d) else F.conv3d


def _own_output(layer: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the layer's output without those of hooks; its own `forward` knows how its weights are stored."""
    if isinstance(layer, AdaptableLinear):
        return torch.nn.Linear.forward(layer, inputs)
    output: torch.Tensor = layer.forward(inputs)
    return output


def _without_bias(layer: Any, output: torch.Tensor) -> torch.Tensor:
    return output if layer.bias is None else output - _across(layer, layer.bias.to(output.dtype))


def _across(layer: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Return values of each input or output in a shape that fits those of the layer."""
    kernel: tuple[int, ...] = getattr(layer, "kernel_size", ())
    return values.reshape(-1, *(1 for _ in kernel))
