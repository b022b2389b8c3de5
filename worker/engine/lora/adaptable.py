"""Linear layers of compiled blocks, with adapters that the compiler does not see.

A compiler traces a forward hook into its graph, so that other adapters would need another graph, and new hooks would
be ignored. Here a graph calls one operator for the hooks of a layer, with the layer's number as a tensor.
"""

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle


class RunningForward(Protocol):
    """The running forward; `adapted`: whether a row has adapters."""

    adapted: bool


class AdaptableLinear(torch.nn.Linear):
    """A linear layer with forward hooks that change the output in place, in forwards with adapters only."""

    running: RunningForward
    number: torch.Tensor
    updates: OrderedDict[int, Callable[..., Any]]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        if self.running.adapted:
            add_adapters(output, inputs, self.number)
        return output

    def register_forward_hook(self, hook: Callable[..., Any], **_options: Any) -> RemovableHandle:
        handle = RemovableHandle(self.updates)
        self.updates[handle.id] = hook
        return handle


_NUMBERS = itertools.count()
_LAYERS: weakref.WeakValueDictionary[int, AdaptableLinear] = weakref.WeakValueDictionary()


def make_adaptable(layer: torch.nn.Linear, running: RunningForward) -> None:
    """Make a linear layer an adaptable one, with the same weights."""
    layer.__class__ = AdaptableLinear
    assert isinstance(layer, AdaptableLinear)
    number = next(_NUMBERS)
    layer.running, layer.number, layer.updates = running, torch.tensor(number), OrderedDict()
    _LAYERS[number] = layer


@torch.library.custom_op("fusequeue::add_adapters", mutates_args=("output",))
def add_adapters(output: torch.Tensor, inputs: torch.Tensor, number: torch.Tensor) -> None:
    """Run the hooks of the layer with this number."""
    layer = _LAYERS[int(number.item())]
    for update in layer.updates.values():
        update(layer, (inputs,), output)
