"""Every architecture: an image that is stopped at half of its steps continues in another engine, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from harness.checkpoints import resumed, run_with_checkpoints
from harness.engine import DIFFUSERS_AND_NUMPY, a_spec
from parity.cells import Cell
from parity.grid import GRID
from parity.running import as_floats
from tiny.registry import torchvision_fault

from shared.config.model_index import index_file
from shared.job import Job

pytestmark = [
    pytest.mark.usefixtures("shared_models"),
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.timeout(400),
]

RESTARTS: Mapping[str, str] = {
    "modular-echo: Echo (with sound)": "it has steps without a noise scheduler, in its pipeline's own code"
}
"""Rows whose images have no checkpoints and begin anew, and why."""


def one_job_of_each_task(cell: Cell) -> Iterator[Job]:
    """Yield the first job of each task that has two steps or more."""
    tasks = set()
    for job in cell.first_jobs():
        if job.task not in tasks and job.computed_steps_per_image > 1:
            tasks.add(job.task)
            yield job


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell,
            id=cell.id,
            marks=[pytest.mark.parity, *([pytest.mark.vision] if cell.needs_torchvision else [])],
        )
        for cell in GRID
    ],
)
def test_an_image_continues_bit_for_bit(cell: Cell, models_folder: Path) -> None:
    if cell.needs_torchvision and (fault := torchvision_fault()):
        pytest.skip(fault)
    folder = models_folder / cell.tiny
    with cell.around(), as_floats():
        source = folder if index_file(folder) is not None else cell.build(cell.tiny, folder)
        spec = a_spec(source, tasks=cell.tasks, **({"max_batch": 16} | dict(cell.spec)))
        for job in one_job_of_each_task(cell):
            if cell.id in RESTARTS:
                events = run_with_checkpoints(spec, job).checkpoints
                assert not any(image for event in events for image in event.images)
                assert events[-1].reason == RESTARTS[cell.id]
                continue
            outcome = resumed(spec, job)
            whole, rest = outcome.steps_computed
            assert outcome.difference == 0.0, f"{job.id}: {outcome.difference}"
            assert outcome.resumed.finished[job.id].resumed_steps > 0
            assert rest < whole
