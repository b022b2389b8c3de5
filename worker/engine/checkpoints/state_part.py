"""Parts of an image's state: references to what the pipeline and its noise schedulers hold, or copies on the host.

So checkpoints take no memory of the device: what nothing but a part refers to is copied to the host and freed.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from worker.engine.checkpoints.trees import Json, pack, tensors_of


class StatePart:
    """A value of the state; the names of its tensors in a checkpoint begin with `name`."""

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value
        self._copied: tuple[Json, dict[str, torch.Tensor]] | None = None

    def copy_to_host(self) -> None:
        """Replace the value by a copy, for which nothing waits; raises `NotStorable`."""
        if self._copied is None:
            self._copied, self._value = self._copy(), None

    def pack(self, tensors: MutableMapping[str, torch.Tensor]) -> Json:
        """Return JSON of the value, and put copies of its tensors into `tensors`; raises `NotStorable`."""
        packed, copies = self._copied or self._copy()
        tensors.update(copies)
        return packed

    def _copy(self) -> tuple[Json, dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        packed = pack(self._value, self._name, tensors)
        return packed, {name: _on_host(tensor) for name, tensor in tensors.items()}


class _ReturnedTensor:
    """A tensor that a step returned: the pipeline's own, a copy of it on the host, or none once it is let go."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name = name
        self._owned = TensorWeakRef(tensor)
        self._version = None if tensor.is_inference() else tensor._version
        self._refer_to(tensor)

    def _refer_to(self, tensor: torch.Tensor) -> None:
        # An alias has the memory of the tensor and counts its changes, but is not what the pipeline refers to.
        self._alias: torch.Tensor | None = tensor.detach()
        self.part: StatePart | None = StatePart(self._name, self._alias)

    @property
    def is_changed(self) -> bool:
        """Whether the pipeline has changed the tensor in place; True in the inference mode, which counts no changes."""
        tensor = self._owned() if self._alias is None else self._alias
        return self._version is None or (tensor is not None and tensor._version != self._version)

    @property
    def is_lost(self) -> bool:
        """Whether the tensor was changed before it was copied."""
        return self._alias is not None and self.is_changed

    def copy_to_host(self) -> None:
        if self.part is not None:
            self.part.copy_to_host()
        self._alias = None

    def settle(self, *, is_sample: bool, keeps_copy: bool) -> None:
        """Hold what the pipeline does: its tensor if that has not changed; a sample that it no longer has is copied."""
        tensor = self._owned()
        if tensor is None and is_sample:
            self.copy_to_host()
        elif tensor is None:
            self.part = self._alias = None
        elif not keeps_copy and not self.is_changed:
            self._refer_to(tensor)


class StepOutput:
    """What step `at` of a noise scheduler returned: the pipeline's own tensors while it does not change them.

    The first is the sample. Others, such as the predicted image, are let go when the pipeline does: at most it has
    computed something from them.
    """

    def __init__(self, at: int, output: Any) -> None:
        named = ((f"output.{at}.{number}", tensor) for number, tensor in enumerate(tensors_of(output)))
        self._tensors = [_ReturnedTensor(name, tensor) for name, tensor in named]
        self._fault: str | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the pipeline has changed a tensor in place."""
        return any(one.is_changed for one in self._tensors)

    @property
    def fault(self) -> str | None:
        """Why the step has no checkpoint, None if it can have one."""
        changed = any(one.is_lost for one in self._tensors)
        return "a step's output that its pipeline has changed in place" if changed else self._fault

    def settle(self, *, keeps_copies: bool) -> None:
        """Free what only this refers to; called when the pipeline has run on to its next call.

        Copies of tensors that the pipeline still has are freed too, unless it `keeps_copies`.
        """
        self._drop_lost()
        try:
            for number, one in enumerate(self._tensors):
                one.settle(is_sample=number == 0, keeps_copy=keeps_copies)
        except Exception as error:  # of a type that no file holds, or without memory
            self._fault, self._tensors = f"a step's output that cannot be copied: {type(error).__name__}", []

    def copy_to_host(self) -> None:
        """Replace the tensors by copies, which no longer change; raises `NotStorable`."""
        self._drop_lost()
        for one in self._tensors:
            one.copy_to_host()

    def _drop_lost(self) -> None:
        self._fault = self.fault
        if self._fault is not None:
            self._tensors = []

    def pack(self, tensors: MutableMapping[str, torch.Tensor]) -> Json:
        """Return JSON of the tensors, null for one that is let go, and put copies of the others into `tensors`."""
        return [None if one.part is None else one.part.pack(tensors) for one in self._tensors]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; a GPU makes it in the order of its work."""
    if tensor.device.type != "cuda":
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
