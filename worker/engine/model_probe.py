"""Measures a model on its device: seconds per forward and memory, by number of rows."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass

from shared.config.models_file import Catalog, ModelSpec
from shared.config.settings import Settings
from shared.errors import FusequeueError, InferenceFailed
from shared.job import Job
from worker.engine.device import choose_device, measure_peak_memory
from worker.engine.engine import Engine
from worker.engine.fusion.self_check import sample_files, sample_job
from worker.engine.protocol import EngineEvent, EngineRequest, ForwardDone, JobFinished
from worker.engine.warm_up import row_counts

STEPS = 8
SAMPLES = 5  # as many as a worker needs to trust a time
MAX_REPEATS = 8
POLL_S = 0.5
TIMEOUT_S = 1800.0  # for the jobs of one row count, including the load


@dataclass(frozen=True)
class Measured:
    """Median `seconds` of a forward of `rows` rows; `peak_bytes` is its memory in addition to the model, GPUs only."""

    rows: int
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Probed:
    """One model at its default size. Larger row counts than those measured do not fit or are not allowed."""

    model: str
    device: str
    shape: str
    measured: tuple[Measured, ...]

    @property
    def seconds(self) -> dict[int, float]:
        return {one.rows: one.seconds for one in self.measured}

    @property
    def row_bytes(self) -> int | None:
        """Memory of an additional row, None if it was not measured."""
        first, last = self.measured[0], self.measured[-1]
        if first.peak_bytes is None or last.peak_bytes is None or last.rows == first.rows:
            return None
        return round((last.peak_bytes - first.peak_bytes) / (last.rows - first.rows))


def probe(spec: ModelSpec, settings: Settings) -> Probed:
    """Measure a model in a new engine; raises the error of its first job."""
    recorder = _ForwardRecorder()
    engine = Engine(Catalog((spec,)), recorder, settings)
    device = choose_device(settings.device)
    engine.start()
    try:
        engine.warm_up()
        measured: list[Measured] = []
        for rows in row_counts(spec.max_batch):
            peak_bytes = measure_peak_memory(device)
            seconds = _measure(engine, recorder, spec, rows)
            if seconds is None:
                break
            measured.append(Measured(rows, seconds, peak_bytes()))
    finally:
        engine.stop(TIMEOUT_S)
    if not measured or recorder.last is None:
        raise InferenceFailed(f"model {spec.id!r}: its jobs ran no denoiser forward")
    return Probed(spec.id, recorder.last.device, recorder.last.shape, tuple(measured))


def _measure(engine: Engine, recorder: _ForwardRecorder, spec: ModelSpec, rows: int) -> float | None:
    """Return the median seconds of forwards of `rows` rows, None if so many do not fit into memory."""
    recorder.seconds.clear()
    for repeat in range(MAX_REPEATS):
        recorder.expect(rows)
        jobs = [_job(spec, repeat * rows + at) for at in range(rows)]
        engine.submit(*(EngineRequest(f"{job.id}-of-{rows}", job, spec, sample_files(job)) for job in jobs))
        recorder.wait(engine)
        samples = recorder.seconds.get(rows, [])
        if not samples:
            return None
        if len(samples) > SAMPLES:
            break
    return statistics.median(samples[1:] or samples)  # the first forward of a kind includes its set-up


def _job(spec: ModelSpec, at: int) -> Job:
    job = sample_job(spec, spec.tasks[0], at, f"a lighthouse, number {at}", (spec.defaults.width, spec.defaults.height))
    steps = max(spec.limits.min_steps, min(STEPS, spec.limits.max_steps))
    return job.model_copy(update={"steps": steps, "frames": spec.usual_frames if job.task.makes_video else 1})


class _ForwardRecorder:
    """The engine's `EngineEvents`: records seconds of forwards by rows, and waits for jobs to finish."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.last: ForwardDone | None = None
        self._unfinished = 0
        self._error: FusequeueError | None = None
        self._finished = threading.Event()

    def expect(self, jobs: int) -> None:
        self._unfinished = jobs
        self._finished.clear()

    def wait(self, engine: Engine) -> None:
        """Wait for all jobs; raises the error of a failed one."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self._finished.wait(POLL_S):
            if engine.join(0) or time.monotonic() > deadline:
                raise InferenceFailed(f"the engine failed, or its jobs took over {TIMEOUT_S:g} s; see the log")
        if self._error is not None:
            raise self._error

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case ForwardDone():
                self.last = event
                self.seconds.setdefault(event.rows + event.padding, []).append(event.seconds)
            case JobFinished(error=error):
                self._error = self._error or error
                self._unfinished -= 1
                if not self._unfinished:
                    self._finished.set()
