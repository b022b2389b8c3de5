"""Every Python process that the product starts ignores the modules of the current folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from harness.hostile_folder import hostile_folder

from shared.runtime.python_command import python_command

ROOT = Path(__file__).resolve().parents[3]
# The demo imports no other package of ours.
NAMES_THE_INTERPRETER = {"shared/runtime/python_command.py", "demo/run.py"}


@pytest.mark.parametrize("module", ["shared.config.settings", "json.tool"])
def test_modules_of_the_current_folder_are_not_imported(module: str, tmp_path: Path) -> None:
    """Neither instead of the module, nor instead of what it imports."""
    command = python_command(module, *(["--help"] if module == "json.tool" else []))
    done = subprocess.run(
        command, cwd=hostile_folder(tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_one_function_makes_the_command_of_each_process() -> None:
    """A module that names the interpreter itself can leave the option out."""
    sources = (
        path
        for package in ("api", "cli", "demo", "fusequeue", "shared", "worker")
        for path in (ROOT / package).rglob("*.py")
    )
    named = {path.relative_to(ROOT).as_posix() for path in sources if "sys.executable" in path.read_text("utf-8")}
    assert named == NAMES_THE_INTERPRETER
