"""The update of one layer by adapters, in a form that takes about the memory of the files that it is from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.engine.lora.pacing import Pace, no_pace, paced

Convert = Callable[[torch.Tensor], torch.Tensor]

_ALL = slice(None)
_PIECE = 256
"""Outputs of a layer whose changed weights are computed at once, for their norms. They stay in the processor's cache:
3072 x 12288 weights at rank 16 take 0.05 s, and 0.23 s at once."""


@dataclass(frozen=True)
class Hadamard:
    """The product, element by element, of two matrices, each `up` of `down`: a LoHa.

    An `up` is [out, rank], a `down` [rank, in * kernel].
    """

    up: torch.Tensor
    down: torch.Tensor
    up_2: torch.Tensor
    down_2: torch.Tensor

    def weight(self, rows: slice = _ALL) -> torch.Tensor:
        """Return [out, in * kernel] for some outputs."""
        return (self.up[rows] @ self.down).mul_(self.up_2[rows] @ self.down_2)

    def halves(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `down` and `up` whose product it is, of the product of both ranks; None if that takes longer."""
        outputs, columns = self.up.shape[0], self.down.shape[1]
        if self.down.shape[0] * self.down_2.shape[0] * (outputs + columns) >= outputs * columns:
            return None
        down = self.down[:, None] * self.down_2
        return down.flatten(0, 1), (self.up[:, :, None] * self.up_2[:, None]).flatten(1)

    def scaled(self, scale: float) -> Hadamard:
        return replace(self, up=self.up * scale)

    def with_gains(self, of_outputs: torch.Tensor | None, of_inputs: torch.Tensor | None) -> Hadamard:
        up = self.up if of_outputs is None else self.up * of_outputs[:, None]
        down = self.down if of_inputs is None else _times_inputs(self.down, of_inputs)
        return replace(self, up=up, down=down)

    @property
    def rank(self) -> int:
        return max(self.down.shape[0], self.down_2.shape[0])


@dataclass(frozen=True)
class Kronecker:
    """The Kronecker product of two matrices: a LoKr.

    Each is one tensor [out, in] or the two whose product it is, that of the inputs first. `right` is [out, in *
    kernel]. `rows` are the outputs that the layer has, by default all of them. `gain` is [out] and `input_gain` [in].
    """

    left: tuple[torch.Tensor, ...]
    right: tuple[torch.Tensor, ...]
    rows: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    input_gain: torch.Tensor | None = None

    def weight(self, rows: slice = _ALL) -> torch.Tensor:
        """Return [out, in * kernel] for some outputs."""
        left, right = _product(self.left), _product(self.right)
        across = right.shape[0]
        wanted = torch.arange(left.shape[0] * across) if self.rows is None else self.rows
        at = wanted[rows]
        return (left[at // across][:, :, None] * right[at % across][:, None]).flatten(1)

    def joined(self) -> Kronecker:
        """Return the same product with each factor as one tensor."""
        return replace(self, left=(_product(self.left),), right=(_product(self.right),))

    def scaled(self, scale: float) -> Kronecker:
        return replace(self, left=(*self.left[:-1], self.left[-1] * scale))

    def with_gains(self, of_outputs: torch.Tensor | None, of_inputs: torch.Tensor | None) -> Kronecker:
        return replace(self, gain=of_outputs, input_gain=of_inputs)

    def is_right_first(self, inputs: int) -> bool:
        """Return whether `right` first leaves less in between, for each token of so many inputs.

        The smaller one has at most as many values as the geometric mean of the inputs and outputs, the other one up to
        their product.
        """
        across = self.left[0].shape[1]
        return across * self.right[-1].shape[0] <= inputs // across * self.left[-1].shape[0]

    @property
    def rank(self) -> int:
        """The rank of the factors that have one, else 1."""
        return max((first.shape[0] for first, *rest in (self.left, self.right) if rest), default=1)


Product = Hadamard | Kronecker


@dataclass(frozen=True)
class Magnitude:
    """The norms of a layer's changed weights, for each output or each input: a DoRA.

    With `interpolated`, an adapter of scale s changes the weights s times as much as one of scale 1, as other services
    apply LyCORIS' files. Without, the weights get the norms after they have been changed at the scale, as in PEFT.
    """

    norms: torch.Tensor
    of_inputs: bool
    interpolated: bool


@dataclass(frozen=True)
class LayerUpdate:
    """Update of one layer: `up` of `down` of its input, that of the `products`, and `bias`, are added to its output.

    `down` is [rank, in, *kernel], `up` [out, rank, *ones] including all scales, `bias` [out]. An update without a low
    rank has neither. Also added are the layer's output without its bias, times `gain` [out], and the same for its input
    times `input_gain` [in]. A `magnitude` is that of a file: `at_scale` makes gains of it.
    """

    down: torch.Tensor | None
    up: torch.Tensor | None
    bias: torch.Tensor | None = None
    products: tuple[Product, ...] = ()
    gain: torch.Tensor | None = None
    input_gain: torch.Tensor | None = None
    magnitude: Magnitude | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self))

    @property
    def rank(self) -> int:
        """The highest rank of its parts."""
        low_rank = 0 if self.down is None else self.down.shape[0]
        return max(low_rank, *(product.rank for product in self.products), 0)

    def converted(self, convert: Convert) -> LayerUpdate:
        """Return the update with each of its tensors converted."""
        update: LayerUpdate = _converted(self, convert)
        return update


