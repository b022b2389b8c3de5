"""A backfill that is killed and goes on: every line once, whatever happens in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT
from harness.waiting import wait_until
from PIL import Image

STEPS = 2
LINES = int(os.environ.get("BACKFILL_LINES", "240"))  # more of them for a longer look


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompts with one that no model takes among them."""
    colours, shapes = ("red", "green", "blue", "yellow"), ("circle", "square", "triangle", "cross")
    path = tmp_path / "prompts.csv"
    rows = [f'"a {colours[at % 4]} {shapes[at // 4 % 4]}, {at}",{at}' for at in range(LINES)]
    rows[7] = f'"{"long " * 200}",7'
    path.write_text("prompt,seed\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def begin(make_stack: Callable[..., Any], prompts: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start the command against a running stack."""
    stack = make_stack().start()
    started: list[subprocess.Popen[str]] = []

    def build(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cli.main", "backfill", str(prompts), "--out", str(tmp_path / "out")]
        words = ["-s", f"steps={STEPS}", "--url", stack.url, "--json", *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*command, *words], cwd=ROOT, env=stack.env, **pipes))  # type: ignore[call-overload]
        return started[-1]

    build.stack = stack  # type: ignore[attr-defined]
    yield build
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        picture.load()
        return picture.size


@pytest.mark.timeout(240 + LINES)
def test_every_line_gets_its_picture_once(begin: Any, tmp_path: Path) -> None:
    """Killed as it submits and as it saves, interrupted, and resumed: the service never saw a line twice."""
    out = tmp_path / "out"
    first = begin("--in-flight", "100")
    wait_until(lambda: begin.stack.read("/v1/jobs", limit="1")["data"], "the first jobs are submitted")
    first.kill()
    first.wait(60)
    second = begin("--in-flight", "8")  # few, so that neither it nor the third is done before it is ended
    wait_until(lambda: len(saved(out)) >= LINES // 6, "some pictures are saved", 90 + LINES / 4)
    second.kill()
    second.wait(60)
    third = begin("--in-flight", "4")
    wait_until(lambda: len(saved(out)) >= LINES // 3, "more of them are saved", 90 + LINES / 4)
    third.send_signal(signal.SIGINT)
    third.communicate(timeout=90)
    assert third.returncode == 130
    last = begin()
    told, errors = last.communicate(timeout=200 + LINES)
    assert last.returncode == 1, errors  # one line cannot succeed
    assert json.loads(told) | {"manifest": ""} == {
        "new": 0,
        "submitted": 0,
        "done": LINES - 1,
        "failed": 1,
        "manifest": "",
    }
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert len(rows) == LINES
    assert len({row["job"] for row in rows if row["job"]}) == LINES - 1
    assert [row["error"] for row in rows if row["state"] == "failed"] == [
        "prompt is at most 500 characters (invalid_request)"
    ]
    assert {file for row in rows for file in row["files"]} == {path.name for path in saved(out)}
    assert len(saved(out)) == LINES - 1
    assert all(size_of(path) == (64, 64) for path in saved(out))
    assert sorted(begin.stack.terminal_events().values()) == [1] * (LINES - 1)
    rows_made = STEPS * (LINES - 1)  # of the worker's forwards: none was made twice and thrown away
    wait_until(lambda: begin.stack.workers()[0]["forward_rows"] >= rows_made, "the worker has told of all")
    assert begin.stack.workers()[0]["forward_rows"] == rows_made


def test_another_file_does_not_go_on_with_the_folder(begin: Any, prompts: Path, tmp_path: Path) -> None:
    """Mixing two backfills in one folder would give pictures wrong names."""
    first = begin("--in-flight", "1")
    wait_until((tmp_path / "out" / "backfill.sqlite").exists, "the ledger is there")
    wait_until(lambda: begin.stack.read("/v1/jobs", limit="1")["data"], "the first job is submitted")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=90)
    prompts.write_text("prompt\nanother\n")
    second = begin()
    _, errors = second.communicate(timeout=90)
    assert second.returncode == 2
    assert "holds another backfill" in errors
