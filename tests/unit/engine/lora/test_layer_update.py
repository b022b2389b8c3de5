"""Updates of single layers: what they add to the outputs of rows, their memory, and their weights at a scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from worker.engine.lora.applying import add_update
from worker.engine.lora.layer_update import Hadamard, Kronecker, LayerUpdate, Magnitude, added_up, at_scale
from worker.engine.lora.per_row import AdapterKey, RowAdapters

KEY: AdapterKey = (("one", 1.0),)
LAYERS: dict[str, tuple[torch.nn.Module, tuple[int, ...]]] = {
    "linear": (torch.nn.Linear(6, 4), (3, 5, 6)),
    "convolution": (torch.nn.Conv2d(6, 4, 3, stride=2, padding=1), (3, 6, 5, 7)),
    "volumes": (torch.nn.Conv3d(6, 4, (1, 3, 2), dilation=(1, 1, 2)), (3, 6, 2, 5, 6)),
}
ROWS = torch.tensor([3, 1, 6, 5])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def update_of(kind: str, kernel: int) -> tuple[LayerUpdate, torch.Tensor]:
    """Return an update of a layer with 6 inputs and 4 outputs, and the matrix [out, in * kernel] that it is."""
    if kind.startswith("hadamard"):
        rank = 1 if kind == "hadamard of low rank" else 3
        up, down = randn(4, rank), randn(rank, 6 * kernel)
        up_2, down_2 = randn(4, rank, seed=1), randn(rank, 6 * kernel, seed=2)
        matrix = (up @ down) * (up_2 @ down_2)
        return LayerUpdate(None, None, products=(Hadamard(up, down, up_2, down_2),)), matrix
    halves = kind == "kronecker of halves"
    left = (randn(2, 3), randn(2, 2, seed=1)) if halves else (randn(2, 3),)
    right = (randn(1, 2 * kernel, seed=2), randn(2, 1, seed=3)) if halves else (randn(2, 2 * kernel, seed=2),)
    if kind == "rows of a kronecker":
        left = (randn(4, 3),)
        product = Kronecker(left, right, rows=ROWS)
        return LayerUpdate(None, None, products=(product,)), torch.kron(left[0], right[0])[ROWS]
    whole = [one[1] @ one[0] if halves else one[0] for one in (left, right)]
    return LayerUpdate(None, None, products=(Kronecker(left, right),)), torch.kron(*whole)


def assert_second_row_has_weight(layer: Any, inputs: torch.Tensor, update: LayerUpdate, weight: torch.Tensor) -> None:
    """Check one of three rows against a layer of this weight, and the others against the plain layer."""
    module = torch.nn.Sequential(layer)
    plain, original = module(inputs), layer.weight.detach().clone()
    adapters = RowAdapters(module)
    adapters.per_row = True
    adapters.attach(KEY, {"0": update})
    with adapters.applied([(), KEY, ()], [1, 1, 1], merge=True):
        mixed = module(inputs)
    with adapters.applied([KEY], [3], merge=True):
        whole = module(inputs)
    adapters.detach(KEY)
    layer.weight.copy_(weight.reshape(original.shape))
    expected = module(inputs)
    layer.weight.copy_(original)
    torch.testing.assert_close(mixed, torch.stack([plain[0], expected[1], plain[2]]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=1e-4)


KINDS = ["hadamard", "hadamard of low rank", "kronecker", "kronecker of halves", "rows of a kronecker"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_product_is_added_to_its_rows(name: str, kind: str) -> None:
    layer, shape = LAYERS[name]
    weight = layer.weight.flatten(1)
    update, matrix = update_of(kind, weight.shape[1] // 6)
    halved = at_scale(update, 0.5, lambda: weight)
    assert_second_row_has_weight(layer, randn(*shape), halved, weight + 0.5 * matrix)


@pytest.mark.parametrize("interpolated", [True, False])
@pytest.mark.parametrize("of_inputs", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_weights_of_rows_get_the_norms_of_a_dora(name: str, kind: str, of_inputs: bool, interpolated: bool) -> None:
    """At the scale of a job: all of the change of scale 1 times the scale, or the norms of the scaled change."""
    layer, shape = LAYERS[name]
    weight = layer.weight.detach()
    update, matrix = update_of(kind, weight[0].numel() // 6)
    norms = randn(6 if of_inputs else 4).abs() + 0.5
    across = norms.reshape(1 if of_inputs else 4, 6 if of_inputs else 1, 1)

    def decomposed(scale: float) -> torch.Tensor:
        changed = (weight.flatten(1) + scale * matrix).reshape(4, 6, -1)
        return across * changed / torch.linalg.vector_norm(changed, dim=(0, 2) if of_inputs else (1, 2), keepdim=True)

    whole = weight.reshape(4, 6, -1)
    expected = whole + 0.5 * (decomposed(1.0) - whole) if interpolated else decomposed(0.5)
    with_norms = LayerUpdate(None, None, None, update.products, magnitude=Magnitude(norms, of_inputs, interpolated))
    assert_second_row_has_weight(layer, randn(*shape), at_scale(with_norms, 0.5, lambda: weight), expected)


class Products(TorchDispatchMode):
    """Counts products of matrices whose result has this shape."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and tuple(result.shape) == self.shape:
            self.count += 1
        return result


