"""A backfill that is stopped by a signal, and resumed in a folder with unfinished files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from harness.api_process import Server
from harness.waiting import wait_until

TIMEOUT_S = 60.0


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_writes_the_manifest_and_names_the_jobs(server: Server, tmp_path: Path, stop: signal.Signals) -> None:
    """SIGTERM is what systemd and batch systems send."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out"
    prompts.write_text("a red circle\na green cross\n")
    out.mkdir()
    unfinished = [out / f".000001-a-red-circle-{index}.png.0123abcd.part" for index in range(2)]
    others = [out / ".000001.part", out / ".mine.part", out / "000001-a-0.png.0123abcd.part", out / "photo.png"]
    for file in (*unfinished, *others):
        file.touch()
    command = [sys.executable, "-m", "cli.main", "backfill", str(prompts), "--out", str(out), "--url", server.url]
    env = dict(os.environ)
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    listed = lambda: httpx.get(f"{server.url}/v1/jobs", timeout=TIMEOUT_S).json()["data"]  # noqa: E731
    wait_until(lambda: len(listed()) == 2 or process.poll() is not None, "the jobs are submitted")
    process.send_signal(stop)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    (group,) = {job["group"] for job in listed()}
    assert f"fusequeue groups show {group}\n" in errors
    assert group.startswith("prompts-out-")
    assert (process.returncode, "Traceback" in errors) == (130, False), errors
    assert f"fusequeue groups cancel {group}\n" in errors
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["a red circle", "a green cross"]
    assert [file for file in unfinished if file.exists()] == []
    assert [file for file in others if not file.exists()] == []
