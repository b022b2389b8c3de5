"""The record of an image task: what its steps returned, to continue them in another engine.

The pipeline's call cannot be continued in its middle, so it is repeated: calls of denoisers and control nets before the
checkpoint return zeros without a forward, and the noise scheduler's last step returns what it did, with its attributes
and the states of the random generators as they were. The pipeline's own code between them runs as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol

import torch

from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.replay import Replay
from worker.engine.checkpoints.scheduler_state import SchedulerState, packed_states
from worker.engine.checkpoints.trees import Json, NotStorable, form_of, pack, tensors_of
from worker.engine.fusion.rng_state import generators
from worker.engine.fusion.stacking import map_tensors
from worker.engine.fusion.task_greenlet import current_task


class StepProgress(Protocol):
    """The progress of the present loop over steps: `step` counts since the image began, `loop_start` is its first."""

    step: int
    loop_start: int

    @property
    def total(self) -> int: ...


class TaskRecord:
    """Records the steps of one image task, and first repeats those of `checkpoint`."""

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
        self._loop_ends: dict[int, Any] = {}  # outputs of the last steps of earlier loops, by the step's number
        self._calls_before_step = 0
        self._rng: list[torch.Tensor] = []
        self._predicted: torch.Tensor | None = None  # of a candidate, by its last step

    def use_generator(self, generator: torch.Generator | None) -> None:
        """Keep the state of the generator of the pipeline's call."""
        self._generator = generator

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
            output = compute()
        self._calls.append((method, self._number_of_form(output)))
        return output

    def keep_predicted(self, latents: torch.Tensor | None) -> torch.Tensor | None:
        """Keep the latents that a candidate's denoiser predicts in the next step, and return them.

        In a replay they are those of the checkpoint: its denoiser's outputs are zeros.
        """
        replays = self._replay is not None and len(self._steps) < self._replay.steps
        self._predicted = self._replay.predicted if self._replay is not None and replays else latents
        return self._predicted

    def step(self, scheduler: Any, run: Callable[[], Any]) -> Any:
        """Return the output of a noise scheduler's step, which `run` returns."""
        state = self._schedulers.get(id(scheduler))
        if state is None:
            state = self._schedulers[id(scheduler)] = SchedulerState(scheduler, len(self._schedulers))
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
        loop = self._progress.loop_start
        if state.last_step is not None and state.loop != loop:
            self._loop_ends[state.last_step] = state.output
        state.note(at, loop, map_tensors(output, torch.clone))
        self._calls_before_step = len(self._calls)
        self._rng = [generator.get_state() for generator in self._generators()]
        return output

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
        tensors: dict[str, torch.Tensor] = {}
        outputs = self._loop_ends | {one.last_step: one.output for one in self._schedulers.values()}
        state = {
            "forms": list(self._forms),
            "calls": [list(call) for call in self._calls[: self._calls_before_step]],
            "steps": list(self._steps),
            "outputs": {
                str(at): pack(list(tensors_of(output)), f"output.{at}", tensors) for at, output in outputs.items()
            },
            "schedulers": packed_states(self._schedulers.values(), tensors),
            "generators": pack(list(self._rng), "generators", tensors),
        }
        if self._predicted is not None:
            state["predicted"] = pack(self._predicted, "predicted", tensors)
        host, ready = _to_host(tensors)
        return Checkpoint(self._progress.step, self._progress.total, state, host, ready)

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


def _to_host(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Any]:
    """Return copies on the host, and the event after which they may be read; None if they can be at once."""
    copies, uses_device = {}, False
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
            continue
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies[name].copy_(tensor, non_blocking=True)
        uses_device = True
    if not uses_device:
        return copies, None
    event: Any = torch.cuda.Event
    ready = event()
    ready.record()
    return copies, ready


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
