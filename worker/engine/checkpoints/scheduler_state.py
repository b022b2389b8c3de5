"""The state of a noise scheduler: the attributes that its steps have changed, and what its last step returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from worker.engine.checkpoints.trees import Json, NotStorable, pack, unpack

_CONFIGURATION = "_internal_dict"
_IMMUTABLE = (bool, int, float, str, type(None), torch.dtype, torch.device)


class SchedulerState:
    """A noise scheduler of an image task; `number` counts them in the order of their first steps.

    `attributes` are those after its last step, `output` is a copy of what that returned, and `loop` the number of the
    step that began its loop.
    """

    def __init__(self, scheduler: Any, number: int) -> None:
        self.scheduler = scheduler
        self.number = number
        self.last_step: int | None = None
        self.loop = 0
        self.output: Any = None
        self.attributes = _copied(scheduler)
        self._before = self.attributes
        tensors = {name: value for name, value in self._before.items() if isinstance(value, torch.Tensor)}
        self._versions = {name: _version(value) for name, value in tensors.items()}

    def note(self, at: int, loop: int, output: Any) -> None:
        """Keep the state after step `at`."""
        self.last_step, self.loop, self.output = at, loop, output
        self.attributes = _copied(self.scheduler)

    def changed(self) -> dict[str, Any]:
        """Return the attributes that differ from those before the first step."""
        return {name: value for name, value in self.attributes.items() if not self._is_as_before(name, value)}

    def restore(self, packed: Json, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Set the attributes to those before the first step, but for the packed ones."""
        own = vars(self.scheduler)
        for name in [name for name in own if name not in self._before and name != _CONFIGURATION]:
            del own[name]
        own |= {name: list(value) if type(value) is list else value for name, value in self._before.items()}
        own |= {name: unpack(value, tensors, device) for name, value in packed.items()}

    def _is_as_before(self, name: str, value: Any) -> bool:
        if name not in self._before:
            return False
        before = self._before[name]
        if isinstance(value, torch.Tensor):
            return value is before and _version(value) == self._versions[name]
        if isinstance(value, _IMMUTABLE):
            return type(value) is type(before) and value == before
        # What it has by then changed inside, such as a generator of noise, is not known.
        return value is before and not isinstance(value, dict | set) and callable(value)


def packed_states(states: Iterable[SchedulerState], tensors: MutableMapping[str, torch.Tensor]) -> list[Json]:
    """Return the last step and the changed attributes of each noise scheduler, its tensors in `tensors`."""
    packed = []
    for state in sorted(states, key=lambda one: one.number):
        prefix = f"scheduler.{state.number}"
        attributes = {name: pack(value, f"{prefix}.{name}", tensors) for name, value in state.changed().items()}
        missing = [name for name in state._before if name not in state.attributes]
        if missing:
            raise NotStorable(f"{type(state.scheduler).__name__} without its {missing[0]}")
        packed.append({"last_step": state.last_step, "attributes": attributes})
    return packed


def _copied(scheduler: Any) -> dict[str, Any]:
    """Return the attributes, with copies of lists; steps replace other values, and their tensors."""
    return {
        name: list(value) if type(value) is list else value
        for name, value in vars(scheduler).items()
        if name != _CONFIGURATION
    }


def _version(tensor: torch.Tensor) -> int:
    """Return the number of changes in place; 0 for a tensor of the inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version
