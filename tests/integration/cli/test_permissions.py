"""Processes and commands keep what they write to its owner, also with the usual umask, with which files are public."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT
from harness.waiting import wait_until

USUAL = 0o022

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(durable_server: Any, tmp_path: Path) -> Start:
    """Start a module with the usual umask, on a storage folder that does not exist."""
    values = {"REDIS_URL": durable_server.url, "STORAGE_DIR": str(tmp_path / "storage"), "MODELS": "models.toml"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    env |= {f"FUSEQUEUE_{name}": value for name, value in values.items()}

    def run(*arguments: str) -> subprocess.Popen[bytes]:
        out = (tmp_path / "log").open("ab")
        with out:
            return subprocess.Popen(
                [sys.executable, "-m", *arguments], cwd=ROOT, env=env, umask=USUAL, stdout=out, stderr=out
            )

    return run


def umask_of(process: subprocess.Popen[bytes]) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"^Umask:\s*(\d+)$", status, re.MULTILINE)
    assert found, "the process has ended"
    return int(found[1], 8)


@pytest.mark.parametrize(
    "arguments",
    [
        ("worker",),
        ("api.chores",),
        ("cli.main", "pool", "--max", "1", "--url", "http://127.0.0.1:9", "--data-dir", "/nonexistent"),
    ],
    ids=["worker", "chores", "pool"],
)
def test_a_process_withholds_the_permissions_of_others(start: Start, arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    try:
        wait_until(lambda: umask_of(process) == 0o077, "the process withholds permissions", 60)
    finally:
        process.terminate()
        process.wait(60)


def test_what_a_command_stores_is_its_owners(start: Start, tmp_path: Path) -> None:
    start("cli.main", "keys", "create").wait(60)
    stored = [tmp_path / "storage", *(tmp_path / "storage").rglob("*")]
    assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in stored if path.stat().st_mode & 0o077] == []
