"""The record of an image task: what its steps returned, to continue them in another engine.

The pipeline's call cannot be continued in its middle, so it is repeated: calls of denoisers and control nets before the
checkpoint return zeros without a forward, and the noise scheduler's last step returns what it did, with its attributes
and the states of the random generators as they were. The pipeline's own code between them runs as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, Protocol

import torch

from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.replay import Replay
from worker.engine.checkpoints.scheduler_state import SchedulerState
from worker.engine.checkpoints.state_part import StatePart, StepOutput
from worker.engine.checkpoints.trees import Json, NotStorable, form_of
from worker.engine.fusion.rng_state import generators
from worker.engine.fusion.task_greenlet import current_task


class StepProgress(Protocol):
    """The progress of the present loop over steps: `step` counts since the image began, `loop_start` is its first.

    `loop_steps` are those of the loop, 0 if they are not known.
    """

    step: int
    loop_start: int
    loop_steps: int

    @property
    def total(self) -> int: ...


class TaskRecord:
    """Records the steps of one image task, and first repeats those of `checkpoint`.

    Between two calls of the pipeline it holds no tensor of the device that the pipeline does not hold: the state after
    a step is references to it, which are copied to the host when a checkpoint is taken. A pipeline can change in place
    what a step returned. Whether it does so shows after the first step of a loop, so that step's output is copied at
    once; then those of all steps are, or that of the last one, after which the pipeline's code is another.
    """

    def __init__(self, device: torch.device, progress: StepProgress, checkpoint: Checkpoint | None = None) -> None:
        self._device = device
        self._progress = progress
        self._replay = None if checkpoint is None else Replay(checkpoint, device)
        self._resumed_steps: int | None = 0 if checkpoint is None else None
        self.in_step = False
        self._begin()

    def _begin(self) -> None:
        self._generator: torch.Generator | None = None
        self._fault: str | None = None
        self._forms: list[Json] = []
        self._calls: list[tuple[str, int]] = []  # the method and the form's number
        self._steps: list[int] = []  # the scheduler's number
        self._schedulers: dict[int, SchedulerState] = {}  # by id
        self._loop_ends: dict[int, StepOutput] = {}  # of the last steps of earlier loops, by the step's number
        self._changes_outputs = False
        self._calls_before_step = 0
        self._rng: list[torch.Tensor] = []
        self._predicted: StatePart | None = None  # of a candidate, by its last step

    def use_generator(self, generator: torch.Generator | None) -> None:
        """Keep the state of the generator of the pipeline's call."""
        self._generator = generator

    def end(self) -> None:
        """Let go of the noise schedulers, as the pipeline's call has ended; its last step can have a checkpoint."""
        for state in self._schedulers.values():
            with suppress(Exception):  # of what cannot be stored, which `take` reports
                state.end()

    def forget(self) -> None:
        """Let go of everything but the figures, as the image does not continue."""
        self._replay = None
        self._begin()

    def restart(self) -> None:
        """Forget the checkpoint, which the pipeline's call did not follow: the image starts anew."""
        self._replay, self._resumed_steps = None, 0
        self._begin()

    @property
    def replaying(self) -> bool:
        """Whether no forward has been computed yet that follows the checkpoint."""
        return self._resumed_steps is None

    @property
    def replayed(self) -> Checkpoint | None:
        """The checkpoint that the image continues from, while it replays."""
        return self._replay.checkpoint if self._replay is not None and self.replaying else None

    @property
    def resumed_steps(self) -> int:
        """The steps that were not computed again."""
        return self._progress.step if self._resumed_steps is None else self._resumed_steps

    def answer(self, method: str, compute: Callable[[], Any]) -> Any:
        """Return the output of a call of a denoiser or control net, which `compute` returns."""
        at = len(self._calls)
        if self._replay is not None and at < self._replay.calls:
            output = self._replay.output(at, method)
        else:
            if self._resumed_steps is None:
                self._resumed_steps = self._progress.step
            if self._replay is not None and len(self._steps) >= self._replay.steps:
                self._replay = None  # all of it has been repeated
            output = compute()
        self._calls.append((method, self._number_of_form(output)))
        return output

    def keep_predicted(self, latents: torch.Tensor | None) -> torch.Tensor | None:
        """Keep a copy of the latents that a candidate's denoiser predicts in the next step, and return them.

        In a replay they are those of the checkpoint: its denoiser's outputs are zeros.
        """
        if self._replay is not None and len(self._steps) < self._replay.steps:
            latents = self._replay.predicted
        self._predicted = None if latents is None else StatePart("predicted", latents)
        if self._predicted is not None:
            with suppress(Exception):  # `take` copies it again, and reports why it cannot
                self._predicted.copy_to_host()
        return latents

    def step(self, scheduler: Any, run: Callable[[], Any]) -> Any:
        """Return the output of a noise scheduler's step, which `run` returns."""
        state = self._schedulers.get(id(scheduler))
        if state is None:
            state = self._schedulers[id(scheduler)] = SchedulerState(scheduler, len(self._schedulers))
        loop = self._progress.loop_start
        begins = state.last_step is None or state.loop != loop
        if begins and state.last_step is not None and state.output is not None:
            with suppress(Exception):
                state.output.copy_to_host()
            self._loop_ends[state.last_step] = state.output
        state.begin_step()
        self.in_step = True
        try:
            output, at = run(), len(self._steps)
        finally:
            self.in_step = False
        self._steps.append(state.number)
        if self._replay is not None and at < self._replay.steps:
            output = self._replay.step(at, state, output)
            if at == self._replay.steps - 1:
                self._replay.restore_rng(len(self._calls), self._generators())
        ends = self._progress.step + 1 >= loop + self._progress.loop_steps
        state.end_step(at, loop, output, loop_ended=ends)
        if begins or ends or self._changes_outputs:
            with suppress(Exception):  # of what cannot be stored, which `take` reports
                state.copy_to_host()
        self._calls_before_step = len(self._calls)
        self._rng = [generator.get_state() for generator in self._generators()]
        return output

    def settle(self) -> None:
        """Free what only the record refers to; called when the image task has run on to its next call, or ended."""
        for state in self._schedulers.values():
            if state.output is not None:
                self._changes_outputs |= state.output.is_changed
                state.output.settle(keeps_copies=state.loop_ended)

    def take(self) -> Checkpoint | None:
        """Return the checkpoint of the last step, None before the first one; raises `NotStorable`.

        Its tensors are copied to the host without waiting for the device.
        """
        if not self._steps and self._progress.step:
            raise NotStorable("steps without a noise scheduler, in its pipeline's own code")
        if not self._steps:
            return None
        if self._fault is not None:
            raise NotStorable(self._fault)
        outputs = self._outputs()
        if fault := next((output.fault for output in outputs.values() if output.fault is not None), None):
            raise NotStorable(fault)
        tensors: dict[str, torch.Tensor] = {}
        state = {
            "forms": list(self._forms),
            "calls": [list(call) for call in self._calls[: self._calls_before_step]],
            "steps": list(self._steps),
            "outputs": {str(at): output.pack(tensors) for at, output in outputs.items()},
            "schedulers": [one.pack(tensors) for one in self._schedulers.values()],
            "generators": StatePart("generators", list(self._rng)).pack(tensors),
        }
        if self._predicted is not None:
            state["predicted"] = self._predicted.pack(tensors)
        return Checkpoint(self._progress.step, self._progress.total, state, tensors, _end_of_work(self._device))

    def _outputs(self) -> dict[int, StepOutput]:
        """Return what steps returned that a replay repeats, by the steps' numbers."""
        last = {one.last_step: one.output for one in self._schedulers.values()}
        return self._loop_ends | {at: output for at, output in last.items() if at is not None and output is not None}

    def _generators(self) -> list[Any]:
        own = [] if self._generator is None else [self._generator]
        return [*own, *generators(self._device)]

    def _number_of_form(self, output: Any) -> int:
        try:
            form = form_of(output)
        except NotStorable as error:
            self._fault = str(error)
            return -1
        if form not in self._forms:
            self._forms.append(form)
        return self._forms.index(form)


