"""Jobs of one batch against the same jobs by themselves, on an engine with the same model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from harness.adapters import run_together
from harness.engine import EngineHarness, EventRecorder, a_job
from parity.running import TOLERANCE, as_floats

from shared.config.model_spec import ModelSpec
from shared.job import Job


def mixed_jobs() -> list[Job]:
    return [
        a_job("plain", prompt="a dog"),
        a_job("longer", prompt="a very large number of dogs, one behind the other", steps=6, guidance_scale=7.5),
        a_job("unguided", prompt="fog", steps=3, guidance_scale=1.0),
        a_job("two", prompt="a boat", n=2, steps=5),
        a_job("from-image", prompt="a hill", strength=0.5, steps=6),
    ]


def run_batch(spec: ModelSpec, jobs: Sequence[Job]) -> EventRecorder:
    """Run jobs that start together, their adapters loaded; their images are floats of 0 to 1."""
    with as_floats():
        adapted = any(job.adapters for job in jobs)
        recorder = run_together(spec, *jobs) if adapted else EngineHarness(spec).run(*jobs)
    failed = {job.id: error.message for job in jobs if (error := recorder.finished[job.id].error) is not None}
    assert not failed
    return recorder


def run_fused_and_solo(spec: ModelSpec, jobs: Sequence[Job]) -> EventRecorder:
    """Run jobs that start together, and compare their images with those of the same jobs by themselves."""
    fused = run_batch(spec, jobs)
    assert max(fused.rows) > len(jobs) // 2, "the jobs share forwards"
    for job in jobs:
        for key, expected in run_batch(spec, [job]).images.items():
            off = np.abs(fused.images[key] - expected).max()
            assert off <= TOLERANCE, f"{key} is off by {off}"
    return fused
