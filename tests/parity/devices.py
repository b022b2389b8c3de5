"""Cells over two devices: the largest difference to one device, or why the model cannot be split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from harness.engine import EngineHarness, EventRecorder, a_job, a_spec
from parity.cells import Cell
from parity.variants import Difference

from shared.job import Job

_MEASURED: dict[str, Difference] = {}


def devices_difference(cell: Cell, source: Path) -> Difference:
    """Run two jobs of the first cell of a model together on two ranks, and each by itself on one device."""
    if cell.tiny not in _MEASURED:
        _MEASURED[cell.tiny] = _measured(cell, source)
    return _MEASURED[cell.tiny]


def _measured(cell: Cell, source: Path) -> Difference:
    fields = {**next(iter(cell.jobs.values())), "n": 1}
    ours = [a_job(name, **fields) for name in ("first", "second")]
    together = _run(cell, source, ours, devices=2)
    if errors := [ended.error.message for ended in together.finished.values() if ended.error is not None]:
        assert "devices = 2: " in errors[0], errors
        return errors[0].partition("devices = 2: ")[2].partition("; ")[0]
    images = {key: image for job in ours for key, image in _run(cell, source, [job], devices=1).images.items()}
    return max(float(np.abs(together.images[key] - image).max()) for key, image in images.items())


def _run(cell: Cell, source: Path, jobs: list[Job], devices: int) -> EventRecorder:
    spec = a_spec(source, tasks=cell.tasks, **({"max_batch": 16} | dict(cell.spec) | {"devices": devices}))
    return EngineHarness(spec).run(*jobs)
