"""An installation without the extra `worker` says so, instead of ending with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HIDE = 'import sys\nsys.modules.update(dict.fromkeys(("numpy", "torch")))\nfrom cli.main import app\napp()'


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("up", "--data-dir", "data"), "pip install 'fusequeue-server[worker]'"),
        (("up", "--data-dir", "data"), "without workers: --workers 0"),
        (("worker",), "pip install 'fusequeue-server[worker]'"),
        (("probe",), "pip install 'fusequeue-server[worker]'"),
    ],
)
def test_a_worker_without_its_packages_names_them(arguments: tuple[str, ...], remedy: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", HIDE, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FUSEQUEUE_MODELS": str(ROOT / "models.toml")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    assert "a worker needs torch, numpy" in run.stderr
    assert remedy in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir()), "nothing half-done stays"
