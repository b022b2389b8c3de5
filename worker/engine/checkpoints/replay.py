"""Repeats the steps of a checkpoint in a new call of the pipeline, without their forwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.scheduler_state import SchedulerState
from worker.engine.checkpoints.trees import tensors_of, unpack, zeros_of
from worker.engine.fusion.stacking import map_tensors


class ReplayFailed(Exception):
    """The call of the pipeline does not do what it did before the checkpoint."""


class Replay:
    """Answers the first `calls` of denoisers and control nets, and the first `steps` of noise schedulers."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self._state = checkpoint.state
        self._device = device
        self.calls = len(self._state["calls"])
        self.steps = len(self._state["steps"])

    def output(self, at: int, method: str) -> Any:
        """Return zeros in the form of the output of call `at`."""
        recorded, form = self._state["calls"][at]
        if recorded != method:
            raise ReplayFailed(f"call {at} is of {method}, and was of {recorded}")
        return zeros_of(self._state["forms"][form], self._device)

    def step(self, at: int, scheduler: SchedulerState, output: Any) -> Any:
        """Return what step `at` returned, as far as the checkpoint has it; `output` is what zeros led to."""
        if self._state["steps"][at] != scheduler.number:
            raise ReplayFailed(f"step {at} is of scheduler {scheduler.number}, and was of another one")
        own = self._state["schedulers"][scheduler.number]
        if own["last_step"] == at:
            scheduler.restore(own["attributes"], self.checkpoint.tensors, self._device)
        kept = self._state["outputs"].get(str(at))
        if kept is None:
            return output
        values = [None if one is None else unpack(one, self.checkpoint.tensors, self._device) for one in kept]
        likes = list(tensors_of(output))
        if len(values) != len(likes) or not all(map(_fits, values, likes)):
            raise ReplayFailed(f"step {at} of {type(scheduler.scheduler).__name__} returns other shapes")
        left: Iterator[torch.Tensor | None] = iter(values)
        return map_tensors(output, lambda like: _in_place_of(like, next(left)))

    @property
    def predicted(self) -> torch.Tensor | None:
        """The predicted latents of the last step, if they were still to be compared with those of other candidates."""
        packed = self._state.get("predicted")
        values: torch.Tensor | None = None if packed is None else unpack(packed, self.checkpoint.tensors, self._device)
        return values

    def restore_rng(self, calls: int, generators: Sequence[Any]) -> None:
        """Set the states of the random generators after the last step, before which there were `calls`."""
        if calls != self.calls:
            raise ReplayFailed(f"there are {calls} calls before the last step, and were {self.calls}")
        states = unpack(self._state["generators"], self.checkpoint.tensors, torch.device("cpu"))
        if len(states) != len(generators):
            raise ReplayFailed("there are other random generators")
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _fits(value: torch.Tensor | None, like: torch.Tensor) -> bool:
    return value is None or (value.shape, value.dtype) == (like.shape, like.dtype)


def _in_place_of(like: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor of a checkpoint, on the device of the one that zeros led to; that one if there is none."""
    return like if value is None else value.to(like.device)
