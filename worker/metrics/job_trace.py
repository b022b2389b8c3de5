"""The spans of a job in its worker, made once at its end from the times that were noted on its way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from shared.errors import UnexpectedError
from shared.job import Job, Phase, State
from shared.job_record import Outcome
from shared.queue import Claim
from shared.runtime import tracing
from shared.runtime.tracing import Attributes, EndedSpan, SpanKind, TraceContext

_NS_PER_MS = 1_000_000


@dataclass
class UploadTimes:
    """When an output left the engine, was encoded, and was stored or failed."""

    begun_ns: int
    encoded_ns: int | None = None
    ended_ns: int | None = None

    def note_encoded(self) -> None:
        self.encoded_ns = time.monotonic_ns()

    def note_ended(self, _task: object) -> None:
        self.ended_ns = time.monotonic_ns()


@dataclass
class JobTimes:
    """When a claimed job reached each part of its way, in ns of a monotonic clock.

    `batch` is the span of its batch, if traces are on.
    """

    claimed_ns: int = field(default_factory=time.monotonic_ns)
    submitted_ns: int | None = None  # to the engine
    decoding_ns: int | None = None
    left_engine_ns: int | None = None
    settling_ns: int | None = None
    uploads: dict[int, UploadTimes] = field(default_factory=dict)  # by index of the output
    batch: TraceContext | None = None

    def note_phase(self, phase: Phase) -> None:
        """Note the beginning of a phase; called when it changes."""
        if phase is Phase.DECODING:
            self.decoding_ns = self.decoding_ns or time.monotonic_ns()
        elif phase is Phase.UPLOADING:
            self.left_engine_ns = time.monotonic_ns()

    def note_settling(self) -> None:
        self.settling_ns = time.monotonic_ns()

    def note_submitted(self) -> None:
        self.submitted_ns = time.monotonic_ns()

    def begin_upload(self, index: int) -> UploadTimes:
        self.uploads[index] = UploadTimes(time.monotonic_ns())
        return self.uploads[index]


@dataclass(frozen=True)
class JobSpans:
    """The spans of a job that was settled with `outcome`, or whose claim ended as `lost` or `released`.

    `offset_ns` leads from the clock of `times` and `ended_ns` to the time since the epoch.
    """

    claim: Claim
    times: JobTimes
    outcome: Outcome | None
    ended_as: str
    worker: str
    ended_ns: int = field(default_factory=time.monotonic_ns)
    offset_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    def record(self) -> None:
        """Add them to the job's trace."""
        if tracing.enabled():
            tracing.record(self.job(), self.claim.job.trace)

    def job(self) -> EndedSpan:
        """Return the span of the job with its children: `queue`, `claim`, `slots`, `upload` per output, `settle`."""
        times, error = self.times, self._error()
        queued_ns = times.claimed_ns - self.claim.queued_ms * _NS_PER_MS
        queue = self._span("queue", queued_ns, times.claimed_ns)
        claim = self._span("claim", times.claimed_ns, times.submitted_ns)
        uploads = [self._upload(index, upload) for index, upload in sorted(times.uploads.items())]
        slots = () if times.submitted_ns is None else (self._slots(times.submitted_ns),)
        settle = () if times.settling_ns is None else (self._span("settle", times.settling_ns, None),)
        attributes = _job_attributes(self.claim.job) | {
            "fusequeue.signature": self.claim.signature,
            "fusequeue.epoch": self.claim.epoch,
            "fusequeue.worker": self.worker,
            "fusequeue.state": self.ended_as,
            "error.type": error,
        }
        job = self._span("job", queued_ns, None, attributes)
        return replace(job, kind=SpanKind.CONSUMER, error=error, children=(queue, claim, *slots, *uploads, *settle))

    def _error(self) -> str | None:
        """Return the code of the job's error; its message can have text of the client."""
        if self.outcome is not None and self.outcome.error is not None:
            return self.outcome.error.code
        return UnexpectedError.code if self.ended_as == State.FAILED else None

    def _slots(self, submitted_ns: int) -> EndedSpan:
        """Return the job's time in the engine: its wait for the model, its forwards and its decoding."""
        times, outcome = self.times, self.outcome
        inference_ms = None if outcome is None else outcome.timings.inference_ms
        left_ns = times.left_engine_ns or self.ended_ns
        started_ns = submitted_ns if inference_ms is None else max(submitted_ns, left_ns - inference_ms * _NS_PER_MS)
        waited_for_load = outcome is not None and outcome.timings.load_ms is not None
        load = (self._span("load", submitted_ns, started_ns),) if waited_for_load else ()
        decode = () if times.decoding_ns is None else (self._span("decode", times.decoding_ns, left_ns),)
        forwards = self._span("forwards", started_ns, times.decoding_ns or left_ns, self._batching())
        forwards = replace(forwards, links=() if times.batch is None else (times.batch,))
        slots = self._span("slots", submitted_ns, left_ns, {"fusequeue.slots": self.claim.job.slots})
        return replace(slots, children=(*load, forwards, *decode))

    def _batching(self) -> Attributes:
        if self.outcome is None:
            return {}
        batching, progress = self.outcome.batching, self.outcome.progress
        return {
            "fusequeue.forwards": batching.forwards,
            "fusequeue.steps": progress.step,
            "fusequeue.steps.computed": progress.step - batching.skipped_steps,
            "fusequeue.steps.skipped": batching.skipped_steps,
            "fusequeue.rows.mean": batching.mean_rows,
            "fusequeue.rows.by_forward": [f"{rows} x {times}" for rows, times in batching.rows_by_forward],
            "fusequeue.batch.max_jobs": batching.max_jobs,
            "fusequeue.solo_reason": batching.solo_reason,
            "fusequeue.device_seconds": self.outcome.device_seconds,
        }

    def _upload(self, index: int, upload: UploadTimes) -> EndedSpan:
        encode = self._span("encode", upload.begun_ns, upload.encoded_ns)
        span = self._span("upload", upload.begun_ns, upload.ended_ns, {"fusequeue.output": index})
        return replace(span, children=(encode,))

    def _span(self, name: str, start_ns: int, end_ns: int | None, attributes: Attributes | None = None) -> EndedSpan:
        """Return a span; without an end it lasted until the job's."""
        end_ns = max(start_ns, self.ended_ns if end_ns is None else end_ns)
        return EndedSpan(name, start_ns + self.offset_ns, end_ns + self.offset_ns, attributes or {})


def _job_attributes(job: Job) -> dict[str, str | int | None]:
    """Return what the job is: never its prompt, its metadata or a URL."""
    return {
        "fusequeue.job.id": job.id,
        "fusequeue.tenant": job.tenant,
        "fusequeue.model": job.model,
        "fusequeue.task": job.task.value,
        "fusequeue.priority": job.priority.value,
        "fusequeue.batch.id": job.batch_id,
        "fusequeue.width": job.width,
        "fusequeue.height": job.height,
        "fusequeue.images": job.n,
    }
