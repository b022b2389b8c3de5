"""The commands of `fusequeue`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cli.main import COMMANDS, load

LARGE = {"httpx", "pydantic", "redis", "rich.console", "torch"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_how_the_help_of_each_begins(name: str) -> None:
    _, summary = COMMANDS[name]
    command = load(name)
    assert command.name == name
    assert " ".join(command.help.split()).startswith(summary.removesuffix("."))


def test_help_imports_no_large_module() -> None:
    code = "import sys; from cli.main import app; app(standalone_mode=False); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=60, check=True)
    help_text, _, modules = run.stdout.rstrip().rpartition("\n")
    assert all(f"  {name} " in help_text for name in COMMANDS)
    assert not LARGE & set(modules.split())


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("fusequeue wor", "worker workers"), ("fusequeue jobs --st", "--status"), ("fusequeue zz", "")],
)
def test_a_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_FUSEQUEUE_COMPLETE": "complete_bash"}
    code = "from cli.main import app; app(prog_name='fusequeue')"
    run = subprocess.run(
        [sys.executable, "-c", code], env=words, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.split() == completed.split(), run.stderr
