"""Fused calls: selected parked calls run in one fused forward, or in smaller ones after one that fails."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shared.errors import JobError, OutOfMemory
from shared.job import Job
from worker.engine.errors import as_job_error
from worker.engine.fusion.module_proxy import ParkedCall
from worker.engine.fusion.private_changes import applied
from worker.engine.fusion.stacking import in_one_memory_format, split

Measure = Callable[[Callable[[], list[Any]], Sequence[int]], list[Any]]


@dataclass
class FusedCall:
    """Runs calls with the same batch key in one forward; if it fails, in halves down to single calls."""

    calls: Sequence[ParkedCall]
    pad_to: int | None = None  # every forward is filled up with copies to this many calls
    positions: Sequence[int] = ()  # of each call in a padded forward
    measure: Measure = lambda run, _indexes: run()  # runs one forward of the calls at `indexes`
    free_memory: Callable[[int, int], None] = lambda _failed, _next_calls: None  # frees memory when it has run out
    known_limit: int | None = None  # calls that fit into memory before
    failed_forwards: int = 0
    calls_tried: int | None = None  # the last number of calls tried after memory ran out
    refused_pairs: set[int] = field(default_factory=set)  # calls that failed in a pair, and ran by themselves

    def __post_init__(self) -> None:
        self._results: list[Any] = [None] * len(self.calls)
        self._most_run = 0
        self._fewest_failed: int | None = None

    @property
    def refused_calls(self) -> tuple[int, int] | None:
        """How many calls failed together, and the most that ran; None if memory, a call or something else failed.

        Every call ran in the end, and all larger forwards failed: their number of rows is at fault.
        """
        fails, runs = self._fewest_failed, self._most_run
        failed = any(isinstance(result, JobError) for result in self._results)
        return None if fails is None or fails <= runs or failed or self.calls_tried is not None else (fails, runs)

    def run(self) -> list[Any]:
        """Return the output of each call, a `JobError` for one that fails by itself."""
        self._run(range(len(self.calls)))
        return self._results

    def _run(self, indexes: Sequence[int]) -> None:
        if self.calls_tried is not None and len(indexes) > self.calls_tried:
            return self._run_chunks(indexes, self.calls_tried)
        error = self._try(indexes)
        if error is None:
            return None
        # Outside the except block: the failed forward's frames, and the activations they held, have been released.
        self.failed_forwards += 1
        size = (len(indexes) + 1) // 2
        if isinstance(error, OutOfMemory):
            known = self.known_limit
            size = known if known is not None and known < len(indexes) else max(1, len(indexes) // 2)
            self.calls_tried = size
            gc.collect()
            self.free_memory(len(indexes), size)
            if len(indexes) == 1:
                error = self._try(indexes)
        else:
            self._fewest_failed = min(self._fewest_failed or len(indexes), len(indexes))
        if len(indexes) > 1:
            self._run_chunks(indexes, size)
            succeeded = not any(isinstance(self._results[index], JobError) for index in indexes)
            if len(indexes) == 2 and succeeded and not isinstance(error, OutOfMemory):
                self.refused_pairs.update(indexes)
            return None
        if error is not None:
            self._results[indexes[0]] = error
        return None

    def _run_chunks(self, indexes: Sequence[int], size: int) -> None:
        for start in range(0, len(indexes), size):
            self._run(indexes[start : start + size])

    def _try(self, indexes: Sequence[int]) -> JobError | None:
        calls = [self.calls[index] for index in indexes]
        try:
            positions = None if self.pad_to is None else [self.positions[index] for index in indexes]
            outputs = self.measure(lambda: run_fused(calls, self.pad_to, positions), indexes)
        except BaseException as error:  # one call's failure does not end its batch mates
            failure = as_job_error(error)
            if isinstance(error, torch.OutOfMemoryError):
                failure = OutOfMemory(f"{calls[0].shared_method} does not fit into memory, even for one image")
            return failure
        self._most_run = max(self._most_run, len(indexes))
        for index, output in zip(indexes, outputs, strict=True):
            self._results[index] = output
        return None


def fixed_position(job: Job, index: int, pad_to: int) -> int:
    """Return the position of image `index` of `job` in padded forwards.

    A reproducible job's rows keep their positions: a kernel can sum the last rows of a matrix in another order than
    the first. On a CPU, the last of the 4 x 77 rows of a text encoder differed by 4e-7. The content of the other rows
    makes no difference.
    """
    return (job.seed + index) % pad_to


def run_fused(
    calls: Sequence[ParkedCall], pad_to: int | None = None, positions: Sequence[int] | None = None
) -> list[Any]:
    """Run `calls` in one forward and return the output of each; in a padded forward at their `positions`."""
    first = calls[0]
    stacker = first.shared_method.stacker
    if stacker is None or (len(calls) == 1 and pad_to is None):
        return [_with_adapters(calls, first.run, pad_to)]
    positions = range(len(calls)) if positions is None else positions
    filled = list(calls) if pad_to is None else [first] * pad_to
    for position, call in zip(positions, calls, strict=True):
        filled[position] = call
    rows = [call.rows for call in filled]
    arguments = stacker.stack([call.arguments for call in filled], rows)
    if pad_to is not None:
        arguments = in_one_memory_format(arguments)
    with applied(first.changes):
        output = _with_adapters(filled, lambda: first.shared_method.run(**arguments), pad_to)
    outputs = split(output, rows, stacker.rules.listed_output)
    return [
        stacker.in_requested_form(call.arguments, outputs[position])
        for position, call in zip(positions, calls, strict=True)
    ]


def _with_adapters(calls: Sequence[ParkedCall], run: Callable[[], Any], pad_to: int | None) -> Any:
    first = calls[0]
    adapters = first.shared_method.adapters
    if adapters.idle:
        return _with_autocast(first, run)
    with adapters.applied([call.adapter for call in calls], [call.rows for call in calls], merge=pad_to is None):
        return _with_autocast(first, run)


def _with_autocast(call: ParkedCall, run: Callable[[], Any]) -> Any:
    if call.autocast is None:
        return run()
    device_type, dtype = call.autocast
    with torch.autocast(device_type, dtype=dtype):
        return run()
