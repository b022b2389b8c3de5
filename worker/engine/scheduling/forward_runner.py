"""Runs selected calls in one fused forward, and records what it took."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import structlog
import torch

from shared.job import Phase
from worker.engine import protocol
from worker.engine.device import device_name
from worker.engine.fusion.fused_call import FusedCall
from worker.engine.fusion.module_proxy import Stage
from worker.engine.protocol import EngineEvents, ForwardDone
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.engine.scheduling.selection import TaskCall
from worker.engine.scheduling.timing import ForwardTimer

log = structlog.get_logger()


class ForwardRunner:
    """Runs forwards on a device, repeats those that fail in parts, and learns how many rows `memory` holds.

    `free_memory` frees what can be loaded again when a forward ran out of memory.
    """

    def __init__(
        self,
        device: torch.device,
        timer: ForwardTimer,
        memory: MemoryLimits,
        events: EngineEvents,
        free_memory: Callable[[], None],
    ) -> None:
        self._device = device
        self._timer = timer
        self._memory = memory
        self._events = events
        self._free_memory = free_memory

    def run(self, task_calls: Sequence[TaskCall]) -> list[Any]:
        """Return the output of each call, a `JobError` for one that fails by itself."""
        stage, kind, pad_to = task_calls[0].parked_call.shared_method.stage, task_calls[0].kind, task_calls[0].pad_to
        is_preview = any(task_call.parked_call.preview for task_call in task_calls)
        self._report_decoding(task_calls)

        def measure(run: Callable[[], list[Any]], indexes: Sequence[int]) -> list[Any]:
            engine_jobs = [task_calls[index].engine_job for index in indexes]
            key = (*kind, len(indexes))

            def record(seconds: float) -> None:
                _record_forward(engine_jobs, stage, is_preview, seconds)
                if stage is Stage.DENOISE:
                    self._report_forward(engine_jobs, seconds, self._timer.own_code_s(key), pad_to)

            outputs = self._timer.measure(key, run, record, partial(record_own_code, engine_jobs, stage))
            self._memory.record_success(kind, len(indexes))
            return outputs

        def free_memory(failed: int, next_calls: int) -> None:
            self._events.on_event(protocol.MemoryExhausted(kind.model))
            log.warning("memory_exhausted", **kind._asdict(), calls=failed, next_calls=next_calls)
            if pad_to is None:  # a padded forward has the same rows for any number of calls
                self._memory.record_failure(kind, failed, next_calls)
            self._free_memory()

        parked = [task_call.parked_call for task_call in task_calls]
        positions = [task_call.position for task_call in task_calls if task_call.position is not None]
        known_limit = self._memory.fits(kind) if pad_to is None else None
        fused = FusedCall(parked, pad_to, positions, measure, free_memory, known_limit)
        results = fused.run()
        if (refused := fused.refused_calls) is not None:
            self._memory.record_failure(kind, *refused)
            log.warning("rows_refused", **kind._asdict(), calls=refused[0], next_calls=refused[1])
        else:
            for index in fused.refused_pairs:
                task_calls[index].task.run_solo(parked[index].shared_method)
        if failures := fused.failed_forwards:
            self._events.on_event(protocol.ForwardRetried(kind.model, failures))
            log.warning("forward_retried", model=kind.model, method=kind.method, calls=len(parked), failures=failures)
        return results

    def _report_forward(
        self, engine_jobs: Sequence[EngineJob], seconds: float, own_code_s: float, pad_to: int | None
    ) -> None:
        """Report the forward of a denoiser, with one entry per image."""
        rows, jobs, first = len(engine_jobs), distinct(engine_jobs), engine_jobs[0]
        for engine_job in jobs:
            engine_job.record_forward(rows, len(jobs))
        self._events.on_event(
            ForwardDone(
                model=first.spec.id,
                rows=rows,
                jobs=len(jobs),
                seconds=seconds,
                device=device_name(self._device),
                shape=first.shape,
                claim_key=first.claim_key,
                padding=max(0, (pad_to or 0) - rows),
                own_code_s=own_code_s,
            )
        )

    def _report_decoding(self, task_calls: Sequence[TaskCall]) -> None:
        for engine_job, _, parked_call in task_calls:
            decodes = parked_call.shared_method.stage is Stage.DECODE and not parked_call.preview
            if decodes and not engine_job.decoding_reported:
                engine_job.decoding_reported = True
                self._events.on_event(protocol.JobPhaseChanged(engine_job.claim_key, Phase.DECODING))


def _record_forward(engine_jobs: Sequence[EngineJob], stage: Stage, is_preview: bool, seconds: float) -> None:
    """Record the time of a forward with one entry per image."""
    record_own_code(engine_jobs, stage, seconds)
    for engine_job in distinct(engine_jobs) if not is_preview else ():
        engine_job.device_work.note_share(stage, seconds / len(engine_jobs))


def record_own_code(engine_jobs: Sequence[EngineJob], stage: Stage | None, seconds: float) -> None:
    """Record the time of a forward, or of the code before or after it: each image has a share, each job all of it.

    `stage` is that of the forward, None without one.
    """
    for engine_job in engine_jobs:
        engine_job.device_seconds += seconds / len(engine_jobs)
    for engine_job in distinct(engine_jobs):
        engine_job.device_work.add(stage, seconds)


def distinct(engine_jobs: Iterable[EngineJob]) -> Collection[EngineJob]:
    """Return each job once, in order."""
    return {one.claim_key: one for one in engine_jobs}.values()
