"""Cells with int8 weights and with compiled blocks: the largest difference, or why the model cannot have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from harness.engine import EngineHarness, EventRecorder, a_job, a_spec
from parity.cells import Cell
from parity.plain import PlainResult

from shared.config.request_limits import Limits
from shared.config.weight_formats import Quantization
from worker.engine.pipelines import compiling
from worker.engine.weights.requirements import is_installed

# Traces and guards as inductor does, whose C++ compiler takes minutes for all models.
COMPILER = "eager"

Difference = float | str  # the string is a reason


def int8_difference(cell: Cell, source: Path) -> Difference:
    """Run two jobs and a third with int8 weights together, and the two by themselves."""
    if not is_installed("torchao"):
        return "torchao is not installed"
    (_, fields), *others = cell.jobs.items()
    ours = [a_job(name, **{**fields, "n": 1}) for name in ("first", "second")]
    mates = [a_job("mate", **{**fields, **others[0][1], "n": 1})] if others else []
    harness = EngineHarness(_spec(cell, source, quantization=Quantization(denoiser="torchao-int8")))
    harness.submit(*ours, *mates)
    with harness.started():
        harness.recorder.wait_for([job.id for job in (*ours, *mates)])
        for job in ours:
            harness.submit(job.model_copy(update={"id": f"{job.id} solo"}))
            harness.recorder.wait_for([f"{job.id} solo"])
    if (reason := _error(harness.recorder, source)) is not None:
        return reason
    assert all(harness.recorder.finished[job.id].batching.max_jobs > 1 for job in ours), "int8: nothing was shared"
    images = harness.recorder.images
    return max(float(np.abs(images[job.id, 0] - images[f"{job.id} solo", 0]).max()) for job in ours)


def blocks_difference(cell: Cell, source: Path, plain: Mapping[tuple[str, int], PlainResult]) -> Difference:
    """Run the cell's first two jobs with compiled blocks, of which a call may not compile another one."""
    jobs = cell.first_jobs()[:2]
    limits = dict(cell.spec).get("limits", Limits(multiple_of=16)).model_copy(update={"max_images": 1})
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(compiling, "COMPILER", COMPILER)
        patch.setattr(compiling, "AFTER_WARM_UP", "fail_on_recompile")
        recorder = EngineHarness(_spec(cell, source, compile="blocks", max_batch=4, limits=limits)).run(*jobs)
    failed = [str(entry["error"]) for entry in logs if entry["event"] == "warm_up_failed"]
    if (reason := _error(recorder, source) or next(iter(failed), None)) is not None:
        return reason
    return max(float(plain[key].difference(output)) for key, output in recorder.outputs.items())


def _spec(cell: Cell, source: Path, **keys: Any) -> Any:
    return a_spec(source, tasks=cell.tasks, **({"max_batch": 16} | dict(cell.spec) | keys))


def _error(recorder: EventRecorder, source: Path) -> str | None:
    errors = [ended.error.message for ended in recorder.finished.values() if ended.error is not None]
    if any("Detected recompile" in error for error in errors):
        return "some calls have no graph after the warm-up, and run uncompiled"
    return errors[0].rpartition(f"{source}: ")[2].partition("; ")[0] if errors else None
