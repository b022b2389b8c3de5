"""Every architecture: jobs of all kinds share forwards, and every image equals the one of the solo job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY
from parity.cells import Cell
from parity.grid import GRID
from parity.page import COLUMNS, versions, write
from parity.running import Outcome, run
from parity.tables import heading, line_of, read_rows
from tiny.registry import torchvision_fault

pytestmark = [
    pytest.mark.usefixtures("shared_models"),
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, of what it uses of itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # and of Chroma's imports
    pytest.mark.filterwarnings("ignore:flex_attention called without"),  # LTX-2.5's diffusion decoder, on a CPU
    pytest.mark.timeout(400),  # the default of 120 s is too short for a row of Helios on two busy cores
]


def _marks(cell: Cell) -> list[pytest.MarkDecorator]:
    return [*([] if cell.quick else [pytest.mark.parity]), *([pytest.mark.vision] if cell.needs_torchvision else [])]


def _params() -> list[object]:
    return [pytest.param(cell, id=cell.id, marks=_marks(cell)) for cell in GRID]


@pytest.mark.parametrize("cell", _params())
def test_every_job_of_a_mixed_batch_gets_the_image_of_the_solo_job(
    cell: Cell, models_folder: Path, keep: Callable[[str, object], None], request: pytest.FixtureRequest
) -> None:
    """Mixed steps, guidance, prompts, tasks and arrivals in shared forwards change no image."""
    if cell.needs_torchvision and (fault := torchvision_fault()):
        keep(cell.id, fault)
        pytest.skip(fault)
    whole_page = request.config.getoption("--compatibility-page", default=None) is not None
    keep(cell.id, run(cell, models_folder / cell.tiny, variants=whole_page))


def test_every_row_has_a_unique_name() -> None:
    """The page is built by name."""
    assert len({cell.id for cell in GRID}) == len(GRID)


def test_rows_that_need_torchvision_keep_their_versions_on_the_page(tmp_path: Path) -> None:
    """Without it they say so, or keep what they were with it; and nothing else changes where only they run."""
    page, cells = (
        tmp_path / "page.md",
        [next(cell for cell in GRID if cell.needs_torchvision is on) for on in (False, True)],
    )
    plain, vision = (cell.id for cell in cells)
    outcome = Outcome(2.5e-6, [3, 2], ["edit"], 1, {}, [1, 1], 0.0, None, 0.0, 0.0, 0.0)
    write(page, cells, {plain: outcome, vision: "torchvision is not installed"})
    assert "| not run: torchvision is not installed |" in page.read_text()
    with patch("parity.page.version", lambda name: f"{name}-2"):
        write(page, cells, {vision: outcome})
    text = page.read_text()
    assert "| 2.5e-06, with torch torch-2, torchvision torchvision-2 |" in text
    assert f"Versions: {versions()}." in text
    write(page, cells, {plain: outcome, vision: "torchvision is not installed"})
    assert page.read_text() == text


def test_continued_jobs_fill_their_column_and_keep_the_others(tmp_path: Path) -> None:
    """Also on a page of an earlier version, without the column; a page of other libraries is not mixed with them."""
    page, cells = tmp_path / "page.md", [cell for cell in GRID if not cell.needs_torchvision][:3]
    first, second, third = (cell.id for cell in cells)
    outcome = Outcome(2.5e-6, [3, 2], ["edit"], 1, {}, [1, 1], 0.0, None, 0.0, "it names | no blocks", 0.0)
    write(page, cells, dict.fromkeys((first, second, third), outcome))
    earlier = [column for column in COLUMNS if column != "continued"]
    head, table = page.read_text().split("| family ")[0], list(read_rows(page.read_text()))
    lines = [heading(earlier), *(line_of(row[column] for column in earlier) for row in table)]
    page.write_text(head + "\n".join(lines) + "\n")
    write(page, cells, {}, {first: 0.0, second: "its steps | are its own"})
    rows = {row["models"]: row for row in read_rows(page.read_text()) if "models" in row}
    assert [rows[cell.models]["continued"] for cell in cells] == ["0.0", r"its steps \| are its own", ""]
    assert {rows[cell.models]["blocks"] for cell in cells} == {r"it names \| no blocks"}
    text = page.read_text()
    write(page, cells, dict.fromkeys((first, second, third), outcome))
    assert page.read_text() == text
    with patch("parity.page.version", lambda name: f"{name}-2"), pytest.raises(ValueError, match="not of the versions"):
        write(page, cells, {}, {first: 0.0})
