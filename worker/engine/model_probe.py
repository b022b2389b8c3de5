"""Measures a model on its device: seconds of a forward by rows, and the memory that rows take."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass

from shared.config.models_file import Catalog, ModelSpec
from shared.config.settings import Settings
from shared.errors import FusequeueError, InferenceFailed
from shared.job import Job
from worker.engine.device import chosen_device, watch_memory
from worker.engine.engine import Engine
from worker.engine.fusion.self_check import sample_files, sample_job
from worker.engine.protocol import EngineEvent, EngineRequest, ForwardDone, JobFinished
from worker.engine.warm_up import row_counts

STEPS = 8
SAMPLES = 5  # a worker believes as many
MOST_REPEATS = 8
LOOK_EVERY_S = 0.5
PATIENCE_S = 1800.0  # for the jobs of one row count, loading included


@dataclass(frozen=True)
class Measured:
    """`seconds` is the median of a forward of so many rows; `peak_bytes` what it took beside the model, GPUs only."""

    rows: int
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Probed:
    """One model at its usual size. Rows above the last measured ones did not fit into memory, or are not allowed."""

    model: str
    device: str
    shape: str
    measured: tuple[Measured, ...]

    @property
    def seconds(self) -> dict[int, float]:
        return {one.rows: one.seconds for one in self.measured}

    @property
    def row_bytes(self) -> int | None:
        """Memory of one row more, None where it cannot be told."""
        first, last = self.measured[0], self.measured[-1]
        if first.peak_bytes is None or last.peak_bytes is None or last.rows == first.rows:
            return None
        return round((last.peak_bytes - first.peak_bytes) / (last.rows - first.rows))


def probe(spec: ModelSpec, settings: Settings) -> Probed:
    """Measure one model, on an engine of its own; raises what its first job fails with."""
    gauge = _Gauge()
    engine = Engine(Catalog((spec,)), gauge, settings)
    watch = watch_memory(chosen_device(settings.device))
    engine.start()
    try:
        engine.warm_up()
        measured: list[Measured] = []
        for rows in row_counts(spec.max_batch):
            peak = watch()
            seconds = _measure(engine, gauge, spec, rows)
            if seconds is None:
                break
            measured.append(Measured(rows, seconds, peak()))
    finally:
        engine.stop(PATIENCE_S)
    if not measured or gauge.last is None:
        raise InferenceFailed(f"model {spec.id!r}: its jobs met no denoiser")
    return Probed(spec.id, gauge.last.device, gauge.last.shape, tuple(measured))


def _measure(engine: Engine, gauge: _Gauge, spec: ModelSpec, rows: int) -> float | None:
    """Return the median seconds of a forward of `rows` rows, None if there were none: they do not fit."""
    gauge.seconds.clear()
    for repeat in range(MOST_REPEATS):
        gauge.expect(rows)
        jobs = [_job(spec, repeat * rows + at) for at in range(rows)]
        engine.submit(*(EngineRequest(f"{job.id}-of-{rows}", job, spec, sample_files(job)) for job in jobs))
        gauge.wait(engine)
        found = gauge.seconds.get(rows, [])
        if not found:
            return None
        if len(found) > SAMPLES:
            break
    return statistics.median(found[1:] or found)  # the first of its kind sets things up


def _job(spec: ModelSpec, at: int) -> Job:
    job = sample_job(spec, spec.tasks[0], at, f"a lighthouse, number {at}", (spec.defaults.width, spec.defaults.height))
    steps = max(spec.limits.min_steps, min(STEPS, spec.limits.max_steps))
    return job.model_copy(update={"steps": steps, "frames": spec.usual_frames if job.task.makes_video else 1})


class _Gauge:
    """The engine's listener: keeps the seconds of forwards by rows, and knows when all jobs have ended."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {}
        self.last: ForwardDone | None = None
        self._left = 0
        self._error: FusequeueError | None = None
        self._ended = threading.Event()

    def expect(self, jobs: int) -> None:
        self._left = jobs
        self._ended.clear()

    def wait(self, engine: Engine) -> None:
        """Wait for all jobs; raises the error of one that failed."""
        give_up = time.monotonic() + PATIENCE_S
        while not self._ended.wait(LOOK_EVERY_S):
            if engine.join(0) or time.monotonic() > give_up:
                raise InferenceFailed("the engine broke down, or took too long; the log says more")
        if self._error is not None:
            raise self._error

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case ForwardDone():
                self.last = event
                self.seconds.setdefault(event.rows + event.padding, []).append(event.seconds)
            case JobFinished(error=error):
                self._error = self._error or error
                self._left -= 1
                if not self._left:
                    self._ended.set()
