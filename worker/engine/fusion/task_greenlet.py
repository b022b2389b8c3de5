"""The greenlets of image tasks, and the trampoline that enters them.

A greenlet has its own part of its thread's C stack; above its first frame is the stack of the code that started it.
torch's C++ errors record a backtrace, which walks over that first frame. If the code above is another one by then, or
at another depth, the walk reads as return addresses what other calls left there, and a segmentation fault can end the
process. So one frame, at the bottom of the engine's thread, starts and continues all greenlets: the trampoline. Above
them is always the same stack.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import greenlet

if TYPE_CHECKING:
    import torch

    from worker.engine.fusion.step_caching import StepCache


class StepRecord(Protocol):
    """Records calls of denoisers and control nets, and steps of noise schedulers, or answers them itself."""

    in_step: bool

    def answer(self, method: str, compute: Callable[[], Any]) -> Any: ...

    def step(self, scheduler: Any, run: Callable[[], Any]) -> Any: ...

    def keep_predicted(self, latents: torch.Tensor | None) -> torch.Tensor | None: ...

    def settle(self) -> None: ...

    def forget(self) -> None: ...


class ScoredStep(NamedTuple):
    """What a candidate parks with after a step at which only `left` go on: its score, None without a finite one."""

    step: int
    left: int
    score: float | None


class TaskGreenlet(greenlet.greenlet):
    """The greenlet of an image task. `step_cache` can answer its denoiser calls, and so can `record`.

    `on_step` sees each step of a noise scheduler before it is taken: the scheduler, the output, the time, the sample.
    """

    def __init__(
        self, body: Callable[[], None], step_cache: StepCache | None, record: StepRecord | None = None
    ) -> None:
        current = greenlet.getcurrent()
        super().__init__(lambda _: body(), current if current.parent is None else current.parent)
        self.gr_context = contextvars.copy_context()
        self.step_cache = step_cache
        self.record = record
        self.on_step: Callable[[Any, Any, Any, Any], None] | None = None

    def enter(self, value: object = None) -> Any:
        """Run until the task parks, and return what it parks with; None if it ends.

        The task starts, or its `park` returns `value`, or raises it if it is an exception.
        """
        trampoline = greenlet.getcurrent().parent
        return self.switch(value) if trampoline is None else trampoline.switch((self, value))


def current_task() -> TaskGreenlet | None:
    current = greenlet.getcurrent()
    return current if isinstance(current, TaskGreenlet) else None


def park(value: object) -> Any:
    """Return `value` to the code that entered the current task, and wait until the task is entered again."""
    parent = greenlet.getcurrent().parent
    if parent is None:
        raise RuntimeError("only an image task can park")
    answer = parent.switch(value)
    # Raised here: `greenlet.throw` enters by other C frames than `switch`.
    if isinstance(answer, BaseException):
        raise answer
    return answer


def run_on_trampoline(body: Callable[[], None]) -> None:
    """Run `body` in a greenlet; this call's frame starts and continues all image tasks that `body` enters."""
    scheduler = greenlet.greenlet(lambda _: body())
    scheduler.gr_context = contextvars.copy_context()
    entered: greenlet.greenlet = scheduler
    value: Any = None
    while True:
        result = entered.switch(value)
        if entered is not scheduler:
            entered, value = scheduler, result
        elif scheduler.dead:
            return
        else:
            entered, value = result
