"""Meshes of jobs that share forwards equal those of hy3dgen's own pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY
from parity.meshes import ROWS, MeshOutcome, MeshRow, run
from parity.page import write
from tiny.meshes import needs_hy3dgen

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)


@needs_hy3dgen
@pytest.mark.parity
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.models)
def test_every_job_of_a_mixed_batch_gets_the_mesh_of_the_solo_job(
    row: MeshRow, tmp_path: Path, keep: Callable[[str, object], None]
) -> None:
    """Other images, steps and guidance in shared forwards, and a job that joins, change no mesh."""
    keep(row.models, run(row, tmp_path / "model"))


def test_rows_of_meshes_stay_on_the_page_where_hy3dgen_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, outcome = tmp_path / "page.md", MeshOutcome(2.5e-6, [3, 4], 1)
    write(page, (), {})
    assert page.read_text().count("| not run: hy3dgen is not installed |") == len(ROWS)
    monkeypatch.setattr("parity.page.version", lambda name: f"{name}-2")
    write(page, (), {row.models: outcome for row in ROWS})
    text = page.read_text()
    assert text.count("| image-to-mesh | 2.5e-06, with torch torch-2, hy3dgen hy3dgen-2 | 3 4 | 1 |") == len(ROWS)
    write(page, (), {})
    assert page.read_text() == text
