"""Step caching: skipped calls of a denoiser are answered from the image task's own earlier outputs.

The schedule decides by step indexes only, and an answer reads only the image's own tensors: neither depends on batch
mates, and both are the same in each run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from shared.config.step_schedules import StepSchedule, computed_steps, weights
from worker.engine.fusion.module_proxy import ParkedCall
from worker.engine.fusion.stacking import map_tensors

MAX_BRANCHES = 8
"""Calls of one step with kept outputs: two for guidance by separate calls; more calls are computed each time."""


class StepProgress(Protocol):
    """The progress of the present loop over steps: `step` counts since the image began, `loop_start` is its first."""

    step: int
    loop_start: int
    loop_steps: int


class _KeptOutput(NamedTuple):
    step: int
    tensors: list[torch.Tensor]


class _Branch(NamedTuple):
    """A call's place in its step, such as guidance's second call: equal for calls that continue each other.

    `inputs` are the tensors of the sample.
    """

    key: Hashable
    inputs: list[torch.Tensor]


class StepCache:
    """The schedule and the computed outputs of one image task, at most three of each branch."""

    def __init__(self, schedule: StepSchedule, progress: StepProgress) -> None:
        self.skipped = 0
        self._schedule = schedule
        self._progress = progress
        self._loop: tuple[int, int] | None = None
        self._step = -1
        self._computed: frozenset[int] = frozenset()
        self._last_needed = 0  # the last step that is skipped
        self._calls: dict[str, int] = {}  # of the present step, by method
        self._kept: dict[Hashable, deque[_KeptOutput]] = {}
        self._forms: dict[Hashable, Any] = {}  # outputs without their values
        self._answered_all = False

    @property
    def nbytes(self) -> int:
        """Memory of the kept outputs; can be read on any thread."""
        kept = [output for outputs in list(self._kept.values()) for output in list(outputs)]
        return sum(tensor.nbytes for output in kept for tensor in output.tensors)

    def answer(self, call: ParkedCall, compute: Callable[[ParkedCall], Any]) -> Any:
        """Return the output of a denoiser's call: that of `compute`, unless it is skipped."""
        self._follow_progress()
        branch = self._branch(call)
        output = self._extrapolate(branch)
        if output is None:
            output = compute(call)
            self._keep(branch, output)
        return output

    def _branch(self, call: ParkedCall) -> _Branch:
        method = call.shared_method.name
        place = self._calls.get(method, 0)
        self._calls[method] = place + 1
        inputs = _tensors(_sample(call))
        return _Branch((method, place, *(tensor.shape for tensor in inputs)), inputs)

    def _extrapolate(self, branch: _Branch) -> Any | None:
        """Return the output of a call that is skipped; None if it must be computed."""
        kept = self._kept.get(branch.key, ())
        wanted = self._schedule.order.outputs
        if self._step in self._computed or len(kept) < wanted:
            self._note(answered=False)
            return None
        used = list(kept)[-wanted:]
        factors = weights([output.step for output in used], self._step)
        values = [_weighted(column, factors) for column in zip(*(output.tensors for output in used), strict=True)]
        if self._adds_to(branch.inputs, values):
            values = [value + tensor.float() for value, tensor in zip(values, branch.inputs, strict=True)]
        left = iter(values)
        self._note(answered=True)
        return map_tensors(self._forms[branch.key], lambda like: next(left).to(like.dtype))

    def _keep(self, branch: _Branch, output: Any) -> None:
        """Keep what a computed call returned, if a later step can follow from it."""
        if self._step >= self._last_needed or (branch.key not in self._kept and len(self._kept) >= MAX_BRANCHES):
            return
        tensors = _tensors(output)
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            return
        # Contiguous float32 copies: pipelines change outputs in place, and equal layouts give equal bits.
        values = [
            tensor.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format) for tensor in tensors
        ]
        if self._adds_to(branch.inputs, values):
            for value, tensor in zip(values, branch.inputs, strict=True):
                value -= tensor
        kept = self._kept.setdefault(branch.key, deque(maxlen=self._schedule.order.outputs))
        kept.append(_KeptOutput(self._step, values))
        self._forms[branch.key] = map_tensors(output, lambda tensor: tensor.new_empty(0))

    def release(self) -> None:
        """Free the kept outputs."""
        self._kept.clear()
        self._forms.clear()

    def _follow_progress(self) -> None:
        progress = self._progress
        loop = (progress.loop_start, progress.loop_steps)
        if loop != self._loop:
            self._loop, self._step = loop, -1
            self._computed = frozenset(computed_steps(progress.loop_steps, self._schedule))
            skipped = set(range(progress.loop_steps)) - self._computed
            self._last_needed = max(skipped, default=0)
            self.release()
        step = progress.step - progress.loop_start
        if step != self._step:
            self._step, self._calls, self._answered_all = step, {}, False
            self._drop_ended_branches()

    def _drop_ended_branches(self) -> None:
        """Free branches without a call in the last computed step, such as those of a first denoiser."""
        last = max((step for step in self._computed if step < self._step), default=-1)
        for key in [key for key, kept in self._kept.items() if kept[-1].step < last or self._step > self._last_needed]:
            del self._kept[key], self._forms[key]

    def _note(self, *, answered: bool) -> None:
        """Count steps in which every call is answered."""
        first = sum(self._calls.values()) == 1
        if answered and first:
            self._answered_all = True
            self.skipped += 1
        elif not answered and self._answered_all:
            self._answered_all = False
            self.skipped -= 1

    def _adds_to(self, inputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
        """Return whether residuals are kept: outputs of another form than the input have none."""
        if self._schedule.of != "residual" or len(inputs) != len(values):
            return False
        return all(tensor.shape == value.shape for tensor, value in zip(inputs, values, strict=True))


def _sample(call: ParkedCall) -> Any:
    """Return the argument that has the rows; without rules the first one."""
    if call.shared_method.stacker is not None:
        return call.arguments[call.shared_method.stacker.rules.rows]
    return next(iter((*call.args, *call.kwargs.values())), None)


def _weighted(tensors: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
    # Products and sums one by one: a fused multiply-add rounds otherwise, on some devices and for some lengths only.
    total = tensors[0] * factors[0]
    for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
        total = total + tensor * factor
    return total


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, collect)
    return found
