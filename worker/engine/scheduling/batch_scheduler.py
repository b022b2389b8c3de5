"""Batch scheduler: holds the engine's jobs, and runs one fused forward after the other."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import structlog
import torch

from shared.errors import InferenceFailed, JobError, OutOfMemory
from shared.job import Phase
from shared.signature import DENOISERS
from worker.engine import protocol
from worker.engine.errors import as_job_error
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.lora.per_row import AdapterKey
from worker.engine.models.model_cache import ModelCache, empty_cache
from worker.engine.pipelines.call_results import non_finite_error
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.text_cache import TextCache
from worker.engine.protocol import EngineEvents
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.forward_runner import ForwardRunner, distinct, record_own_code
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.engine.scheduling.selection import CallSelector, TaskCall
from worker.engine.scheduling.timing import ForwardTimer

log = structlog.get_logger()

DENOISER_METHODS = frozenset(f"{name}.forward" for name in DENOISERS)


class BatchScheduler:
    """Runs the jobs of one device, one fused forward at a time. A job that ends is removed from `unfinished`.

    Used on the engine's thread only, except `running`, `kept_bytes` and `row_limits`.
    """

    def __init__(
        self, models: ModelCache, timer: ForwardTimer, events: EngineEvents, unfinished: set[str], aging_s: float
    ) -> None:
        self._device = models.device
        self._models = models
        self._timer = timer
        self._events = events
        self._unfinished = unfinished
        self._jobs: dict[str, EngineJob] = {}  # by claim key
        self._memory = MemoryLimits()
        self._selector = CallSelector(timer, self._memory, aging_s)
        self._forwards = ForwardRunner(self._device, timer, self._memory, events, self._free_memory)
        self.take_checkpoint: Callable[[EngineJob], None] = lambda _engine_job: None

    @property
    def running(self) -> bool:
        return any(one.started for one in list(self._jobs.values()))

    @property
    def kept_bytes(self) -> int:
        """Memory of the outputs that step caching keeps for running jobs."""
        return sum(one.kept_bytes for one in list(self._jobs.values()))

    def row_limits(self) -> dict[tuple[str, str], int]:
        """Return how many rows of a denoiser fit into memory now, by model and shape, where memory ran out."""
        limits: dict[tuple[str, str], int] = {}
        for (model, shape, method), limit in self._memory.caps().items():
            if method in DENOISER_METHODS:
                limits[model, shape] = min(limit, limits.get((model, shape), limit))
        return limits

    def admit(self, engine_job: EngineJob) -> None:
        """Start a job, or request its model."""
        self._jobs[engine_job.claim_key] = engine_job
        model = self._models.get(engine_job.spec.id)
        if model is None:
            self._report_loading(engine_job)
            self._models.request_load(engine_job.spec)
        else:
            self._start(engine_job, model)

    def model_loaded(self, model: str, result: LoadedModel | JobError) -> None:
        """Start the jobs that wait for a model, or fail them if it did not load."""
        for engine_job in [one for one in self._jobs.values() if one.spec.id == model and not one.started]:
            if isinstance(result, JobError):
                self.finish(engine_job, result)
            else:
                self._start(engine_job, result)

    def adapters_loaded(self, model: LoadedModel, key: AdapterKey, error: JobError | None) -> None:
        """Start the jobs that wait for adapters of a model, or fail them if these did not load."""
        waiting = [one for one in self._jobs.values() if one.model is model and one.adapter == key and not one.started]
        for engine_job in waiting:
            if error is not None:
                self.finish(engine_job, error)
            else:
                self._start(engine_job, model)
        self._trim_adapters(model)

    def cancel(self, claim_key: str) -> None:
        """Remove a job; ignores unknown keys."""
        if engine_job := self._jobs.get(claim_key):
            self.finish(engine_job, canceled=True)

    def cancel_all(self) -> None:
        for claim_key in list(self._jobs):
            self.cancel(claim_key)

    def take_checkpoints(self, claim_keys: Iterable[str]) -> None:
        """Take checkpoints of jobs, and report those that have not started without any; ignores unknown keys."""
        for claim_key in claim_keys:
            engine_job = self._jobs.get(claim_key)
            if engine_job is not None and engine_job.started:
                self.take_checkpoint(engine_job)
            elif claim_key in self._unfinished:
                self._events.on_event(protocol.CheckpointTaken(claim_key))

    def hand_over(self, claim_keys: Iterable[str]) -> None:
        """Take checkpoints of jobs that run no further, and cancel those that have not started."""
        for claim_key in claim_keys:
            engine_job = self._jobs.get(claim_key)
            if engine_job is None:
                self._unfinished.discard(claim_key)  # its inputs are decoded: it ends when they are
            elif not engine_job.started:
                self.finish(engine_job, canceled=True)
            elif not engine_job.is_handed_over:
                engine_job.is_handed_over = True
                self.take_checkpoint(engine_job)

    def report_checkpoint(self, event: protocol.CheckpointTaken) -> None:
        """Report a checkpoint, unless its job has finished; end a job that is handed over with its last one."""
        if (engine_job := self._jobs.get(event.claim_key)) is None:
            return
        self._events.on_event(event)
        engine_job.unwritten_checkpoints = max(0, engine_job.unwritten_checkpoints - 1)  # or of an earlier run
        if engine_job.unwritten_checkpoints:
            return
        if engine_job.is_handed_over and event.reason is None:
            self.finish(engine_job, canceled=True)
        engine_job.is_handed_over = False

    def awaits(self, model: str) -> bool:
        """Return whether jobs wait for a model to be loaded."""
        return any(one.spec.id == model and one.model is None for one in self._jobs.values())

    def forget(self, model: str) -> None:
        """Forget what was learned of a model's forwards: other weights take its id."""
        self._memory.forget(model)
        self._timer.forget(model)

    def models_in_use(self) -> set[str]:
        return {one.spec.id for one in self._jobs.values() if one.model is not None}

    def can_run(self) -> bool:
        return any(task.parked_call is not None for one in self._running_on() for task in one.tasks)

    def run_forward(self) -> None:
        """Run one forward for the selected calls, and resume their tasks until the next call."""
        task_calls = self._selector.select(self._running_on())
        if task_calls and task_calls[0].parked_call.shared_method.method == "decode":
            task_calls = self._drop_non_finite(task_calls)
        if not task_calls:
            return
        run, cache = self._forwards.run, self._text_cache(task_calls[0].engine_job, task_calls[0].parked_call)
        if cache is None:
            results = run(task_calls)
        else:
            parked = [task_call.parked_call for task_call in task_calls]
            results = cache.get_or_run(parked, lambda indexes: run([task_calls[index] for index in indexes]))
        resumed = [(one, result) for one, result in zip(task_calls, results, strict=True) if not one.task.done]
        for (engine_job, task, _), result in resumed:
            task.resume(self._device, result)
            self._resume_cached(engine_job, task)
        engine_jobs = [engine_job for (engine_job, _, _), _ in resumed]
        self._timer.note_parked(
            (*task_calls[0].kind, len(task_calls)),
            partial(record_own_code, engine_jobs, task_calls[0].parked_call.shared_method.stage),
        )
        for (engine_job, task, _), _ in resumed:
            self._after_resume(engine_job, task)
        served = distinct(task_call.engine_job for task_call in task_calls)
        self._report_progress(served)
        for engine_job in served:
            if engine_job.claim_key in self._jobs and engine_job.checkpoint_due:
                self.take_checkpoint(engine_job)

    def _running_on(self) -> list[EngineJob]:
        return [one for one in self._jobs.values() if not one.is_handed_over]

    def _start(self, engine_job: EngineJob, model: LoadedModel) -> None:
        if engine_job.job.reproducible and model.awaits_memory:  # fused forwards later would change the last bits
            message = (
                f"model {model.spec.id!r} has no memory for the fused forwards of reproducible jobs; try again later"
            )
            return self.finish(engine_job, OutOfMemory(message))
        engine_job.model = model
        if not model.adapters.use(engine_job.adapter):
            self._report_loading(engine_job)
            self._models.adapters.request_load(model, engine_job.adapter, engine_job.request.adapters)
            return
        try:
            engine_job.create_tasks(model)
        except Exception as error:  # of code that reads the job's texts: it concerns no other job
            log.error("job_not_started", error=type(error).__name__)  # the message can quote a prompt
            engine_job.tasks.clear()
            return self.finish(engine_job, as_job_error(error))
        started, running = self._timer.begin_own_code(), [task for task in engine_job.tasks if not task.done]
        if len(running) < len(engine_job.tasks):  # its checkpoint knows which candidates were dropped
            self._events.on_event(protocol.CandidatesDropped(engine_job.claim_key, len(running)))
        for task in running:
            task.start(self._device)
            self._resume_cached(engine_job, task)
        self._timer.end_own_code(started, partial(record_own_code, [engine_job], None))
        for task in running:
            self._after_resume(engine_job, task)

    def _report_loading(self, engine_job: EngineJob) -> None:
        if not engine_job.waited_for_load:
            engine_job.waited_for_load = True
            self._events.on_event(protocol.JobPhaseChanged(engine_job.claim_key, Phase.LOADING))

    def finish(self, engine_job: EngineJob, error: JobError | None = None, canceled: bool = False) -> None:
        """Remove a job and report its end; it need not have been admitted."""
        self._jobs.pop(engine_job.claim_key, None)
        for task in engine_job.tasks:
            task.abort()
        if engine_job.started:
            self._timer.measure_rest(partial(record_own_code, [engine_job], None))
        self._timer.drain()
        self._unfinished.discard(engine_job.claim_key)
        self._events.on_event(engine_job.finished(error, canceled))
        if model := self._models.get(engine_job.spec.id):
            if model.spec.id not in self.models_in_use():
                model.release_tensors()
            if engine_job.adapter:
                self._trim_adapters(model)

    def _trim_adapters(self, model: LoadedModel, keep_unused: bool = True) -> None:
        in_use = {one.adapter for one in self._jobs.values() if one.started and one.spec.id == model.spec.id}
        self._models.adapters.trim(model, in_use, keep_unused=keep_unused)

    def _free_memory(self) -> None:
        """Free models, adapters and text encodings that no job needs."""
        while self._models.evict_one(self.models_in_use(), keep=False):
            pass
        for model in self._models.loaded.values():
            self._trim_adapters(model, keep_unused=False)
            model.text_cache.clear()
        empty_cache(self._device)

    def _drop_non_finite(self, task_calls: list[TaskCall]) -> list[TaskCall]:
        """Fail the jobs whose latents are not finite; waits for the device once for all of them."""
        finite = torch.stack([task_call.parked_call.finite() for task_call in task_calls]).tolist()
        for (engine_job, task, _), ok in zip(task_calls, finite, strict=True):
            if not ok and not task.done:
                task.resume(self._device, non_finite_error())
                self._after_resume(engine_job, task)
        return [task_call for task_call, ok in zip(task_calls, finite, strict=True) if ok and not task_call.task.done]

    def _text_cache(self, engine_job: EngineJob, parked_call: ParkedCall) -> TextCache | None:
        """Return the cache for the output of a call, None if it must not be cached."""
        encodes = parked_call.shared_method.stage is Stage.ENCODE
        # The last bits of an encoding depend on its batch mates, which reproducible jobs must not.
        if not encodes or engine_job.pad_to is not None or engine_job.model is None:
            return None
        return engine_job.model.text_cache

    def _resume_cached(self, engine_job: EngineJob, task: ImageTask) -> None:
        """Resume a task while its next output is cached."""
        while task.parked_call is not None and (cache := self._text_cache(engine_job, task.parked_call)) is not None:
            output = cache.get(task.parked_call)
            if output is None:
                break
            task.resume(self._device, output)
        self._timer.note_progress()  # a pipeline's own code can be slow: GLM-Image generates tokens for a whole image

    def _after_resume(self, engine_job: EngineJob, task: ImageTask) -> None:
        """Report the outputs of a done task; finish a job that is done or failed; compare candidates that all wait."""
        number, candidates = engine_job.tasks.index(task), engine_job.candidates
        if task.parked_call is not None and (engine_job.job.previews or candidates is not None):
            task.parked_call.preview = engine_job.steps[number].previewing
        if task.scored_step is not None and engine_job.claim_key in self._jobs:
            return self._compare(engine_job)
        if not task.done or engine_job.claim_key not in self._jobs:
            return
        if task.error is not None:
            return self.finish(engine_job, task.error)
        if task.result is None:  # a candidate that was dropped, or whose outputs have been reported
            return
        outputs, first_index = task.result, number * len(task.result)
        if candidates is not None:
            if not candidates.is_settled or len(outputs) > 1:
                message = "best_of: its images ended before they could be compared"
                return self.finish(engine_job, InferenceFailed(message, param="best_of"))
            first_index, score = candidates.state.kept.index(number), candidates.state.score_of(number)
            outputs = [replace(one, candidate=number, score=score) for one in outputs]
        self._report_progress([engine_job])
        for index, output in enumerate(outputs, first_index):
            self._events.on_event(protocol.OutputReady(engine_job.claim_key, index, output))
        task.result = None
        if (record := engine_job.records[number]) is not None:
            record.end()
        if all(one.done and one.result is None and one.error is None for one in engine_job.tasks):  # all are reported
            self.finish(engine_job)

    def _compare(self, engine_job: EngineJob) -> None:
        """Drop the worst candidates of a job if all wait for it, and continue the others."""
        tasks, verdict = engine_job.tasks, engine_job.compare_candidates()
        if verdict is None:
            return
        self._events.on_event(protocol.CandidatesDropped(engine_job.claim_key, len(verdict.kept)))
        for number in verdict.kept:
            tasks[number].resume(self._device)
            self._resume_cached(engine_job, tasks[number])
        for number in verdict.kept:
            self._after_resume(engine_job, tasks[number])

    def _report_progress(self, engine_jobs: Iterable[EngineJob]) -> None:
        for engine_job in engine_jobs:
            if engine_job.progressed and engine_job.claim_key in self._jobs:
                engine_job.progressed = False
                for index, pixels in engine_job.take_previews():
                    self._events.on_event(protocol.PreviewReady(engine_job.claim_key, index, pixels))
                self._events.on_event(protocol.JobProgress(engine_job.claim_key, *engine_job.progress()))
