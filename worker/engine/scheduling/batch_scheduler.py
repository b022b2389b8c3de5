"""Batch scheduler: holds the engine's jobs, and runs one fused forward after the other."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog
import torch

from shared.errors import JobError
from shared.job import Phase
from shared.signature import DENOISERS
from worker.engine import protocol
from worker.engine.device import device_name
from worker.engine.fusion.fused_call import FusedCall
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.lora.per_row import AdapterKey
from worker.engine.pipelines.call_arguments import non_finite_error
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.pipelines.model_cache import ModelCache, empty_cache
from worker.engine.pipelines.text_cache import TextCache
from worker.engine.protocol import EngineEvents, ForwardDone
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.engine.scheduling.selection import CallSelector, TaskCall
from worker.engine.scheduling.timing import ForwardTimer

log = structlog.get_logger()

DENOISER_METHODS = frozenset(f"{name}.forward" for name in DENOISERS)


class BatchScheduler:
    """Runs the jobs of one device, one fused forward at a time. A job that ends is removed from `unfinished`.

    Used on the engine's thread only, except `running` and `row_limits`.
    """

    def __init__(
        self, models: ModelCache, timer: ForwardTimer, events: EngineEvents, unfinished: set[str], aging_s: float
    ) -> None:
        self._device = models.device
        self._models = models
        self._timer = timer
        self._events = events
        self._unfinished = unfinished
        self._jobs: dict[str, EngineJob] = {}
        self._memory = MemoryLimits()
        self._selector = CallSelector(timer, self._memory, aging_s)

    @property
    def running(self) -> bool:
        return any(job.started for job in list(self._jobs.values()))

    def row_limits(self) -> dict[tuple[str, str], int]:
        """Return how many rows of a denoiser fit into memory now, by model and shape, where memory ran out."""
        limits: dict[tuple[str, str], int] = {}
        for (model, shape, method), limit in self._memory.caps().items():
            if method in DENOISER_METHODS:
                limits[model, shape] = min(limit, limits.get((model, shape), limit))
        return limits

    def admit(self, job: EngineJob) -> None:
        """Start a job, or request its model."""
        self._jobs[job.key] = job
        model = self._models.get(job.spec.id)
        if model is None:
            self._report_loading(job)
            self._models.request_load(job.spec)
        else:
            self._start(job, model)

    def model_loaded(self, model: str, result: LoadedModel | JobError) -> None:
        """Start the jobs that wait for a model, or fail them if it did not load."""
        for job in [job for job in self._jobs.values() if job.spec.id == model and not job.started]:
            if isinstance(result, JobError):
                self.finish(job, result)
            else:
                self._start(job, result)

    def adapters_loaded(self, model: LoadedModel, key: AdapterKey, error: JobError | None) -> None:
        """Start the jobs that wait for adapters of a model, or fail them if these did not load."""
        jobs = [job for job in self._jobs.values() if job.model is model and job.adapter == key and not job.started]
        for job in jobs:
            if error is not None:
                self.finish(job, error)
            else:
                self._start(job, model)
        self._trim_adapters(model)

    def cancel(self, key: str) -> None:
        """Remove a job; ignores unknown keys."""
        if job := self._jobs.get(key):
            self.finish(job, canceled=True)

    def cancel_all(self) -> None:
        for key in list(self._jobs):
            self.cancel(key)

    def models_in_use(self) -> set[str]:
        return {job.spec.id for job in self._jobs.values() if job.model is not None}

    def can_run(self) -> bool:
        return any(task.call is not None for job in self._jobs.values() for task in job.tasks)

    def run_forward(self) -> None:
        """Run one forward for the selected calls, and resume their tasks until the next call."""
        calls = self._selector.select(self._jobs.values())
        if calls and calls[0].parked.shared_method.method == "decode":
            calls = self._drop_non_finite(calls)
        if not calls:
            return
        cache = self._text_cache(calls[0].job, calls[0].parked)
        if cache is None:
            results = self._run(calls)
        else:
            parked = [call.parked for call in calls]
            results = cache.get_or_run(parked, lambda indexes: self._run([calls[index] for index in indexes]))
        for (job, task, _), result in zip(calls, results, strict=True):
            if not task.done:
                task.resume(self._device, result)
                self._after_resume(job, task)
        self._report_progress({call.job.key: call.job for call in calls}.values())

    def _start(self, job: EngineJob, model: LoadedModel) -> None:
        job.model = model
        if not model.adapters.use(job.adapter):
            self._report_loading(job)
            self._models.adapters.request_load(model, job.adapter)
            return
        job.create_tasks(model)
        for task in job.tasks:
            if job.key in self._jobs:  # an earlier task can have finished the job
                task.start(self._device)
                self._after_resume(job, task)

    def _report_loading(self, job: EngineJob) -> None:
        if not job.waited_for_load:
            job.waited_for_load = True
            self._events.on_event(protocol.JobPhaseChanged(job.key, Phase.LOADING))

    def finish(self, job: EngineJob, error: JobError | None = None, canceled: bool = False) -> None:
        """Remove a job and report its end; it need not have been admitted."""
        self._jobs.pop(job.key, None)
        for task in job.tasks:
            task.abort()
        self._timer.drain()
        self._unfinished.discard(job.key)
        self._events.on_event(job.finished(error, canceled))
        if model := self._models.get(job.spec.id):
            if model.spec.id not in self.models_in_use():
                model.release_tensors()
            if job.adapter:
                self._trim_adapters(model)

    def _trim_adapters(self, model: LoadedModel, keep_unused: bool = True) -> None:
        in_use = {job.adapter for job in self._jobs.values() if job.started and job.spec.id == model.spec.id}
        self._models.adapters.trim(model, in_use, keep_unused=keep_unused)

    def _drop_non_finite(self, calls: list[TaskCall]) -> list[TaskCall]:
        """Fail the jobs whose latents are not finite; waits for the device once for all of them."""
        finite = torch.stack([call.parked.finite() for call in calls]).tolist()
        for (job, task, _), ok in zip(calls, finite, strict=True):
            if not ok and not task.done:
                task.resume(self._device, non_finite_error())
                self._after_resume(job, task)
        return [call for call, ok in zip(calls, finite, strict=True) if ok and not call.task.done]

    def _text_cache(self, job: EngineJob, call: ParkedCall) -> TextCache | None:
        """Return the cache for the output of a call, None if it must not be cached."""
        # The last bits of an encoding depend on its batch mates, which reproducible jobs must not.
        if call.shared_method.stage is not Stage.ENCODE or job.padded_calls is not None or job.model is None:
            return None
        return job.model.text_cache

    def _run(self, calls: Sequence[TaskCall]) -> list[Any]:
        call, kind, padded_calls = calls[0].parked, calls[0].kind, calls[0].padded_calls
        self._report_decoding(calls)

        def measure(run: Callable[[], list[Any]], indexes: Sequence[int]) -> list[Any]:
            jobs = [calls[index].job for index in indexes]
            outputs = self._timer.measure(
                (*kind, len(jobs)), run, lambda seconds: self._record_gpu_time(jobs, call, seconds)
            )
            self._memory.record_success(kind, len(jobs))
            return outputs

        def free_memory(failed: int, next_calls: int) -> None:
            self._events.on_event(protocol.MemoryExhausted(kind.model))
            log.warning("memory_exhausted", **kind._asdict(), calls=failed, next_calls=next_calls)
            if padded_calls is None:  # a padded forward has the same rows for any number of calls
                self._memory.record_failure(kind, failed, next_calls)
            while self._models.evict_one(self.models_in_use()):
                pass
            for model in self._models.loaded.values():
                self._trim_adapters(model, keep_unused=False)
                model.text_cache.clear()
            empty_cache(self._device)

        positions = [call.position for call in calls if call.position is not None]
        known_limit = self._memory.fits(kind) if padded_calls is None else None
        fused = FusedCall([call.parked for call in calls], padded_calls, positions, measure, free_memory, known_limit)
        results = fused.run()
        if failures := fused.failed_forwards:
            self._events.on_event(protocol.ForwardRetried(kind.model, failures))
            log.warning("forward_retried", model=kind.model, method=kind.method, calls=len(calls), failures=failures)
        return results

    def _record_gpu_time(self, jobs: Sequence[EngineJob], call: ParkedCall, seconds: float) -> None:
        """Share a forward's time among its jobs by images, and report the forward of a denoiser."""
        distinct = {job.key: job for job in jobs}
        for job in jobs:
            job.gpu_seconds += seconds / len(jobs)
        if call.shared_method.stage is not Stage.DENOISE:
            return
        for job in distinct.values():
            job.record_forward(len(jobs), len(distinct))
        first, rows = jobs[0], len(jobs)
        padding, device = max(0, (first.padded_calls or 0) - rows), device_name(self._device)
        self._events.on_event(
            ForwardDone(first.spec.id, rows, len(distinct), seconds, device, first.shape, first.key, padding)
        )

    def _after_resume(self, job: EngineJob, task: ImageTask) -> None:
        """Resume a task with cached outputs. Report the outputs of a done task; finish a job that is done or failed."""
        while task.call is not None and (cache := self._text_cache(job, task.call)) is not None:
            output = cache.get(task.call)
            if output is None:
                break
            task.resume(self._device, output)
        self._timer.note_progress()  # a pipeline's own code can be slow: GLM-Image generates tokens for a whole image
        if task.call is not None and job.request.job.previews:
            task.call.preview = job.steps[job.tasks.index(task)].previewing
        if not task.done or job.key not in self._jobs:
            return
        if task.error is not None:
            return self.finish(job, task.error)
        outputs, first_index = task.result, job.tasks.index(task) * len(task.result)
        self._report_progress([job])
        for index, output in enumerate(outputs, first_index):
            self._events.on_event(protocol.OutputReady(job.key, index, output))
        task.result = None
        if all(task.done for task in job.tasks):
            self.finish(job)

    def _report_decoding(self, calls: Sequence[TaskCall]) -> None:
        for job, _, call in calls:
            if call.shared_method.stage is Stage.DECODE and not (call.preview or job.decoding_reported):
                job.decoding_reported = True
                self._events.on_event(protocol.JobPhaseChanged(job.key, Phase.DECODING))

    def _report_progress(self, jobs: Iterable[EngineJob]) -> None:
        for job in jobs:
            if job.progressed and job.key in self._jobs:
                job.progressed = False
                for index, pixels in job.take_previews():
                    self._events.on_event(protocol.PreviewReady(job.key, index, pixels))
                self._events.on_event(protocol.JobProgress(job.key, *job.progress()))