def _end_of_work(device: torch.device) -> Any:
    """Return the event after all copies to the host so far; None where they are made at once."""
    if device.type != "cuda":
        return None
    event: Any = torch.cuda.Event
    ready = event()
    ready.record()
    return ready


def record_steps(scheduler: Any) -> None:
    """Let the steps of noise schedulers of this class be recorded by the image tasks that run them.

    Its class is changed, once: pipelines compare the types of their schedulers, and copy them.
    """
    own: Any = type(scheduler)
    plain = getattr(own, "step", None)
    if plain is not None and not hasattr(plain, "plain"):
        own.step = _recorded(plain)


def _named_first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the output, the time and the sample of a step; None for one that is not given."""
    given = {**dict(zip(("model_output", "timestep", "sample"), args, strict=False)), **kwargs}
    return given.get("model_output"), given.get("timestep"), given.get("sample")


def _recorded(plain: Any) -> Any:
    @wraps(plain)  # pipelines look for `eta` and `generator` in its signature
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = current_task()
        record = None if task is None else task.record
        if task is not None and task.on_step is not None:
            task.on_step(self, *_named_first(args, kwargs))
        if record is None or record.in_step:  # the step of a class can call that of its base
            return plain(self, *args, **kwargs)
        return record.step(self, lambda: plain(self, *args, **kwargs))

    marked: Any = step
    marked.plain = plain
    return marked
