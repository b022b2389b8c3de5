"""Fixtures: the folder of tiny pipelines, and the compatibility page."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OPTION = "--compatibility-page"
MORE_OPTION = "--more-page"
CLASSES_OPTION = "--classes-page"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, help="write the outcomes of a run of the whole grid to this page")
    parser.addoption(MORE_OPTION, type=Path, help="write the outcomes of a run of the second grid to this page")
    parser.addoption(CLASSES_OPTION, type=Path, help="write the pipeline classes of diffusers to this page")


@pytest.fixture
def classes_page(request: pytest.FixtureRequest) -> Path | None:
    """The page to write before it is read."""
    page: Path | None = request.config.getoption(CLASSES_OPTION, default=None)
    return page


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@dataclass
class PageOutcomes:
    """Outcomes of cells by id: of their mixed batches, and of their continued jobs."""

    mixed: dict[str, Any] = field(default_factory=dict)
    continued: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="session")
def page_outcomes(request: pytest.FixtureRequest) -> Iterator[PageOutcomes]:
    """Write the page when there is an outcome for every line that it gets, or only continued jobs have run."""
    from parity.grid import GRID
    from parity.page import is_complete, write

    outcomes = PageOutcomes()
    yield outcomes
    page = request.config.getoption(OPTION, default=None)
    only_continued = outcomes.continued and not outcomes.mixed
    if page is not None and (only_continued or is_complete(GRID, outcomes.mixed)):
        write(page, GRID, outcomes.mixed, outcomes.continued)


@pytest.fixture
def keep(page_outcomes: PageOutcomes) -> Callable[[str, object], None]:
    return page_outcomes.mixed.__setitem__


@pytest.fixture
def keep_continued(page_outcomes: PageOutcomes) -> Callable[[str, object], None]:
    return page_outcomes.continued.__setitem__


@pytest.fixture(scope="session")
def process() -> Iterator[ProcessPoolExecutor]:
    """The process that continues jobs."""
    from parity.resuming import another_process

    with another_process() as process:
        yield process


class SharedOutcomes:
    """Outcomes by kind and family, in files, so that the processes of pytest-xdist share them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, kind: str, family: str, outcome: object) -> None:
        path = self._folder / kind / family
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(outcome))

    def read(self, kind: str) -> dict[str, Any]:
        return {path.name: pickle.loads(path.read_bytes()) for path in (self._folder / kind).glob("*")}


@pytest.fixture(scope="session")
def more_outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedOutcomes]:
    """Hold the outcomes of the second grid and of random batch mates; the last process writes their page.

    So does the only process, for rows that ran by themselves.
    """
    from parity.more.page import is_complete, write

    base = tmp_path_factory.getbasetemp()
    is_one_of_several = hasattr(request.config, "workerinput")
    outcomes = SharedOutcomes((base.parent if is_one_of_several else base) / "outcomes")
    yield outcomes
    page = request.config.getoption(MORE_OPTION, default=None)
    findings, mingled, continued = map(outcomes.read, ("findings", "mingled", "continued"))
    if page is not None and (is_complete(findings, mingled) or not is_one_of_several):
        write(page, findings, mingled, continued)


@pytest.fixture
def keep_more(more_outcomes: SharedOutcomes) -> Callable[[str, object], None]:
    return functools.partial(more_outcomes.keep, "findings")


@pytest.fixture
def keep_mates(more_outcomes: SharedOutcomes) -> Callable[[str, object], None]:
    return functools.partial(more_outcomes.keep, "mingled")


@pytest.fixture
def keep_more_continued(more_outcomes: SharedOutcomes) -> Callable[[str, object], None]:
    return functools.partial(more_outcomes.keep, "continued")
