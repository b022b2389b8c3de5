"""The state of a noise scheduler: the attributes that its steps have changed, and what its last step returned."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from worker.engine.checkpoints.state_part import StatePart, StepOutput
from worker.engine.checkpoints.trees import Json, NotStorable, unpack

_CONFIGURATION = "_internal_dict"
_IMMUTABLE = (bool, int, float, str, type(None), torch.dtype, torch.device)


class SchedulerState:
    """A noise scheduler of an image task; `number` counts them in the order of their first steps.

    `output` is what its last step returned, `loop` the number of the step that began its loop, and `loop_ended` whether
    the last step was that of the loop.
    """

    def __init__(self, scheduler: Any, number: int) -> None:
        self.scheduler = scheduler
        self.number = number
        self.last_step: int | None = None
        self.loop = 0
        self.loop_ended = False
        self.output: StepOutput | None = None
        self._before = _attributes(scheduler)
        self._after: dict[str, Any] = {}
        self._parts: dict[str, StatePart] | None = None  # the changed attributes, once they are copied
        tensors = {name: value for name, value in self._before.items() if isinstance(value, torch.Tensor)}
        self._versions = {name: _version(value) for name, value in tensors.items()}

    def begin_step(self) -> None:
        """Free the state after the last step, which that of the next one replaces."""
        self.output, self._after, self._parts = None, {}, None

    def end_step(self, at: int, loop: int, output: Any, *, loop_ended: bool) -> None:
        """Keep the state after step `at`."""
        self.last_step, self.loop, self.loop_ended = at, loop, loop_ended
        self.output, self._after = StepOutput(at, output), _attributes(self.scheduler)

    def end(self) -> None:
        """Copy the state and let go of the noise scheduler; raises `NotStorable`."""
        self.loop_ended = True
        try:
            self.copy_to_host()
        finally:
            self.scheduler, self._before, self._after = None, {}, {}

    def copy_to_host(self) -> None:
        """Replace what the last step returned by copies, after a loop also the attributes; raises `NotStorable`."""
        if self.output is not None:
            self.output.copy_to_host()
        # Steps replace attributes and do not change them, but the next loop can reset them.
        if not self.loop_ended or self._parts is not None:
            return
        parts = self._changed()
        for part in parts.values():
            part.copy_to_host()
        self._parts, self._after = parts, {}

    def pack(self, tensors: MutableMapping[str, torch.Tensor]) -> Json:
        """Return JSON of the last step and the changed attributes, and put copies of their tensors into `tensors`."""
        parts = self._changed() if self._parts is None else self._parts
        attributes = {name: part.pack(tensors) for name, part in parts.items()}
        return {"last_step": self.last_step, "attributes": attributes}

    def _changed(self) -> dict[str, StatePart]:
        """Return the attributes that differ from those before the first step."""
        if missing := [name for name in self._before if name not in self._after]:
            raise NotStorable(f"{type(self.scheduler).__name__} without its {missing[0]}")
        changed = {name: value for name, value in self._after.items() if not self._is_as_before(name, value)}
        return {name: StatePart(f"scheduler.{self.number}.{name}", value) for name, value in changed.items()}

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


def _attributes(scheduler: Any) -> dict[str, Any]:
    """Return the attributes, with copies of lists; steps replace other values, and their tensors."""
    return {
        name: list(value) if type(value) is list else value
        for name, value in vars(scheduler).items()
        if name != _CONFIGURATION
    }


def _version(tensor: torch.Tensor) -> int:
    """Return the number of changes in place; 0 for a tensor of the inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version
