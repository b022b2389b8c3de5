"""Every architecture: an image that is stopped at half of its steps continues in another process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY
from parity.cells import Cell
from parity.grid import GRID
from parity.resuming import resumed_difference
from tiny.registry import torchvision_fault

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
def test_an_image_continues_bit_for_bit_in_another_process(
    cell: Cell, models_folder: Path, process: ProcessPoolExecutor, keep_continued: Callable[[str, object], None]
) -> None:
    if cell.needs_torchvision and (fault := torchvision_fault()):
        pytest.skip(fault)
    difference = resumed_difference(cell, models_folder / cell.tiny, process)
    assert difference == RESTARTS.get(cell.id, 0.0)
    keep_continued(cell.id, difference)
