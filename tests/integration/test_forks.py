"""Processes that tests fork behave as those that they execute."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import forks
from harness.waiting import wait_until

COMMANDS = {
    "output": ("cli.main", "--version"),
    "status of a usage error": ("cli.main", "nosuch"),
    "error of a configuration": ("api.chores",),
}


def run(module: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "FUSEQUEUE_REDIS_URL": "nonsense", "FUSEQUEUE_LOG_LEVEL": "error"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=60)


def without_times(text: str) -> str:
    return re.sub(r"\d\d:\d\d:\d\d", "", text)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_fork_has_the_output_and_status_of_a_new_program(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = run(*command, folder=tmp_path)
    monkeypatch.setattr(forks, "FORKED", ())
    executed = run(*command, folder=tmp_path)
    assert forked.returncode == executed.returncode
    assert without_times(forked.stdout) == without_times(executed.stdout)
    assert without_times(forked.stderr) == without_times(executed.stderr)


def test_a_fork_is_a_child_of_the_process_that_started_it_and_ends_by_signals(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        status = Path(f"/proc/{process.pid}/status")
        assert f"PPid:\t{os.getpid()}\n" in status.read_text()
        wait_until(lambda: "Running on" in (tmp_path / "log").read_text(), "it runs")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: "State:\tT" in status.read_text(), "it is stopped")
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
