"""A backfill that is killed and resumed: every line is submitted and saved once."""

from __future__ import annotations

import hashlib
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

from cli.backfill.command import LOCK

STEPS = 2
LINES = int(os.environ.get("BACKFILL_LINES", "48"))  # more for a longer run
PAUSED_LINES = 6  # of the model `later`, which is paused until the last run: no other can finish, however fast


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompts, one of which is too long."""
    colours, shapes = ("red", "green", "blue", "yellow"), ("circle", "square", "triangle", "cross")
    path = tmp_path / "prompts.csv"
    rows = [f'"a {colours[at % 4]} {shapes[at // 4 % 4]}, {at}",{at}' for at in range(LINES)]
    rows[7] = f'"{"long " * 200}",7'
    models = ["demo"] * (LINES - PAUSED_LINES) + ["later"] * PAUSED_LINES
    path.write_text("prompt,seed,model\n" + "\n".join(map(",".join, zip(rows, models, strict=True))) + "\n")
    return path


@pytest.fixture
def start_backfill(make_stack: Callable[..., Any], prompts: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start the command against a running stack with the models `demo` and `later`, which is paused."""
    demo = (ROOT / "models.toml").read_text("utf-8").replace('"demo/model"', f'"{ROOT / "demo/model"}"')
    models = tmp_path / "models.toml"
    models.write_text(demo + demo.replace('id = "demo"', 'id = "later"'), "utf-8")
    stack = make_stack(models=str(models)).start()
    stack.client.put("/v1/pauses/models/later", json={"reason": "its jobs stay queued"}).raise_for_status()
    started: list[subprocess.Popen[str]] = []

    def start(*more: str, file: Path = prompts) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "cli.main", "backfill", str(file), "--out", str(tmp_path / "out")]
        options = ["-s", f"steps={STEPS}", "--url", stack.url, "--json", *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*command, *options], cwd=ROOT, env=stack.env, **pipes))  # type: ignore[call-overload]
        return started[-1]

    start.stack = stack  # type: ignore[attr-defined]
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        return image.size


@pytest.mark.timeout(240 + LINES)
def test_every_line_gets_its_image_once(start_backfill: Any, prompts: Path, tmp_path: Path) -> None:
    """Killed while it submits and while it saves, interrupted, and resumed; another file is refused then."""
    out = tmp_path / "out"
    first = start_backfill("--in-flight", "40")
    wait_until(lambda: start_backfill.stack.read("/v1/jobs", limit="1")["data"], "the first jobs are submitted")
    first.kill()
    first.wait(60)
    second = start_backfill("--in-flight", "8")
    wait_until(lambda: len(saved(out)) >= LINES // 6, "some images are saved", 90 + LINES / 4)
    second.kill()
    second.wait(60)
    third = start_backfill("--in-flight", "12")  # more than are paused
    can_finish = LINES - PAUSED_LINES - 1
    wait_until(lambda: len(saved(out)) == can_finish, "all images of the running model are saved", 90 + LINES / 4)
    wait_until(lambda: (out / LOCK).read_text() == f"{third.pid}\n", "the third one has begun")
    third.send_signal(signal.SIGINT)
    _, errors = third.communicate(timeout=90)
    assert (third.returncode, "Run the same command to resume" in errors) == (130, True), errors
    start_backfill.stack.client.delete("/v1/pauses/models/later").raise_for_status()
    last = start_backfill()
    output, errors = last.communicate(timeout=200 + LINES)
    assert last.returncode == 1, errors  # one line cannot succeed
    summary = json.loads(output)
    assert start_backfill.stack.read(f"/v1/groups/{summary['group']}")["jobs"]["succeeded"] == LINES - 1
    assert summary | {"manifest": "", "group": ""} == {
        "waiting": 0,
        "new": 0,
        "submitted": 0,
        "done": LINES - 1,
        "failed": 1,
        "flagged": 0,
        "manifest": "",
        "group": "",
    }
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert len(rows) == LINES
    assert len({row["job"] for row in rows if row["job"]}) == LINES - 1
    assert [row["error"] for row in rows if row["state"] == "failed"] == [
        "prompt is at most 500 characters for model 'demo', not 1000 (invalid_request)"
    ]
    assert {file for row in rows for file in row["files"]} == {path.name for path in saved(out)}
    assert len(saved(out)) == LINES - 1
    assert all(size_of(path) == (64, 64) for path in saved(out))
    assert sorted(start_backfill.stack.terminal_events().values()) == [1] * (LINES - 1)
    forward_rows = STEPS * (LINES - 1)  # no job ran twice
    wait_until(
        lambda: start_backfill.stack.workers()[0]["forward_rows"] >= forward_rows, "the worker has reported all rows"
    )
    assert start_backfill.stack.workers()[0]["forward_rows"] == forward_rows
    check_another_file(start_backfill, prompts)


def check_another_file(start_backfill: Any, prompts: Path) -> None:
    """Two backfills in one folder would mix up their file names."""
    prompts.write_text("prompt\nanother\n")
    other = start_backfill()
    _, errors = other.communicate(timeout=90)
    assert other.returncode == 2
    assert "holds another backfill" in errors


@pytest.mark.timeout(240)
def test_a_line_starts_from_the_result_of_another_one_also_after_a_kill(start_backfill: Any, tmp_path: Path) -> None:
    """Killed while the job of the second line is queued; the last one starts from a file of the folder."""
    stack, out = start_backfill.stack, tmp_path / "out"
    Image.new("RGB", (64, 64), "red").save(tmp_path / "red.png")
    lines: list[dict[str, Any]] = [
        {"key": "still", "prompt": "a red circle"},
        {"key": "changed", "prompt": "a green circle", "image": {"job": "still"}, "strength": 0.5, "model": "later"},
        {"prompt": "a blue circle", "image": {"job": "changed", "artifact": 0}, "strength": 0.5, "after": ["still"]},
        {"prompt": "a red cross", "image": "red.png", "strength": 0.5},
    ]
    file = tmp_path / "graph.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first = start_backfill(file=file)
    queued = {"model": "later", "status": "queued"}
    wait_until(lambda: stack.read("/v1/jobs", **queued)["data"] and len(saved(out)) == 2, "the second line is queued")
    first.kill()
    first.wait(60)
    stack.client.delete("/v1/pauses/models/later").raise_for_status()
    last = start_backfill(file=file)
    output, errors = last.communicate(timeout=120)
    assert (last.returncode, json.loads(output)["done"]) == (0, 4), errors
    rows = [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]
    sources = [out / rows[0]["files"][0], out / rows[1]["files"][0], tmp_path / "red.png"]
    used = [stack.read(f"/v1/jobs/{row['job']}")["image"]["id"] for row in rows[1:]]
    assert used == [f"in_{hashlib.sha256(source.read_bytes()).hexdigest()[:32]}" for source in sources]
    assert len(stack.read("/v1/jobs")["data"]) == len(lines)
