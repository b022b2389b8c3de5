"""Weights of LoHa, LoKr and DoRA for single layers, and the changes that LyCORIS' published formulas make of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny.lora import State

Parts = State
Maker = Callable[[torch.nn.Module, torch.Generator], tuple[Parts, torch.Tensor]]
"""Returns the tensors of a layer by part, and the change of its weight without the scale by alpha."""

RANK = 2


def loha(layer: torch.nn.Module, rng: torch.Generator) -> tuple[Parts, torch.Tensor]:
    weight = _weight(layer)
    halves = [_pair(weight.shape[0], weight[0].numel(), rng) for _ in range(2)]
    (a, b), (c, d) = halves
    parts = {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d}
    return parts, ((a @ b) * (c @ d)).reshape(weight.shape)


def loha_with_cores(layer: torch.nn.Module, rng: torch.Generator) -> tuple[Parts, torch.Tensor]:
    """The form for convolutions with kernels; other layers have none."""
    weight = _weight(layer)
    kernel = weight.shape[2:]
    if kernel.numel() == 1:
        return loha(layer, rng)
    parts: Parts = {}
    change = torch.ones(())
    for at in (1, 2):
        part, one = _with_core(weight.shape[0], weight.shape[1], kernel, rng)
        parts |= {f"hada_w{at}_a": part[0], f"hada_w{at}_b": part[1], f"hada_t{at}": part[2]}
        change = change * one
    return parts, change


def lokr(layer: torch.nn.Module, rng: torch.Generator) -> tuple[Parts, torch.Tensor]:
    """Two whole matrices, whose alpha does not count."""
    out_l, out_k, in_m, in_n, kernel = _factors(layer)
    w1, w2 = _randn(rng, out_l, in_m), _randn(rng, out_k, in_n, *kernel)
    return {"lokr_w1": w1, "lokr_w2": w2}, _kron(w1, w2)


def lokr_of_halves(layer: torch.nn.Module, rng: torch.Generator) -> tuple[Parts, torch.Tensor]:
    """Both matrices as products."""
    out_l, out_k, in_m, in_n, kernel = _factors(layer)
    (a, b), (c, d) = _pair(out_l, in_m, rng), _pair(out_k, in_n * kernel.numel(), rng)
    parts = {"lokr_w1_a": a, "lokr_w1_b": b, "lokr_w2_a": c, "lokr_w2_b": d}
    return parts, _kron(a @ b, (c @ d).reshape(out_k, in_n, *kernel))


def lokr_with_core(layer: torch.nn.Module, rng: torch.Generator) -> tuple[Parts, torch.Tensor]:
    out_l, out_k, in_m, in_n, kernel = _factors(layer)
    if kernel.numel() == 1:
        return lokr_of_halves(layer, rng)
    w1 = _randn(rng, out_l, in_m)
    (a, b, core), w2 = _with_core(out_k, in_n, kernel, rng)
    return {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b, "lokr_t2": core}, _kron(w1, w2)


def low_rank(layer: torch.nn.Module, rng: torch.Generator) -> tuple[Parts, torch.Tensor]:
    weight = _weight(layer)
    up, down = _pair(weight.shape[0], weight[0].numel(), rng)
    parts = {
        "lora_up.weight": up.reshape(*up.shape, *(1 for _ in weight.shape[2:])),
        "lora_down.weight": down.reshape(-1, *weight.shape[1:]),
    }
    return parts, (up @ down).reshape(weight.shape)


def low_rank_with_core(layer: torch.nn.Module, rng: torch.Generator) -> tuple[Parts, torch.Tensor]:
    weight = _weight(layer)
    kernel = weight.shape[2:]
    if kernel.numel() == 1:
        return low_rank(layer, rng)
    (up, down, core), change = _with_core(weight.shape[0], weight.shape[1], kernel, rng)
    ones = [1 for _ in kernel]
    up, down = up.T.reshape(-1, RANK, *ones).contiguous(), down.reshape(RANK, -1, *ones)
    return {"lora_up.weight": up, "lora_down.weight": down, "lora_mid.weight": core}, change


def norms(weight: torch.Tensor, rng: torch.Generator, *, of_inputs: bool = False) -> torch.Tensor:
    """Return the `dora_scale` of a layer with norms near those of its weight."""
    across = weight.transpose(0, 1) if of_inputs else weight
    own = across.flatten(1).norm(dim=1) * (0.5 + torch.rand(across.shape[0], generator=rng))
    shaped = own.reshape(-1, *(1 for _ in weight.shape[1:]))
    return (shaped.transpose(0, 1) if of_inputs else shaped).contiguous()


def decomposed(weight: torch.Tensor, scale: torch.Tensor, *, of_inputs: bool = False) -> torch.Tensor:
    """Return a weight with the norms of a `dora_scale`, by LyCORIS' formula."""
    dims = [0, *range(2, weight.dim())] if of_inputs else list(range(1, weight.dim()))
    return weight * (scale / torch.linalg.vector_norm(weight, dim=dims, keepdim=True))


def _weight(layer: torch.nn.Module) -> torch.Tensor:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def _randn(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=rng) * 0.3


def _pair(outputs: int, columns: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return _randn(rng, outputs, RANK), _randn(rng, RANK, columns)


def _with_core(
    outputs: int, inputs: int, kernel: torch.Size, rng: torch.Generator
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    a, b, core = _randn(rng, RANK, outputs), _randn(rng, RANK, inputs), _randn(rng, RANK, RANK, *kernel)
    return (a, b, core), torch.einsum("i j ..., i p, j r -> p r ...", core, a, b).contiguous()


def _factors(layer: torch.nn.Module) -> tuple[int, int, int, int, torch.Size]:
    outputs, inputs, *kernel = _weight(layer).shape
    left = [next(one for one in (4, 2, 1) if size % one == 0) for size in (outputs, inputs)]
    return left[0], outputs // left[0], left[1], inputs // left[1], torch.Size(kernel)


def _kron(w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return torch.kron(w1.reshape(*w1.shape, *(1 for _ in w2.shape[2:])), w2)
