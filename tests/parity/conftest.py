"""Fixtures: the folder of tiny pipelines, and the compatibility page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if "FUSEQUEUE_TORCHVISION" in os.environ:  # `make parity` sets it; needed before transformers is imported
    from tiny import torchvision_shim

    torchvision_shim.make_importable(Path(os.environ["FUSEQUEUE_TORCHVISION"]).resolve())

OPTION = "--compatibility-page"
MORE_OPTION = "--more-page"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="write the outcomes of a run of the whole grid to this page")
    parser.addoption(MORE_OPTION, type=Path, help="write the outcomes of a run of the second grid to this page")


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def keep(request: pytest.FixtureRequest) -> Iterator[Callable[[str, object], None]]:
    """Store the outcome of each cell, and write the page when all cells have one."""
    from parity.grid import GRID
    from parity.page import write

    outcomes: dict[str, object] = {}
    yield outcomes.__setitem__
    page = request.config.getoption(OPTION, default=None)
    if page is not None and outcomes.keys() == {cell.id for cell in GRID}:
        write(page, GRID, outcomes)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def kept_more(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, object]]]:
    """Hold the findings of the second grid and of random batch mates, and write their page when all are there."""
    from parity.more.page import is_complete, write

    kept: dict[str, dict[str, object]] = {"findings": {}, "mingled": {}}
    yield kept
    page = request.config.getoption(MORE_OPTION, default=None)
    if page is not None and is_complete(**kept):
        write(page, **kept)  # type: ignore[arg-type]


@pytest.fixture
def keep_more(kept_more: dict[str, dict[str, object]]) -> Callable[[str, object], None]:
    return kept_more["findings"].__setitem__


@pytest.fixture
def keep_mates(kept_more: dict[str, dict[str, object]]) -> Callable[[str, object], None]:
    return kept_more["mingled"].__setitem__