Changes = Mapping[str, Mapping[str, LayerUpdate]]
"""Updates by component and path of the layer in it."""


def at_scale(
    update: LayerUpdate, scale: float, weight: Callable[[], torch.Tensor], pace: Pace = no_pace
) -> LayerUpdate:
    """Return an update of a file for an adapter of a scale; `weight` returns that of the layer."""
    magnitude = update.magnitude
    if magnitude is None:
        return _scaled(update, scale)
    if magnitude.interpolated:
        return _scaled(_decomposed(update, magnitude, weight(), pace), scale)
    return _decomposed(_scaled(update, scale), magnitude, weight(), pace)


def _scaled(update: LayerUpdate, scale: float) -> LayerUpdate:
    return replace(
        update,
        up=_times(update.up, scale),
        bias=_times(update.bias, scale),
        gain=_times(update.gain, scale),
        input_gain=_times(update.input_gain, scale),
        products=tuple(product.scaled(scale) for product in update.products),
    )


def _times(tensor: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    return None if tensor is None else tensor * factor


def _decomposed(update: LayerUpdate, magnitude: Magnitude, weight: torch.Tensor, pace: Pace) -> LayerUpdate:
    """Return the update that gives the changed weights of a layer the norms of `magnitude`."""
    norms = _norms(update, weight, magnitude.of_inputs, pace)
    factors = magnitude.norms / (norms + torch.finfo(norms.dtype).eps)
    of_outputs, of_inputs = (None, factors) if magnitude.of_inputs else (factors, None)
    down, up = update.down, update.up
    if down is not None and of_inputs is not None:
        down = _times_inputs(down.flatten(1), of_inputs).reshape(down.shape)
    if up is not None and of_outputs is not None:
        up = up * of_outputs.reshape(-1, *(1 for _ in up.shape[1:]))
    return replace(
        update,
        down=down,
        up=up,
        products=tuple(product.with_gains(of_outputs, of_inputs) for product in update.products),
        gain=None if of_outputs is None else of_outputs - 1,
        input_gain=None if of_inputs is None else of_inputs - 1,
        magnitude=None,
    )


def _norms(update: LayerUpdate, weight: torch.Tensor, of_inputs: bool, pace: Pace) -> torch.Tensor:
    """Return the norms of a layer's changed weights, for each output or each input."""
    products = [one.joined() if isinstance(one, Kronecker) else one for one in update.products]
    pieces = []
    for start in paced(range(0, weight.shape[0], _PIECE), pace):
        rows = slice(start, start + _PIECE)
        changed = weight[rows].to(torch.float32).flatten(1)
        for product in products:
            changed = changed + product.weight(rows)
        if update.down is not None and update.up is not None:
            changed = torch.addmm(changed, update.up[rows].flatten(1), update.down.flatten(1))
        pieces.append(changed.square().sum(0) if of_inputs else torch.linalg.vector_norm(changed, dim=1))
    if not of_inputs:
        return torch.cat(pieces)
    return torch.stack(pieces).sum(0).reshape(weight.shape[1], -1).sum(1).sqrt()


def added_up(updates: Sequence[LayerUpdate]) -> LayerUpdate:
    """Return the sum of updates of one layer; their ranks add up."""
    downs = [update.down for update in updates if update.down is not None]
    ups = [update.up for update in updates if update.up is not None]
    return LayerUpdate(
        torch.cat(downs) if downs else None,
        torch.cat(ups, dim=1) if ups else None,
        _sum([update.bias for update in updates]),
        tuple(product for update in updates for product in update.products),
        _sum([update.gain for update in updates]),
        _sum([update.input_gain for update in updates]),
    )


def _sum(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(given).sum(0) if given else None


def _product(factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return factors[0] if len(factors) == 1 else factors[1] @ factors[0]


def _times_inputs(down: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return [rank, in * kernel] with the weights of each input times its gain."""
    return (down.reshape(down.shape[0], gain.shape[0], -1) * gain[:, None]).flatten(1)


def _converted(value: Any, convert: Convert) -> Any:
    """Return an update, or a value of one, with each tensor in it converted."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, tuple):
        return tuple(_converted(item, convert) for item in value)
    if isinstance(value, LayerUpdate | Hadamard | Kronecker):
        return type(value)(**{name: _converted(item, convert) for name, item in vars(value).items()})
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an update, or of a value of one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, LayerUpdate | Hadamard | Kronecker):
        for item in vars(value).values():
            yield from _tensors(item)
