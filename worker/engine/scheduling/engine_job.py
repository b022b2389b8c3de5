"""An engine job, a claimed job inside the engine: its image tasks, their batching figures, and how it ends."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import structlog

from shared.config.candidates import Verdict
from shared.errors import JobError
from shared.job_record import MAX_ROW_CHANGES, BatchingStats, FieldWarning
from shared.signature import signature
from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.file_format import CheckpointRefused, of_dropped, read
from worker.engine.checkpoints.identity import identity_of
from worker.engine.checkpoints.mark_state import latest
from worker.engine.checkpoints.policy import is_due
from worker.engine.checkpoints.task_record import TaskRecord
from worker.engine.engine_status import shape_key
from worker.engine.fusion.image_task import ImageTask
from worker.engine.lora.per_row import adapter_key
from worker.engine.outputs import Pixels
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.protocol import EngineRequest, JobFinished
from worker.engine.scheduling.device_work import DeviceWork
from worker.engine.scheduling.job_candidates import JobCandidates

log = structlog.get_logger()

# Rows of a reproducible job's forwards, the same at any load. A solo job pays for all of them: four took 3.1 to 4.1
# times as long as one on a GPU, two 1.6 to 1.7 times.
REPRODUCIBLE_ROWS = 2


class EngineJob:
    """One claim of a job. `arrival` numbers them; `start_by_s` is the latest start, infinite without a deadline.

    Jobs of one `batch_group` can be batch mates; the batch keys of their calls decide what is fused. The forwards of a
    reproducible job are padded with copies to `pad_to` calls, or are solo. A job that has its `model` but has not
    started waits for adapters.
    """

    def __init__(self, request: EngineRequest, arrival: int, inputs: InputImages) -> None:
        self.request = request
        self.claim_key = request.claim_key
        self.job = request.job
        self.spec = request.spec
        self.arrival = arrival
        self.priority_rank = self.job.priority.rank
        self.start_by_s = math.inf if request.start_by_s is None else request.start_by_s
        self.batch_group = self.claim_key if request.must_run_solo else signature(self.job)
        self.shape = shape_key(self.job)
        self.pad_to = min(REPRODUCIBLE_ROWS, self.spec.max_batch) if self.job.reproducible else None
        self.inputs = inputs
        self.adapter = adapter_key(self.job.adapters)
        self.model: LoadedModel | None = None
        self.tasks: list[ImageTask] = []
        self.steps: list[StepCounter] = []  # of each task
        self.records: list[TaskRecord | None] = []  # of each task
        best_of = self.job.best_of
        self.candidates = None if best_of is None else JobCandidates(best_of.candidates, best_of.keep)
        self.checkpoint_fault: str | None = None  # why it can have none
        self.is_handed_over = False  # it ends when its last checkpoint is written
        self.unwritten_checkpoints = 0
        self._safe_s = 0.0  # `device_seconds` at its last checkpoint
        self.progressed = False
        self.mismatched = False
        self.excluded_bulk = False
        self.decoding_reported = False
        self.waited_for_load = False
        self.device_seconds = 0.0  # its share
        self.device_work = DeviceWork()
        self._warnings = inputs.warnings
        self._arrived_s = time.monotonic()
        self._started_s: float | None = None
        self._preempted_s = 0.0
        self._preempted_since_s: float | None = None
        self._forwards = 0
        self._rows = 0
        self._rows_by_forward: list[tuple[int, int]] = []
        self._max_jobs = 1

    @property
    def started(self) -> bool:
        return bool(self.tasks)

    def preempted_s(self, now_s: float) -> float:
        """Return for how long jobs of higher priority or less slack have preempted this one in total."""
        return self._preempted_s + (0.0 if self._preempted_since_s is None else now_s - self._preempted_since_s)

    def set_preempted(self, preempted: bool, now_s: float) -> None:
        """Record whether jobs of higher priority or less slack run instead of this one."""
        self._preempted_s = self.preempted_s(now_s)
        self._preempted_since_s = now_s if preempted else None

    def create_tasks(self, model: LoadedModel) -> None:
        """Create an image task for each image of the job that begins, without starting it."""
        self._started_s = time.monotonic()
        self._warnings += model.warnings(self.job)
        for warning in model.adapters.warnings(self.adapter):
            self._warnings += (FieldWarning(param="adapters", message=f"adapters: {warning}"),)
        for index, checkpoint in enumerate(self._checkpoints(model)):
            steps, record = StepCounter(self._note_progress), None
            if self.checkpoint_fault is None:
                record = TaskRecord(model.device, steps, checkpoint)
            self.steps.append(steps)
            self.records.append(record)
            self.tasks.append(model.image_task(self.job, index, self.inputs, steps, record))
        self.request = replace(self.request, checkpoints=())  # they have been read
        self._pass_marks()

    def _checkpoints(self, model: LoadedModel) -> list[Checkpoint | None]:
        """Return the checkpoints from which the images continue, None for one that begins anew.

        Why the job can have none is in `checkpoint_fault`.
        """
        files = [*self.request.checkpoints, *[None] * self.job.slots][: self.job.slots]
        self.checkpoint_fault = model.resume_fault(self.job)
        if self.request.checkpoint_s is None and not any(files):
            self.checkpoint_fault = "its request has no checkpoint_s"
        found = [None if file is None else self._read(index, file, model) for index, file in enumerate(files)]
        return found if self.candidates is None else self._of_last_mark(found, self.candidates)

    def _read(self, index: int, file: bytes, model: LoadedModel) -> Checkpoint | None:
        reason = self.checkpoint_fault
        if reason is None:
            try:
                return read(file, identity_of(model.fingerprint, self.job, index, model.device))
            except CheckpointRefused as error:
                reason = f"the checkpoint {error}"
        self._log_refusal(index, reason)
        return None

    def _log_refusal(self, index: int, reason: str) -> None:
        log.warning("checkpoint_refused", job_id=self.job.id, image=index, reason=reason)

    def _of_last_mark(self, found: Sequence[Checkpoint | None], candidates: JobCandidates) -> list[Checkpoint | None]:
        """Continue after the last mark that any checkpoint knows; those that know of other scores are refused."""
        known = latest([None if one is None else one.marks for one in found], self.job.slots)
        state = candidates.state = known or candidates.state
        agreeing = list(found)
        for index, one in enumerate(found):
            if index in state.dropped_steps:
                agreeing[index] = of_dropped(state.dropped_steps[index], state)
            elif one is not None and one.marks != state:
                self._log_refusal(index, "the checkpoint has other marks than that of another candidate")
                agreeing[index] = None
        return agreeing

    def _pass_marks(self) -> None:
        """End the candidates that have been dropped; the others do not wait at marks that are past."""
        if self.candidates is None:
            return
        for steps in self.steps:
            steps.last_mark = self.candidates.state.step
        for number in self.candidates.state.dropped_steps:
            self.tasks[number].abort()

    def compare_candidates(self) -> Verdict | None:
        """Drop the worst candidates if all wait for it, and return which go on; None otherwise."""
        verdict = None if self.candidates is None else self.candidates.compare(self.tasks)
        if verdict is not None:
            self._pass_marks()
        return verdict

    @property
    def checkpoint_due(self) -> bool:
        step, total = self.progress()
        return is_due(self.request.checkpoint_s, self.device_seconds - self._safe_s, total - step)

    def note_checkpoint(self) -> None:
        """Record that a checkpoint is taken now."""
        self._safe_s = self.device_seconds
        self.unwritten_checkpoints += 1

    @property
    def resumed_steps(self) -> int:
        """Steps of all images that were not computed again."""
        ended, records = self._ended, [(at, record) for at, record in enumerate(self.records) if record is not None]
        return sum(ended[at] if at in ended and record.replaying else record.resumed_steps for at, record in records)

    def _note_progress(self) -> None:
        self.progressed = True

    @property
    def _ended(self) -> Mapping[int, int]:
        """The steps of the candidates that were dropped."""
        return {} if self.candidates is None else self.candidates.state.dropped_steps

    def progress(self) -> tuple[int, int]:
        """Return the steps done and all steps, over all images; an image that has not begun counts like the longest.

        Of candidates that were dropped, all steps are those done.
        """
        longest = max((steps.total for steps in self.steps), default=0)
        ended = self._ended
        done = [ended.get(index, steps.step) for index, steps in enumerate(self.steps)]
        return sum(done), sum(ended.get(index, steps.total or longest) for index, steps in enumerate(self.steps))

    def _steps_of_request(self, skipped: int) -> float:
        """Return how many of the steps that its request names were computed of each image.

        A pipeline takes them once for each tile or chunk of a video.
        """
        computed = self.progress()[0] - skipped - self.resumed_steps
        repeats = max((steps.total for steps in self.steps), default=0) / self.job.steps
        return computed / self.job.slots / max(1.0, repeats)

    def take_previews(self) -> list[tuple[int, Pixels]]:
        """Return the previews since the last call, each with the index of its image.

        Of candidates only those of the kept ones, once the others are dropped: they have the indexes of results then.
        """
        images: Sequence[int] = range(len(self.steps))
        if self.candidates is not None:
            images = self.candidates.state.kept if self.candidates.is_settled else ()
        previews = [(at, pixels) for at, image in enumerate(images) for pixels in self.steps[image].previews]
        for steps in self.steps:
            steps.previews.clear()
        return previews

    @property
    def kept_bytes(self) -> int:
        """Memory of the outputs that step caching keeps; can be read on any thread."""
        return sum(task.step_cache.nbytes for task in list(self.tasks) if task.step_cache is not None)

    def record_forward(self, rows: int, jobs: int) -> None:
        """Count a denoiser forward that the job took part in."""
        self._forwards += 1
        self._rows += rows
        self._max_jobs = max(self._max_jobs, jobs)
        before, times = self._rows_by_forward[-1] if self._rows_by_forward else (0, 0)
        if before == rows:
            self._rows_by_forward[-1] = (rows, times + 1)
        elif len(self._rows_by_forward) <= MAX_ROW_CHANGES:  # one more: later forwards do not count as the last kept
            self._rows_by_forward.append((rows, 1))

    def finished(self, error: JobError | None, canceled: bool) -> JobFinished:
        """Return the last event of the job."""
        now, started = time.monotonic(), self._started_s
        skipped = sum(task.step_cache.skipped for task in self.tasks if task.step_cache is not None)
        batching = BatchingStats(
            forwards=self._forwards,
            max_jobs=self._max_jobs,
            mean_rows=round(self._rows / self._forwards, 2) if self._forwards else 1.0,
            skipped_steps=skipped,
            rows_by_forward=tuple(self._rows_by_forward[:MAX_ROW_CHANGES]),
            dropped=() if self.candidates is None else self.candidates.state.dropped,
            solo_reason=None if self._max_jobs > 1 else self._solo_reason(),
        )
        return JobFinished(
            claim_key=self.claim_key,
            error=error,
            canceled=canceled,
            batching=batching,
            load_ms=round(1000 * ((started or now) - self._arrived_s)) if self.waited_for_load else None,
            inference_ms=None if started is None else round(1000 * (now - started)),
            device_seconds=round(self.device_seconds, 6),
            warnings=self._warnings,
            device_times=self.device_work.times(self._steps_of_request(skipped)),
            resumed_steps=self.resumed_steps,
        )

    def _solo_reason(self) -> str:
        rows = self.pad_to or self.spec.max_batch
        if self.request.must_run_solo:
            return "ran solo because a worker was lost while running it"
        if self.model is not None and self.model.solo_reason is not None:
            return self.model.solo_reason
        if self.job.reproducible and self.model is not None and not self.model.exact:
            return "reproducible jobs of this model run solo: its rules can let other rows change the last bits"
        if not self._forwards:
            return "its pipeline ran no denoiser that jobs share"
        if self.job.slots >= rows:
            return f"its own images fill a forward of {rows} rows"
        if self.mismatched:
            return "tensor shapes or adapters of other jobs did not match, or memory held no more rows"
        if self.excluded_bulk:
            return "bulk jobs would have slowed its forwards down"
        return "no other job arrived in time"
