"""Products that are read from the tensors of a file: the matrices they are, what their factors hold, their bounds."""

from __future__ import annotations

import contextlib

import pytest
import torch

from shared.errors import AdapterUnavailable
from worker.engine.lora.fitting import check_rank
from worker.engine.lora.layer_update import Hadamard, Kronecker, LayerUpdate
from worker.engine.lora.lycoris import product_of

OUTPUTS = torch.arange(24)


def tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


@pytest.mark.parametrize(("rank", "values"), [(2, 4 * 3 + 2 * 6 + 2 * 8), (4, 4 * 3 + 6 * 8), (100, 4 * 3 + 6 * 8)])
def test_halves_of_a_high_rank_are_one_matrix(rank: int, values: int) -> None:
    """What a token needs in between has as many values as the rank."""
    parts = tensors(lokr_w1=(4, 3), lokr_w2_a=(6, rank), lokr_w2_b=(rank, 8))
    product = product_of(parts, None, OUTPUTS, "x", {})
    assert isinstance(product, Kronecker)
    assert sum(factor.numel() for factor in (*product.left, *product.right)) == values
    expected = torch.kron(parts["lokr_w1"], parts["lokr_w2_a"] @ parts["lokr_w2_b"])
    torch.testing.assert_close(product.weight(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("left", "right"), [((1, 3), (24, 8)), ((4, 3), (6, 8))])
def test_rows_within_one_of_the_left_matrix_take_only_those_of_the_right_one(
    left: tuple[int, int], right: tuple[int, int]
) -> None:
    parts, rows = tensors(lokr_w1=left, lokr_w2=right), OUTPUTS[7:10]
    product = product_of(parts, None, rows, "x", {})
    assert isinstance(product, Kronecker)
    assert (product.left[-1].shape[0], product.right[-1].shape[0], product.rows) == (1, 3, None)
    torch.testing.assert_close(product.weight(), torch.kron(parts["lokr_w1"], parts["lokr_w2"])[rows])


def loha(rank: int) -> Hadamard:
    return Hadamard(torch.ones(4, 1), torch.ones(1, 6), torch.ones(4, rank), torch.ones(rank, 6))


@pytest.mark.parametrize(
    ("update", "refusal"),
    [
        (LayerUpdate(None, None, products=(loha(128),)), None),
        (LayerUpdate(None, None, products=(loha(129),)), r"its rank for unet\.x is 129; at most 128 is allowed"),
        (LayerUpdate(torch.ones(512, 6), torch.ones(4, 512)), None),
        (LayerUpdate(torch.ones(513, 6), torch.ones(4, 513)), "is 513; at most 512 is allowed"),
    ],
)
def test_ranks_of_uploads_are_bounded_by_their_form(update: LayerUpdate, refusal: str | None) -> None:
    with contextlib.nullcontext() if refusal is None else pytest.raises(AdapterUnavailable, match=refusal):
        check_rank({"unet": {"x": update}})