@torch.no_grad()
def test_weights_of_a_hadamard_product_are_computed_once_for_a_forward() -> None:
    """Two for the calls with it, which another one is between: each call is applied by itself."""
    module = torch.nn.Sequential(LAYERS["linear"][0])
    update, _ = update_of("hadamard", 1)
    adapters = RowAdapters(module)
    adapters.per_row = True
    adapters.attach(KEY, {"0": update})
    with Products((4, 6)) as products, adapters.applied([KEY, KEY, (), KEY], [1, 2, 1, 1], merge=False):
        module(randn(10, 5, 6))
    assert products.count == 2


class LargestResult(TorchDispatchMode):
    """Records the most values that an operator has returned."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.values = max(self.values, result.numel())
        return result


# [out, in] of the left matrix and of the right one
OUTER = {"rows": ((1, 48), (64, 1)), "columns": ((64, 1), (1, 48)), "equal": ((8, 6), (8, 8))}


@pytest.mark.parametrize("shapes", OUTER.values(), ids=OUTER)
@pytest.mark.parametrize("kernel", [None, 1, 3])
@torch.no_grad()
def test_a_kronecker_product_takes_about_the_memory_of_its_layer(
    kernel: int | None, shapes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """Of its two orders one can have [inputs x outputs] values in between for each token."""
    layer = torch.nn.Linear(48, 64) if kernel is None else torch.nn.Conv2d(48, 64, kernel, padding=kernel // 2)
    inputs = randn(2, 25, 48) if kernel is None else randn(2, 48, 5, 5)
    (out, across), (out_2, across_2) = shapes
    left, right = randn(out, across), randn(out_2, across_2 * (kernel or 1) ** 2, seed=1)
    update = LayerUpdate(None, None, products=(Kronecker((left,), (right,)),))
    output = torch.zeros_like(layer(inputs))
    with LargestResult() as largest:
        add_update(layer, [(inputs, output)], update)
    assert largest.values <= 2 * 25 * 64
    layer.weight.copy_(torch.kron(left, right).reshape(layer.weight.shape))
    layer.bias.zero_()
    torch.testing.assert_close(output, layer(inputs), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_sum_of_updates_is_added_to_a_layer_of_compiled_blocks() -> None:
    layer = torch.nn.Linear(6, 4)
    module = torch.nn.Sequential(layer)
    adapters = RowAdapters(module)
    adapters.prepare_for_compiler([module])
    inputs, weight, bias = randn(3, 5, 6), layer.weight.detach(), layer.bias.detach()
    product, matrix = update_of("kronecker", 1)
    low_rank = LayerUpdate(randn(2, 6), randn(4, 2), randn(4))
    gains = LayerUpdate(None, None, gain=randn(4), input_gain=randn(6))
    adapters.attach(KEY, {"0": added_up([product, low_rank, gains])})
    plain = module(inputs)
    with adapters.applied([(), KEY, ()], [1, 1, 1], merge=True):
        mixed = module(inputs)
    assert low_rank.up is not None
    assert low_rank.down is not None
    assert low_rank.bias is not None
    assert gains.gain is not None
    changed = weight + matrix + low_rank.up @ low_rank.down + gains.gain[:, None] * weight + weight * gains.input_gain
    expected = torch.nn.functional.linear(inputs[1], changed, bias + low_rank.bias)
    torch.testing.assert_close(mixed, torch.stack([plain[0], expected, plain[2]]), atol=1e-5, rtol=1e-4)


def low_rank_matrix(update: LayerUpdate) -> torch.Tensor:
    assert update.up is not None
    assert update.down is not None
    return update.up @ update.down


def wide_update(kind: str) -> LayerUpdate:
    """Return an update of a layer with 32 inputs and 600 outputs."""
    if kind == "low rank":
        return LayerUpdate(randn(4, 32), randn(600, 4, seed=1))
    if kind == "hadamard":
        product = Hadamard(randn(600, 2), randn(2, 32), randn(600, 3, seed=1), randn(3, 32, seed=2))
        return LayerUpdate(None, None, products=(product,))
    rows = torch.randperm(1200, generator=torch.Generator().manual_seed(1))[:600]
    return LayerUpdate(None, None, products=(Kronecker((randn(40, 4),), (randn(2, 8), randn(30, 2)), rows=rows),))


@pytest.mark.parametrize("of_inputs", [True, False])
@pytest.mark.parametrize("kind", ["low rank", "hadamard", "kronecker"])
@torch.no_grad()
def test_norms_of_a_dora_are_computed_in_pieces(kind: str, of_inputs: bool) -> None:
    """None is as large as the layer, whose weights are in its own dtype; there are pauses between them."""
    update, weight = wide_update(kind), randn(600, 32, seed=9).bfloat16()
    norms, pauses = randn(32 if of_inputs else 600).abs() + 0.5, []
    with_norms = replace(update, magnitude=Magnitude(norms, of_inputs, interpolated=False))
    with LargestResult() as largest:
        changed = at_scale(with_norms, 1.0, lambda: weight, lambda: pauses.append(1))
    assert largest.values < 600 * 32 / 2
    assert len(pauses) == 3
    matrix = update.products[0].weight() if update.products else low_rank_matrix(update)
    whole = weight.double() + matrix.double()
    expected = norms / torch.linalg.vector_norm(whole, dim=0 if of_inputs else 1) - 1
    gain = changed.input_gain if of_inputs else changed.gain
    assert gain is not None
    torch.testing.assert_close(gain.double(), expected, atol=1e-5, rtol=1e-5)


@given(*(st.integers(1, 64) for _ in range(4)))
def test_a_kronecker_product_takes_at_most_the_time_of_its_layer(out: int, across: int, out_2: int, inner: int) -> None:
    """In products of numbers for each token, above the one that the inputs and outputs take anyway."""
    product = Kronecker((torch.empty(out, across),), (torch.empty(out_2, inner),))
    inputs, outputs = across * inner, out * out_2
    if product.is_right_first(inputs):
        between, work = across * out_2, across * out_2 * (inner + out)
    else:
        between, work = inner * out, inner * out * (across + out_2)
    assert between**2 <= inputs * outputs
    assert work <= inputs * outputs + inputs + outputs


@pytest.mark.parametrize(("rank", "is_divided"), [(1, True), (2, False)])
def test_a_hadamard_product_is_divided_where_that_takes_less_work(rank: int, is_divided: bool) -> None:
    """A rank of 1 makes 1 x (4 + 6) products for each token, of 2 4 x (4 + 6), and the whole matrix 4 x 6."""
    product = Hadamard(randn(4, rank), randn(rank, 6), randn(4, rank, seed=1), randn(rank, 6, seed=2))
    halves = product.halves()
    assert (halves is not None) == is_divided
    if halves is not None:
        torch.testing.assert_close(halves[1] @ halves[0], product.weight())


def test_a_product_takes_the_memory_of_its_factors() -> None:
    update, _ = update_of("kronecker of halves", 1)
    assert update.nbytes == 4 * (6 + 4 + 2 + 2)
    assert update.rank == 2
    doubled = update.converted(lambda tensor: tensor.double())
    assert doubled.nbytes == 2 * update.nbytes
