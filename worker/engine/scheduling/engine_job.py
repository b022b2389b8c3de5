"""A job inside the engine: its pictures, what they took part in, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Hashable

from shared.errors import JobError
from shared.job import BatchingStats
from shared.signature import signature
from worker.engine.fusion.image_task import ImageTask
from worker.engine.lora.per_row import adapter_key
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.protocol import EngineRequest, JobFinished, Pixels, shape_key
from worker.engine.scheduling.selection_policy import URGENCY

# Rows of a reproducible job's forwards, fewer only where the model allows fewer: few enough to be cheap for a
# lone job, and the same whatever the load.
REPRODUCIBLE_ROWS = 4

# A VAE's activations grow with the pixels of all rows: so many pixels at once, at most.
DECODE_PIXELS = 4 * 1024 * 1024


class EngineJob:
    """One job, from `begin` until all its pictures are done or it is thrown out. `age` orders by arrival.

    `awaits` is a loaded model of which the job's adapters are still to come.
    """

    def __init__(self, seat: EngineRequest, age: int, inputs: InputImages) -> None:
        self.seat = seat
        self.age = age
        self.urgency = URGENCY[seat.job.priority]
        self.cohort = _cohort(seat)
        self.shape = shape_key(seat.job)
        self.inputs = inputs
        self.adapter = adapter_key(seat.job.adapters)
        self.awaits: LoadedModel | None = None
        self.pictures: list[ImageTask] = []
        self.delivered: set[int] = set()
        self.changed = False
        self.met_misfit = False
        self.went_first = False
        self.told_decoding = False
        self.gpu_seconds = 0.0
        self.forward_s = 0.0  # its last one
        self._rate = 0.0  # pictures a second, were all forwards as that one
        self._steps: list[StepCounter] = []
        self._arrived_s = time.monotonic()
        self._loaded_s: float | None = None
        self._waited_for_load = False
        self._aside_s = 0.0
        self._aside_since: float | None = None
        self._unfused: str | None = None
        self._forwards = 0
        self._rows = 0
        self._max_jobs = 1

    @property
    def key(self) -> str:
        return self.seat.claim_key

    @property
    def fixed_rows(self) -> int | None:
        """The number of calls that each of its forwards is filled up to, None for as many as there are."""
        return min(REPRODUCIBLE_ROWS, self.seat.spec.max_batch) if self.seat.job.reproducible else None

    @property
    def decoded_at_once(self) -> int:
        """How many pictures of its size are decoded at once, at most."""
        return max(1, DECODE_PIXELS // (self.seat.job.width * self.seat.job.height * self.seat.job.frames))

    @property
    def started(self) -> bool:
        return bool(self.pictures)

    def in_line(self, now_s: float) -> float:
        """Return how many pictures wait or run here, by Little's law: as many as come out while one goes through."""
        since_s = self.seat.queued_since_s
        return self._rate * max(0.0, now_s - (self._arrived_s if since_s is None else since_s))

    def aside_s(self, now_s: float) -> float:
        """Return for how long more urgent jobs have kept this one from going on, in all."""
        return self._aside_s + (0.0 if self._aside_since is None else now_s - self._aside_since)

    def set_aside(self, now_s: float) -> None:
        """Note that more urgent jobs go on instead of this one."""
        if self._aside_since is None:
            self._aside_since = now_s

    def take_up(self, now_s: float) -> None:
        """Note that this job goes on, or waits for others than more urgent ones."""
        self._aside_s = self.aside_s(now_s)
        self._aside_since = None

    def wait_for_load(self) -> bool:
        """Note that the model or its adapters have to be loaded; True the first time."""
        first, self._waited_for_load = not self._waited_for_load, True
        return first

    def begin(self, model: LoadedModel) -> None:
        """Make a picture, not yet started, for each that the job asks for."""
        self._loaded_s = time.monotonic()
        self._unfused = model.solo_reason
        for index in range(self.seat.job.n):
            steps = StepCounter(self._note_change)
            self._steps.append(steps)
            self.pictures.append(model.image_task(self.seat.job, index, self.inputs, steps))

    def _note_change(self) -> None:
        self.changed = True

    def progress(self) -> tuple[int, int]:
        """Return steps done and steps to do, over all pictures; those not begun count as the longest."""
        longest = max((steps.total for steps in self._steps), default=0)
        return sum(steps.step for steps in self._steps), sum(steps.total or longest for steps in self._steps)

    def steps_left(self, picture: ImageTask) -> int:
        """Return after how many steps a picture comes to its end; 0 where its pipeline tells none."""
        steps = self._steps[self.pictures.index(picture)]
        return steps.total - steps.step

    def is_previewing(self, picture: ImageTask) -> bool:
        """Return whether what a picture waits for is a preview of it."""
        return self._steps[self.pictures.index(picture)].previewing

    def take_previews(self) -> list[tuple[int, Pixels]]:
        """Return the previews made since the last time, each with the number of its picture."""
        found = [(index, pixels) for index, steps in enumerate(self._steps) for pixels in steps.previews]
        for steps in self._steps:
            steps.previews.clear()
        return found

    def charge(self, seconds: float) -> None:
        """Add the job's share of a forward's time."""
        self.gpu_seconds += seconds

    def note_forward(self, rows: int, jobs: int, seconds: float) -> None:
        """Count a denoiser forward that the job took part in."""
        self.forward_s, self._rate = seconds, rows / (self.seat.job.steps * max(seconds, 1e-9))
        self._forwards += 1
        self._rows += rows
        self._max_jobs = max(self._max_jobs, jobs)

    def error(self) -> JobError | None:
        return next((picture.error for picture in self.pictures if picture.error is not None), None)

    def done(self) -> bool:
        return self.started and all(picture.done for picture in self.pictures)

    def throw_out(self) -> None:
        for picture in self.pictures:
            picture.abort()

    def finish(self, error: JobError | None = None, canceled: bool = False) -> JobFinished:
        """Return how the job left."""
        now = time.monotonic()
        began = self._loaded_s
        load_ms = round(1000 * ((began or now) - self._arrived_s)) if self._waited_for_load else None
        return JobFinished(
            claim_key=self.key,
            error=error,
            canceled=canceled,
            batching=self._fusing(),
            load_ms=load_ms,
            inference_ms=None if began is None else round(1000 * (now - began)),
            gpu_seconds=self.gpu_seconds,
        )

    def _fusing(self) -> BatchingStats:
        return BatchingStats(
            forwards=self._forwards,
            max_jobs=self._max_jobs,
            mean_rows=round(self._rows / self._forwards, 2) if self._forwards else 1.0,
            solo_reason=None if self._max_jobs > 1 else self._solo_reason(),
        )

    def _solo_reason(self) -> str:
        job, spec = self.seat.job, self.seat.spec
        if self.seat.solo:
            return "ran alone after a lost worker"
        if self._unfused is not None:
            return self._unfused
        if job.n >= (self.fixed_rows or spec.max_batch):
            return f"its own pictures fill a forward, which holds {self.fixed_rows or spec.max_batch}"
        if self.met_misfit:
            return "its tensors or adapters did not fit a companion's, or memory held no more"
        if self.went_first:
            return "bulk jobs beside it would have made its forwards longer"
        return "no companion arrived"


def _cohort(seat: EngineRequest) -> Hashable:
    """Return what those share who may have company in each other: which of them do, their tensors decide."""
    job = seat.job
    if seat.solo:
        return seat.claim_key
    # Padding to a longer companion changes the last bits: reproducible jobs of other sizes are none.
    return (signature(job), (job.width, job.height) if job.reproducible else None)
