"""Where tiny pipelines are kept for a run, and where its page goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if "FUSEQUEUE_TORCHVISION" in os.environ:  # `make parity` sets it; to be found before transformers is imported
    from tiny import torchvision_shim

    torchvision_shim.make_importable(Path(os.environ["FUSEQUEUE_TORCHVISION"]).resolve())

OPTION = "--compatibility-page"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="write what a run of the whole grid found to this page")


@pytest.fixture(scope="session")
def shelf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="session")
def keep(request: pytest.FixtureRequest) -> Iterator[Callable[[str, object], None]]:
    """Takes the outcome of each cell, and writes the page when all cells have one."""
    from parity.grid import GRID
    from parity.page import write

    outcomes: dict[str, object] = {}
    yield outcomes.__setitem__
    page = request.config.getoption(OPTION, default=None)
    if page is not None and outcomes.keys() == {cell.id for cell in GRID}:
        write(page, GRID, outcomes)  # type: ignore[arg-type]
