"""Runs a family of the second grid: its jobs together through a whole engine, and each by itself by diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engine import EngineHarness, EventRecorder, a_spec
from parity.more.families import Family
from parity.plain import PlainPipeline, PlainResult, PlainSound
from parity.running import TOLERANCE, Joining, as_floats

from shared.config.model_index import index_file
from shared.job import Job


@dataclass(frozen=True)
class Finding:
    """What became of a family: its images per denoiser forward, and the largest difference to plain diffusers.

    `reason` says why no forward was shared, None if some were. `amplified` is the effect of a nudge in plain diffusers,
    where that explains a difference above the tolerance.
    """

    rows: list[int]
    difference: float
    reason: str | None
    amplified: float = 0.0


def run(family: Family, folder: Path) -> Finding:
    """Run a family in `folder` and check its expectations; raises `AssertionError`."""
    with family.around(), as_floats():
        source = folder if index_file(folder) is not None else family.build(family.tiny, folder)
        recorder = _together(family, source)
        jobs = [*family.first_jobs(), *family.joining_jobs()]
        finished = [recorder.finished[job.id] for job in jobs]
        errors = {one.claim_key: one.error.message for one in finished if one.error is not None}
        assert not errors
        largest, amplified = compare(recorder, PlainPipeline(source), jobs)
    reasons = [one.batching.solo_reason for one in finished if one.batching.max_jobs == 1]
    shared = len(reasons) < len(jobs)
    assert shared or not family.fused, f"{recorder.rows}: {reasons}"
    return Finding(recorder.rows, largest, None if shared else next(iter(reasons)), amplified)


def compare(recorder: EventRecorder, plain: PlainPipeline, jobs: Sequence[Job]) -> tuple[float, float]:
    """Return the largest difference of the images of `jobs` to plain diffusers, and the effect that explains it."""
    largest = amplified = 0.0
    for job in jobs:
        expected: Sequence[PlainResult | PlainSound]
        if job.task.makes_audio:
            sounds = expected = plain.sounds(job)
            off = max(one.difference(recorder.sounds[job.id, index]) for index, one in enumerate(sounds))
        else:
            images = expected = plain.results(job)
            off = max(one.difference(recorder.outputs[job.id, index]) for index, one in enumerate(images))
        largest = max(largest, off)
        if not off <= TOLERANCE:
            effect = plain.amplification(job, expected)
            assert off <= effect, f"{off:.1e} off; a nudge of plain diffusers is {effect:.1e} off: {job}"
            amplified = max(amplified, effect)
    return largest, amplified


def _together(family: Family, source: Path) -> Joining:
    """Run the first jobs, and the others after the first forward; a model without a known denoiser reports none."""
    recorder = Joining()
    harness = EngineHarness(
        a_spec(source, tasks=family.tasks, **({"max_batch": 16} | dict(family.spec))), recorder=recorder
    )
    recorder.submit_more = lambda: harness.submit_prepared(*family.joining_jobs())
    harness.submit(*family.first_jobs())
    with harness.started():
        recorder.wait_for([job.id for job in family.first_jobs()])
        if recorder.submitted_after is None:
            recorder.submitted_after = 0
            recorder.submit_more()
        recorder.wait_for([job.id for job in family.joining_jobs()])
    return recorder
