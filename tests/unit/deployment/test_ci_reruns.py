"""CI runs failed tests once more, by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / ".ci/run_tests.py"
STABLE = "def test_stable(): pass\n"
UNSTABLE = """
from pathlib import Path
def test_unstable():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise ValueError("only the first time")
"""
DIES_ONCE = """
import os
from pathlib import Path
def test_before(): pass
def test_dies():
    seen = Path(__file__).with_name("seen-dying")
    if not seen.exists():
        seen.touch()
        os._exit(3)
def test_after(): pass
"""
DIES = "import os\ndef test_dies(): os._exit(3)\n"
BROKEN = "def test_broken(): assert 1 == 2\n"
NOT_COLLECTED = "import a_module_that_is_not_there\n"


@pytest.mark.parametrize(
    ("files", "status", "printed"),
    [
        ({"stable": STABLE, "unstable": UNSTABLE}, 0, "only the first time"),
        ({"unstable": UNSTABLE, "broken": BROKEN}, 1, "FAILED TWICE test_broken.py::test_broken"),
        ({"unstable": UNSTABLE, "lost": NOT_COLLECTED}, 1, "a_module_that_is_not_there"),
        ({"dies": DIES_ONCE, "stable": STABLE}, 0, "UNSTABLE test_dies.py::test_dies"),
        ({"dies": DIES_ONCE, "zbroken": BROKEN}, 1, "FAILED TWICE test_zbroken.py::test_broken"),
        ({"dies": DIES, "stable": STABLE}, 1, "FAILED TWICE test_dies.py::test_dies"),
        ({f"dies_{number}": DIES for number in range(4)}, 1, "NOT RUN test_dies_3.py::test_dies"),
        ({}, 5, "no tests ran"),
    ],
    ids=["unstable", "broken", "not-collected", "dies-once", "dies-before-another", "dies", "all-die", "no-tests"],
)
def test_a_test_that_passes_by_itself_does_not_fail_the_run(
    tmp_path: Path, files: dict[str, str], status: int, printed: str
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    command = [sys.executable, str(SCRIPT), "-q", "-p", "xdist", "-n", "1"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == status, result.stdout
    assert printed in result.stdout
    reran = "unstable" in files and "lost" not in files
    assert ("UNSTABLE test_unstable.py::test_unstable" in result.stdout) == reran
