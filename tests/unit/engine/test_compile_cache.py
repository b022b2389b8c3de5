"""A folder of compiled code that cannot be made, as on a read-only volume."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from worker.engine.compile_cache import CACHE_DIR, leave_unusable_cache


@pytest.mark.parametrize("folder", [None, "", "compiled", "deep/compiled"])
def test_a_folder_that_can_be_made_is_used(folder: str | None, tmp_path: Path) -> None:
    environ = {} if folder is None else {CACHE_DIR: str(tmp_path / folder) if folder else ""}
    before = dict(environ)
    assert leave_unusable_cache(environ) is None
    assert environ == before
    assert not folder or (tmp_path / folder).is_dir()


def test_one_that_cannot_be_made_is_left_before_torch_is_imported() -> None:
    """Torch ends with a traceback otherwise, and with it the worker."""
    code = (
        "import worker.engine as engine, torch._dynamo, os\n"
        f"print(engine.unusable_compile_cache, os.environ.get({CACHE_DIR!r}))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).resolve().parents[3],
        env={"PATH": "", CACHE_DIR: "/proc/compiled"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.stdout.startswith(f"{CACHE_DIR}=/proc/compiled: No such file"), run.stderr
    assert run.stdout.split()[-1] != "/proc/compiled"
