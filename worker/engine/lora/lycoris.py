"""Weights of a file that are no low-rank matrices: products of LoHa and LoKr, and the norms of a DoRA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shared.errors import AdapterUnavailable
from shared.inputs.lycoris_shapes import MAGNITUDE, MAX_OUTPUTS, Size, by_layer, product_sizes
from worker.engine.lora.layer_update import Hadamard, Kronecker, Magnitude, Product
from worker.engine.lora.peft_patterns import value_of

Tensors = Mapping[str, torch.Tensor]

_PEFT_ALPHA = 8.0  # PEFT's default of LoHa and LoKr, and its rank


@dataclass(frozen=True)
class FileWeights:
    """The weights of a file by kind: `lora` by name, `products` by layer and part, `magnitudes` by layer.

    Layers have the names of the file. `alphas` and `sizes` are those of `products`, `outputs` the numbers of outputs of
    all layers that have products or magnitudes.
    """

    lora: Tensors
    products: Mapping[str, Tensors]
    sizes: Mapping[str, Size]
    alphas: Mapping[str, float]
    magnitudes: Mapping[str, Magnitude]
    outputs: Mapping[str, int]


def separate(weights: Tensors) -> FileWeights:
    """Return the weights of a file by kind; raises `AdapterUnavailable` for tensors that do not fit each other."""
    named = by_layer(weights)
    try:
        sizes = product_sizes({name: tensor.shape for name, tensor in weights.items()})
    except ValueError as error:
        raise AdapterUnavailable(str(error)) from None
    products = {layer: {part: weights[name].float() for part, name in names.items()} for layer, names in named.items()}
    alphas = {layer: float(weights[f"{layer}.alpha"]) for layer in products if f"{layer}.alpha" in weights}
    magnitudes = {
        match["layer"]: _magnitude(match["kind"], tensor)
        for name, tensor in weights.items()
        if (match := MAGNITUDE.fullmatch(name)) is not None
    }
    taken = {name for names in named.values() for name in names.values()} | {f"{layer}.alpha" for layer in alphas}
    lora = {name: tensor for name, tensor in weights.items() if name not in taken and MAGNITUDE.fullmatch(name) is None}
    outputs = {layer: size.outputs for layer, size in sizes.items()}
    outputs |= {layer: _lora_outputs(layer, lora) for layer in magnitudes if layer not in outputs}
    return FileWeights(lora, products, sizes, alphas, magnitudes, outputs)


def _magnitude(kind: str, tensor: torch.Tensor) -> Magnitude:
    by_lycoris = kind == "dora_scale"  # [out, 1, ...], or by an older setting [1, in, ...]
    of_inputs = by_lycoris and tensor.dim() > 1 and tensor.shape[0] == 1 and tensor.shape[1] > 1
    return Magnitude(tensor.float().flatten(), of_inputs, interpolated=by_lycoris)


def without_cores(weights: Tensors, layers: Iterable[str]) -> Tensors:
    """Return the weights with the `lora_mid` of convolutions multiplied into their `lora_down`; `layers` have one.

    The cores of other layers are left out.
    """
    result = {name: tensor for name, tensor in weights.items() if not name.endswith(".lora_mid.weight")}
    for layer in layers:
        down = f"{layer}.lora_down.weight"
        core = weights[f"{layer}.lora_mid.weight"].float()
        result[down] = torch.einsum("ij...,jr->ir...", core, weights[down].flatten(1).float())
    return result


def _lora_outputs(layer: str, lora: Tensors) -> int:
    for end in ("lora_up.weight", "lora_B.weight", "lora.up.weight", "lora_linear_layer.up.weight"):
        if (up := lora.get(f"{layer}.{end}")) is not None:
            if up.shape[0] > MAX_OUTPUTS:
                raise AdapterUnavailable(f"{layer} has {up.shape[0]} outputs; at most {MAX_OUTPUTS} are allowed")
            return up.shape[0]
    raise AdapterUnavailable(f"{layer} has norms of a DoRA and no weights that they are for")


def product_of(
    parts: Tensors, alpha: float | None, rows: torch.Tensor, path: str, settings: Mapping[str, Any]
) -> Product:
    """Return a layer's product; `rows` are its outputs that the layer has, `settings` PEFT's for the adapter."""
    scale = _scale(parts, alpha, path, settings)
    if "hada_w1_a" in parts:
        (up, down), (up_2, down_2) = (_halves(parts, f"hada_w{at}", f"hada_t{at}") for at in (1, 2))
        return Hadamard(up[rows] * scale, down, up_2[rows], down_2)
    left, right = _factors(parts, "lokr_w1"), _factors(parts, "lokr_w2", "lokr_t2")
    return _with_rows(Kronecker(left, right).scaled(scale), rows)


def _scale(parts: Tensors, alpha: float | None, path: str, settings: Mapping[str, Any]) -> float:
    if settings:
        alpha = value_of(settings, "alpha_pattern", path, settings.get("alpha", _PEFT_ALPHA))
        rank = value_of(settings, "rank_pattern", path, settings.get("r", _PEFT_ALPHA))
        return float(alpha) / float(rank)
    inner = next((parts[name] for name in ("hada_w1_b", "lokr_w2_b", "lokr_w1_b") if name in parts), None)
    return 1.0 if alpha is None or inner is None else alpha / inner.shape[0]


def _halves(parts: Tensors, part: str, core: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [out, rank] and [rank, in * kernel]."""
    up, down, middle = parts[f"{part}_a"], parts[f"{part}_b"], parts.get(core)
    if middle is None:
        return up, down
    return up.T, torch.einsum("ij...,jr->ir...", middle, down).flatten(1)


def _factors(parts: Tensors, part: str, core: str = "") -> tuple[torch.Tensor, ...]:
    if part in parts:
        return (parts[part].flatten(1),)
    up, down = _halves(parts, part, core)
    outputs, rank, columns = *up.shape, down.shape[1]
    # With a high rank the halves take more than their product, of memory and of each token's time.
    return (up @ down,) if rank * (outputs + columns) >= outputs * columns else (down, up)


def _with_rows(product: Kronecker, rows: torch.Tensor) -> Kronecker:
    """Return a product with some of its outputs; what is computed are those of whole rows of `left`."""
    across = product.right[-1].shape[0]
    blocks = torch.unique(rows // across)
    left = (*product.left[:-1], product.left[-1][blocks])
    if len(blocks) == 1:
        return replace(product, left=left, right=(*product.right[:-1], product.right[-1][rows % across]))
    within = torch.searchsorted(blocks, rows // across) * across + rows % across
    if torch.equal(within, torch.arange(len(blocks) * across)):
        return replace(product, left=left)
    return replace(product, left=left, rows=within)


def rows_of(magnitude: Magnitude, rows: torch.Tensor, outputs: int, layer: str) -> Magnitude:
    """Return the norms of a layer that has `rows` of the `outputs` that the file has as one."""
    if not magnitude.of_inputs:
        if magnitude.norms.shape[0] != outputs:
            raise AdapterUnavailable(f"the norms of {layer} are {magnitude.norms.shape[0]}, but its outputs {outputs}")
        return replace(magnitude, norms=magnitude.norms[rows])
    if len(rows) != outputs:
        raise AdapterUnavailable(
            f"the DoRA of {layer} has norms of inputs, for several layers of the model at once; they cannot be divided"
        )
    return magnitude
