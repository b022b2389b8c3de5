"""Runs a family of the second grid: its jobs together through a whole engine, and each by itself by diffusers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.engine import EngineHarness, a_spec
from parity.more.families import Family
from parity.running import Joining, as_floats, compare, plain_results


@dataclass(frozen=True)
class Finding:
    """What became of a family: its images per denoiser forward, and the largest difference to plain diffusers.

    `reason` says why no forward was shared, or why its jobs failed; then there is no difference.
    """

    rows: list[int]
    difference: float | None
    reason: str | None


def run(family: Family, folder: Path) -> Finding:
    """Run a family in `folder` and check its expectations; raises `AssertionError`."""
    with family.around(), as_floats():
        source = folder if (folder / "model_index.json").exists() else family.build(family.tiny, folder)
        recorder = _together(family, source)
        jobs = [*family.first_jobs(), *family.joining_jobs()]
        finished = [recorder.finished[job.id] for job in jobs]
        errors = {one.claim_key: one.error.message for one in finished if one.error is not None}
        if errors:
            assert family.fault, errors
            return Finding(recorder.rows, None, f"{family.fault}: {next(iter(errors.values()))}")
        largest = compare(recorder, plain_results(source, jobs))
    reasons = [one.batching.solo_reason for one in finished if one.batching.max_jobs == 1]
    shared = len(reasons) < len(jobs)
    assert shared or not family.fused, f"{recorder.rows}: {reasons}"
    return Finding(recorder.rows, largest, None if shared else next(iter(reasons)))


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
