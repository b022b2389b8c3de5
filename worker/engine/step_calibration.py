"""Calibration of step caching: sample jobs of one model with many schedules, compared with jobs that skip no step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.config.step_schedules import (
    FEWEST_STEPS,
    CacheLevel,
    Extrapolated,
    Extrapolation,
    StepCaching,
    StepSchedule,
    computed_steps,
)
from shared.errors import InferenceFailed
from shared.job import Job
from worker.engine.checks.sample_jobs import default_size, sample_job
from worker.engine.outputs import Audio, Output
from worker.engine.protocol import OutputReady
from worker.engine.sample_engine import SampleEngine, sample_engine

LEAST_PSNR: Mapping[CacheLevel, float] = {CacheLevel.LIGHT: 45.0, CacheLevel.MEDIUM: 38.0, CacheLevel.STRONG: 30.0}
"""What each sample of a level's schedule must reach, in dB: differences at most visible side by side, or small."""

PROMPTS = ("a lighthouse on a rock at night", "two red boats beside a green house")
STEP_COUNTS = (20, 50)  # and the model's default
CANDIDATES = tuple(
    StepSchedule(every=every, order=order, of=of)
    for every, order, of in itertools.product((2, 3, 4, 5, 6), Extrapolation, get_args(Extrapolated))
)
HIGHEST_PSNR = 99.0  # of equal images


@dataclass(frozen=True)
class ScheduleError:
    """A schedule's lowest PSNR over all samples, and the share of steps that it computes."""

    schedule: StepSchedule
    psnr: float
    computed: float


def choose(measured: Sequence[ScheduleError]) -> dict[CacheLevel, ScheduleError]:
    """Return the schedule of each level: of those that are good enough the one with the fewest steps, then the best.

    A level that none is good enough for is left out.
    """
    chosen = {}
    for level, least in LEAST_PSNR.items():
        good = [one for one in measured if one.psnr >= least]
        if good:
            chosen[level] = min(good, key=lambda one: (one.computed, -one.psnr))
    return chosen


def step_counts(spec: ModelSpec) -> tuple[int, ...]:
    """Return the numbers of steps to calibrate with; none for a model that skips none."""
    limits = spec.limits
    counts = {spec.defaults.steps, *(min(count, limits.max_steps) for count in STEP_COUNTS)}
    return tuple(sorted(count for count in counts if max(FEWEST_STEPS, limits.min_steps) <= count <= limits.max_steps))


def calibrate(spec: ModelSpec, configured: Settings, prompts: Sequence[str] = PROMPTS) -> list[ScheduleError]:
    """Measure all candidates in a new engine; raises the error of its first failed job."""
    counts = step_counts(spec)
    if not counts:
        raise InferenceFailed(f"model {spec.id!r} allows fewer than {FEWEST_STEPS} steps, of which none is skipped")
    lowest = dict.fromkeys(CANDIDATES, HIGHEST_PSNR)
    with sample_engine(spec, configured) as engine:
        for at, (steps, prompt) in enumerate(itertools.product(counts, prompts)):
            sample = sample_job(spec, spec.tasks[0], at, prompt, default_size(spec))
            sample = sample.model_copy(update={"refiner_start": None})  # its few steps are a loop of their own
            jobs = {
                schedule: sample.model_copy(update={"id": f"{at}-{number}", "steps": steps, "step_cache": schedule})
                for number, schedule in enumerate((None, *CANDIDATES))
            }
            results = _results(engine, list(jobs.values()), spec.max_batch)
            for schedule in CANDIDATES:
                found = psnr(results[jobs[schedule].id], results[jobs[None].id])
                lowest[schedule] = min(lowest[schedule], found)
    return [
        ScheduleError(one, found, sum(len(computed_steps(steps, one)) for steps in counts) / sum(counts))
        for one, found in lowest.items()
    ]


Values: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
"""Pixels of an image or video, or the samples of a sound, of -1 to 1."""


def _results(engine: SampleEngine, jobs: Sequence[Job], rows: int) -> dict[str, Values]:
    """Return the first output of each job; `rows` of them run at a time."""
    results: dict[str, Values] = {}
    for start in range(0, len(jobs), rows):
        for event in engine.run(jobs[start : start + rows]):
            if isinstance(event, OutputReady) and isinstance(event.output, Output):
                results.setdefault(event.claim_key, event.output.pixels)
            elif isinstance(event, OutputReady) and isinstance(event.output, Audio):
                results.setdefault(event.claim_key, event.output.samples)
    return results


def calibrated(caching: StepCaching, chosen: Mapping[CacheLevel, ScheduleError]) -> StepCaching:
    """Return a model's table with the chosen schedules; levels without one are no longer allowed."""
    allowed = [*(level.value for level in chosen), *(one for one in caching.allowed if one == "schedule")]
    values = {level.value: one.schedule for level, one in chosen.items()}
    default = caching.default if caching.default in allowed else "off"
    return StepCaching.model_validate({"default": default, "allowed": allowed, **values})


def psnr(one: Values, other: Values) -> float:
    """Return the peak signal-to-noise ratio of two images, videos or sounds in dB."""
    peak = 255 if one.dtype == np.uint8 else 1
    error = float(np.square(one.astype(np.float32) - other.astype(np.float32)).mean())
    return min(HIGHEST_PSNR, 10 * math.log10(peak**2 / error)) if error else HIGHEST_PSNR
