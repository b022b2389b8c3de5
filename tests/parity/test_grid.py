"""Every architecture: jobs of all kinds share forwards, and every image equals the one of the solo job."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY
from parity.cells import Cell
from parity.grid import GRID
from parity.running import run

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, of what it uses of itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # and of Chroma's imports
    pytest.mark.timeout(400),  # the default of 120 s is too short for a row of Helios on two busy cores
]


def _params() -> list[object]:
    return [pytest.param(cell, id=cell.id, marks=[] if cell.quick else pytest.mark.parity) for cell in GRID]


@pytest.mark.parametrize("cell", _params())
def test_every_job_of_a_mixed_batch_gets_the_image_of_the_solo_job(
    cell: Cell, models_folder: Path, keep: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    """Mixed steps, guidance, prompts, tasks and arrivals in shared forwards change no image."""
    if cell.needs_torchvision and importlib.util.find_spec("torchvision") is None:
        pytest.skip("its processor needs torchvision: run `make parity`, which installs it")
    whole_page = request.config.getoption("--compatibility-page", default=None) is not None
    keep(cell.id, run(cell, models_folder / cell.tiny, variants=whole_page))


def test_every_row_has_a_unique_name() -> None:
    """The page is built by name."""
    assert len({cell.id for cell in GRID}) == len(GRID)
