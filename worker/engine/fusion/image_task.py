"""The hub: pictures run as greenlets on one thread and meet at the modules they share.

Each picture runs its pipeline's unmodified call with a batch of one. At a meeting point its greenlet parks with
the call's arguments; `execute` runs parked calls in one forward, and `resume` goes on with a picture's own rows.
"""

from __future__ import annotations

import contextvars
import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import greenlet
import structlog
import torch

from shared.errors import InferenceFailed, JobError, OutOfMemory
from worker.engine.fusion.fixed_rows import arrange
from worker.engine.fusion.module_proxy import ParkedCall
from worker.engine.fusion.stacking import split
from worker.engine.lora.per_row import AdapterKey
from worker.engine.pipelines.rng_state import State, global_state, set_global_state

log = structlog.get_logger()


class ImageTask:
    """One picture on its way: its greenlet, and the call at which it is parked.

    `adapter` is what its rows take. `result` is what the body returned and `error` why it did not; both None while it
    runs or when thrown out.
    """

    def __init__(self, body: Callable[[], Any], adapter: AdapterKey = ()) -> None:
        self.call: ParkedCall | None = None
        self.result: Any = None
        self.error: JobError | None = None
        self._body = body
        self._adapter = adapter
        self._autocast: torch.dtype | None = None
        self._chance: State | None = None
        self._greenlet: greenlet.greenlet | None = None

    @property
    def started(self) -> bool:
        return self._greenlet is not None

    @property
    def done(self) -> bool:
        return self._greenlet is not None and self._greenlet.dead

    def start(self, device: torch.device) -> None:
        """Run up to the first meeting point."""
        self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.gr_context = contextvars.copy_context()
        self._switch(device, self._greenlet.switch)

    def resume(self, device: torch.device, outcome: Any) -> None:
        """Go on from the parked call with its outcome, a `JobError` being raised there, up to the next one."""
        running, self.call = self._require(), None
        if isinstance(outcome, JobError):
            self._switch(device, running.throw, outcome)
        else:
            self._switch(device, running.switch, outcome)

    def abort(self) -> None:
        """End the picture where it stands; what it held is freed."""
        self.call = None
        if self._greenlet is not None and not self._greenlet.dead:
            self._greenlet.throw()  # GreenletExit, which is no Exception: pipelines do not catch it

    def _require(self) -> greenlet.greenlet:
        if self._greenlet is None:
            raise RuntimeError("the picture has not started")
        return self._greenlet

    def _switch(self, device: torch.device, enter: Callable[..., Any], *args: Any) -> None:
        # Autocast, grad mode and global generators belong to the thread, and so to all its greenlets: each picture
        # keeps its own autocast and random state over a switch, and gradients stay off for all.
        if self._autocast is not None:
            _set_autocast(device, self._autocast)
        if self._chance is not None:
            set_global_state(device, self._chance)
        parked = enter(*args)
        self._chance = None if self.done else global_state(device)
        self._autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        if self._autocast is not None:
            _set_autocast(device, None)
        torch.set_grad_enabled(False)
        if not self.done:
            self.call = parked
            if self._adapter:
                parked.wear(self._adapter)
            if self._autocast is not None:
                parked.autocast = (device.type, self._autocast)
                parked.read_rules()

    def _run(self) -> None:
        try:
            self.result = self._body()
        except torch.AcceleratorError:
            raise  # the device is lost for the whole process, not for this job
        except JobError as error:
            self.error = _bare(error)
        except torch.OutOfMemoryError:
            self.error = OutOfMemory("out of memory outside the shared modules")
        except Exception as error:  # any fault of a pipeline's own code ends its job, and no other
            log.warning("picture_failed", error=type(error).__name__, where=_place(error))
            self.error = InferenceFailed(_words(error))


def _set_autocast(device: torch.device, dtype: torch.dtype | None) -> None:
    torch.set_autocast_enabled(device.type, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device.type, dtype)


def _bare(error: JobError) -> JobError:
    error.__traceback__ = None  # its frames hold activations
    error.__context__ = None
    return error


