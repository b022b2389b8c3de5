"""An image task: one image or video being generated, in a greenlet of the engine's thread.

Its greenlet runs the pipeline's unmodified call with a batch of one. At a module proxy it parks with the call's
arguments; `resume` continues it with its rows of the output.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import greenlet
import structlog
import torch

from shared.errors import JobError, OutOfMemory
from worker.engine.errors import as_job_error
from worker.engine.fusion.module_proxy import ParkedCall, SharedMethod
from worker.engine.fusion.private_changes import Change, ModuleWatch, put_on
from worker.engine.fusion.rng_state import RngState
from worker.engine.fusion.step_caching import StepCache
from worker.engine.fusion.task_greenlet import ScoredStep, StepRecord, TaskGreenlet
from worker.engine.lora.per_row import AdapterKey

log = structlog.get_logger()


class ImageTask:
    """The greenlet of one image, and the call at which it is parked, or the step at which a candidate waits.

    `adapter` applies to its rows; `step_cache` answers its skipped calls, and `record` keeps its steps. Its changes of
    modules that `watch` sees are on them only for its own code and calls. `result` is what `body` returned, `error` why
    it failed; both are None while it runs and after `abort`.
    """

    def __init__(
        self,
        body: Callable[[], Any],
        adapter: AdapterKey = (),
        watch: ModuleWatch | None = None,
        step_cache: StepCache | None = None,
        record: StepRecord | None = None,
    ) -> None:
        self.step_cache = step_cache
        self._record = record
        self.parked_call: ParkedCall | None = None
        self.scored_step: ScoredStep | None = None
        self.result: Any = None
        self.error: JobError | None = None
        self._body = body
        self._adapter = adapter
        self._aborted = False
        self._solo_methods: set[SharedMethod] = set()
        self._watch = watch
        self._changes: Sequence[Change] = ()
        self._autocast: torch.dtype | None = None
        self._rng_state: AbstractContextManager[None] = nullcontext()
        self._greenlet: TaskGreenlet | None = None

    @property
    def started(self) -> bool:
        return self._greenlet is not None

    @property
    def done(self) -> bool:
        return self._aborted or (self._greenlet is not None and self._greenlet.dead)

    def start(self, device: torch.device) -> None:
        """Run up to the first parked call."""
        self._greenlet = TaskGreenlet(self._run, self.step_cache, self._record)
        self._rng_state = RngState(device)
        self._switch(device, self._greenlet)

    def resume(self, device: torch.device, output_or_error: Any = None) -> None:
        """Continue from the parked call up to the next one. The call returns the output, or raises a `JobError`.

        A candidate continues from its scored step.
        """
        if self._greenlet is None:
            raise RuntimeError("the image task has not started")
        self.parked_call = self.scored_step = None
        self._switch(device, self._greenlet, output_or_error)

    def run_solo(self, shared_method: SharedMethod) -> None:
        """Share no more forwards of a method: they fail with this task's calls."""
        self._solo_methods.add(shared_method)

    def abort(self) -> None:
        """End the task at its parked call, or before its start, and free its memory."""
        self.parked_call = self.scored_step = None
        if self.done:
            return
        self._aborted = True
        if self._greenlet is not None:
            # No `Exception`: pipelines do not catch it.
            self._watched(self._greenlet, greenlet.GreenletExit())
        if self._record is not None:
            self._record.forget()
        self._free()

    def _free(self) -> None:
        """Free what only the steps needed: other images of the job can take long to end."""
        self._changes = ()
        if self._greenlet is not None:
            self._greenlet.on_step = None  # it can refer to the pipeline
        if self.step_cache is not None:
            self.step_cache.release()

    def _switch(self, device: torch.device, task: TaskGreenlet, value: object = None) -> None:
        # Autocast, grad mode and global generators belong to the thread, so to all its greenlets. Each task keeps its
        # autocast over a switch, and its rng state also for calls that run by themselves; gradients stay off for all.
        if self._autocast is not None:
            _set_autocast(device, self._autocast)
        with self._rng_state:
            call = self._watched(task, value)
        if self._record is not None:
            self._record.settle()
        if self.done:
            self._free()
        self._autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        if self._autocast is not None:
            _set_autocast(device, None)
        torch.set_grad_enabled(False)
        if isinstance(call, ScoredStep):
            self.scored_step = call
        elif not self.done:
            self.parked_call = call
            call.rng_state = self._rng_state
            if call.shared_method in self._solo_methods:
                call.run_solo()
            if self._adapter:
                call.set_adapter(self._adapter)
            if self._autocast is not None:
                call.autocast = (device.type, self._autocast)
                call.read_rules()
            if self._changes:
                call.set_changes(self._changes)

    def _watched(self, task: TaskGreenlet, value: object) -> Any:
        """Enter the greenlet with its changes of shared modules, and keep them private when it returns."""
        watch = self._watch
        if watch is None or watch.idle:
            return task.enter(value)
        before = watch.read()
        put_on(self._changes)
        try:
            return task.enter(value)
        finally:
            self._changes = watch.changes_since(before)

    def _run(self) -> None:
        try:
            self.result = self._body()
        except BaseException as error:  # a fault in a pipeline's own code ends only its job
            if self._aborted:
                return
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.error = as_job_error(error)
            if isinstance(error, torch.OutOfMemoryError):
                self.error = OutOfMemory("out of memory outside the shared modules")
            elif not isinstance(error, JobError):
                # Without the message, which can quote a prompt.
                log.warning("image_task_failed", error=type(error).__name__, where=f"{frame.filename}:{frame.lineno}")


def _set_autocast(device: torch.device, dtype: torch.dtype | None) -> None:
    torch.set_autocast_enabled(device.type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device.type, dtype)
