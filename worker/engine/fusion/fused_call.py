"""A fused forward of parked calls, with retries in halves when it fails."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shared.errors import InferenceFailed, JobError, OutOfMemory
from shared.job import Job
from worker.engine.fusion.module_proxy import ParkedCall
from worker.engine.fusion.stacking import split

Measure = Callable[[Callable[[], list[Any]], Sequence[int]], list[Any]]


@dataclass
class FusedCall:
    """Runs calls with the same batch key in one forward; if it fails, in halves down to single calls.

    A call that fails by itself has a `JobError` as its outcome. With `fixed_rows` every forward is filled up with
    copies to that many calls, each call at its entry of `positions`. `measure(run, indexes)` runs each forward, and
    records those that succeed. When memory runs out, `free_memory(calls, fits)` gets the number of calls that failed
    and the number tried from then on: `known_fit` if that is fewer, else half. Afterwards `retries` is the number of
    failed forwards, and `fitted` the last number of calls tried together, None if memory did not run out.
    """

    calls: Sequence[ParkedCall]
    fixed_rows: int | None = None
    positions: Sequence[int] = ()
    measure: Measure = lambda run, _indexes: run()
    free_memory: Callable[[int, int], None] = lambda _calls, _fits: None
    known_fit: int | None = None
    retries: int = 0
    fitted: int | None = None

    def __post_init__(self) -> None:
        self.outcomes: list[Any] = [None] * len(self.calls)

    def run(self) -> list[Any]:
        self._run(range(len(self.calls)))
        return self.outcomes

    def _run(self, indexes: Sequence[int]) -> None:
        if self.fitted is not None and len(indexes) > self.fitted:
            return self._run_chunks(indexes, self.fitted)
        error = self._try(indexes)
        if error is None:
            return None
        # Outside the except block: the failed forward's frames, and the activations they held, are gone.
        self.retries += 1
        size = (len(indexes) + 1) // 2
        if isinstance(error, OutOfMemory):
            fewer = max(1, len(indexes) // 2)
            size = self.fitted = fewer if self.known_fit is None or self.known_fit >= len(indexes) else self.known_fit
            gc.collect()
            self.free_memory(len(indexes), size)
            if len(indexes) == 1:
                error = self._try(indexes)
        if len(indexes) > 1:
            return self._run_chunks(indexes, size)
        if error is not None:
            self.outcomes[indexes[0]] = error
        return None

    def _run_chunks(self, indexes: Sequence[int], size: int) -> None:
        for start in range(0, len(indexes), size):
            self._run(indexes[start : start + size])

    def _try(self, indexes: Sequence[int]) -> JobError | None:
        calls = [self.calls[at] for at in indexes]
        try:
            positions = None if self.fixed_rows is None else [self.positions[at] for at in indexes]
            outcomes = self.measure(lambda: run_fused(calls, self.fixed_rows, positions), indexes)
        except torch.AcceleratorError:
            raise
        except torch.OutOfMemoryError:
            return OutOfMemory(f"{calls[0].shared_method} does not fit into memory, even for one image")
        except Exception as error:  # one call's failure does not end its batch mates
            message = f"{type(error).__name__}: {error}"[:500]
            return OutOfMemory(message) if _is_out_of_memory(error) else InferenceFailed(message)
        for at, outcome in zip(indexes, outcomes, strict=True):
            self.outcomes[at] = outcome
        return None


def _is_out_of_memory(error: Exception) -> bool:
    message = str(error)
    return isinstance(error, MemoryError) or "can't allocate memory" in message or "_ALLOC_FAILED" in message


def fixed_position(job: Job, index: int, rows: int) -> int:
    """Return the position of image `index` of `job` in forwards of a fixed number of rows.

    A reproducible job's rows keep their positions: a kernel can sum the last rows of a matrix in another order than
    the first. On a CPU, the last of the 4 x 77 rows of a text encoder differed by 4e-7. The content of the other rows
    makes no difference.
    """
    return (job.seed + index) % rows


def run_fused(
    calls: Sequence[ParkedCall], fixed_rows: int | None = None, positions: Sequence[int] | None = None
) -> list[Any]:
    """Run `calls` in one forward and return the output of each; with `fixed_rows` at their `positions`."""
    first = calls[0]
    stacker = first.shared_method.stacker
    if stacker is None or (len(calls) == 1 and fixed_rows is None):
        return [_with_adapters(calls, first.run, fixed_rows)]
    at = range(len(calls)) if positions is None else positions
    filled = list(calls) if fixed_rows is None else [first] * fixed_rows
    for position, call in zip(at, calls, strict=False):
        filled[position] = call
    rows = [call.rows for call in filled]
    arguments = stacker.stack([call.arguments for call in filled], rows)
    output = _with_adapters(filled, lambda: first.shared_method.run(**arguments), fixed_rows)
    outputs = split(output, rows, stacker.rules.listed_output)
    return [stacker.in_requested_form(call.arguments, outputs[place]) for place, call in zip(at, calls, strict=False)]


def _with_adapters(calls: Sequence[ParkedCall], run: Callable[[], Any], fixed_rows: int | None) -> Any:
    first = calls[0]
    adapters = first.shared_method.adapters
    if adapters.idle:
        return _with_autocast(first, run)
    with adapters.applied([call.adapter for call in calls], [call.rows for call in calls], merge=fixed_rows is None):
        return _with_autocast(first, run)


def _with_autocast(call: ParkedCall, run: Callable[[], Any]) -> Any:
    if call.autocast is None:
        return run()
    device_type, dtype = call.autocast
    with torch.autocast(device_type, dtype=dtype):
        return run()