def _place(error: BaseException) -> str:
    """Return where `error` was raised; its message may quote a prompt, and stays out of the log."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


Measure = Callable[[Callable[[], list[Any]], Sequence[int]], list[Any]]


@dataclass
class FusedCall:
    """Runs calls that fit together: in one forward if that works, else in halves down to single calls.

    A call that fails by itself gets a `JobError` as its outcome. With `fixed` every forward is filled up with
    copies to that many calls, each call being at its own of `places`. `measure(run, members)` runs each forward, and
    notes those that succeed. When memory
    runs out, `free(calls, fits)` is told for how many, and how many are tried together from then on: `known` where
    so many are known to fit, else half. Afterwards `retries` counts the forwards that failed, and `fitted` is the
    most calls that were tried together in the end, None if memory did not run out.
    """

    calls: Sequence[ParkedCall]
    fixed: int | None = None
    places: Sequence[int] = ()
    measure: Measure = lambda run, _members: run()
    free: Callable[[int, int], None] = lambda _calls, _fits: None
    known: int | None = None
    retries: int = 0
    fitted: int | None = None

    def __post_init__(self) -> None:
        self.outcomes: list[Any] = [None] * len(self.calls)

    def run(self) -> list[Any]:
        """Return every call's outcome, in order."""
        self._attempt(range(len(self.calls)))
        return self.outcomes

    def _attempt(self, members: Sequence[int]) -> None:
        if self.fitted is not None and len(members) > self.fitted:
            return self._attempt_parts(members, self.fitted)
        trouble = self._try(members)
        if trouble is None:
            return None
        # Out of the except block by now: the failed forward's frames, and the activations they held, are gone.
        self.retries += 1
        part = (len(members) + 1) // 2
        if isinstance(trouble, OutOfMemory):
            part = self.fitted = self._fewer_than(len(members))
            gc.collect()
            self.free(len(members), part)
            if len(members) == 1:
                trouble = self._try(members)
        if len(members) > 1:
            return self._attempt_parts(members, part)
        if trouble is not None:
            self.outcomes[members[0]] = trouble
        return None

    def _fewer_than(self, calls: int) -> int:
        if self.known is not None and self.known < calls:
            return self.known
        return max(1, calls // 2)

    def _attempt_parts(self, members: Sequence[int], size: int) -> None:
        for start in range(0, len(members), size):
            self._attempt(members[start : start + size])

    def _try(self, members: Sequence[int]) -> JobError | None:
        calls = [self.calls[at] for at in members]
        try:
            places = None if self.fixed is None else [self.places[at] for at in members]
            outcomes = self.measure(lambda: forward(calls, self.fixed, places), members)
        except torch.AcceleratorError:
            raise
        except torch.OutOfMemoryError:
            return OutOfMemory(f"{calls[0].shared_method} does not fit into memory, even alone")
        except Exception as error:  # whatever one call provokes in a model, its companions go on
            return OutOfMemory(_words(error)) if _is_out_of_memory(error) else InferenceFailed(_words(error))
        for at, outcome in zip(members, outcomes, strict=True):
            self.outcomes[at] = outcome
        return None


def _is_out_of_memory(error: Exception) -> bool:
    words = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in words or "_ALLOC_FAILED" in words


def forward(calls: Sequence[ParkedCall], fixed: int | None = None, places: Sequence[int] | None = None) -> list[Any]:
    """Run `calls` in one forward and return each one's output; with `fixed` at `places` among so many."""
    first = calls[0]
    stacker = first.shared_method.stacker
    if stacker is None or (len(calls) == 1 and fixed is None):
        return [_wearing(calls, first.run, fixed)]
    at = range(len(calls)) if places is None else places
    filled = calls if fixed is None else arrange(calls, at, fixed)
    rows = [call.rows for call in filled]
    arguments = stacker.stack([call.arguments for call in filled], rows)
    output = _wearing(filled, lambda: first.shared_method.run(**arguments), fixed)
    parts = split(output, rows, stacker.rules.listed_output)
    return [stacker.formed(call.arguments, parts[place]) for place, call in zip(at, calls, strict=False)]


def _wearing(calls: Sequence[ParkedCall], run: Callable[[], Any], fixed: int | None) -> Any:
    first = calls[0]
    adapters = first.shared_method.adapters
    if adapters.idle:
        return _under_autocast(first, run)
    with adapters.applied([call.adapter for call in calls], [call.rows for call in calls], merge=fixed is None):
        return _under_autocast(first, run)


def _under_autocast(call: ParkedCall, run: Callable[[], Any]) -> Any:
    if call.autocast is None:
        return run()
    device_type, dtype = call.autocast
    with torch.autocast(device_type, dtype=dtype):
        return run()
