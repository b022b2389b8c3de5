"""What type checkers say about a user's script."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import asyncio
from collections.abc import Generator
from datetime import datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import assert_type

from PIL import Image

from fusequeue import (
    AsyncClient, Batch, Changes, Client, Event, Invalid, Job, JobFailed, JobParams, JobState, Model, QueueDepth, Result,
    WaitTimeout, WebhookEndpoint, WorkerInfo,
)


def show(event: Event) -> None:
    print(event.status, event.progress.step)


async def ashow(event: Event) -> None:
    print(event.phase)


with Client("http://localhost:8000", timeout_s=5, retries=1) as client:
    result = client.run("demo", "a red circle", folder=Path("images"), timeout_s=60, on_progress=show, seed=7, n=2)
    assert_type(result, Result)
    job = client.submit("demo", "x", steps=8, idempotency_key="a", metadata={"order": "1"}, deadline_s=60)
    assert_type(job, Job)
    assert_type(job.status, JobState)
    if job.status == "succeeded" and job.phase != "decoding":
        client.download(job, "images")
    assert_type(client.get(job), Job)
    assert_type(client.wait(job.id, timeout_s=None), Job)
    assert_type(client.jobs(status=["failed", "canceled"], batch_id="b", limit=5), Generator[Job, None, None])
    with open("sketch.png", "rb") as file:
        client.submit("demo", "x", image=file)
    for source in (Path("a.png"), "a.png", b"png", BytesIO(), Image.new("RGB", (8, 8)), job, result, job.artifacts[0]):
        client.submit("demo", "x", image=source, mask=source, images=[source], strength=0.5)
    client.submit("sd", "x", controls=[{"id": "edges", "image": "a.png", "end": 0.7}], adapters=[{"id": "ink"}])
    client.submit("sd", "x", step_cache={"every": 3}, priority="bulk", webhook_events=["job.failed"])
    client.submit("sd", "x", not_before=datetime.now().astimezone() + timedelta(hours=1))
    client.submit("sd", "x", not_before=timedelta(minutes=10))
    params: JobParams = {"width": 64, "height": 64}
    client.submit("demo", "x", extra_body={"new": 1}, **params)
    for line in client.submit_many([{"model": "demo", "prompt": "x"}]):
        print(line.id if line.error is None else [fault.message for fault in line.error.errors])
    batch = client.batches.create([{"prompt": "x"}], endpoint="/v1/images/generations")
    assert_type(client.batches.wait(batch), Batch)
    if batch.status == "completed":
        print([row.response.body for row in client.batches.results(batch) if row.response is not None])
    endpoint = client.webhooks.create("https://example.com", events=["batch.completed", "job.failed"])
    assert_type(endpoint, WebhookEndpoint)
    print([delivery.log for delivery in client.webhooks.deliveries(endpoint=endpoint, state="failed")])
    assert_type(client.retry(client.update(job, priority="bulk", deadline_s=60)), Job)
    assert_type(client.resume(client.pause(job)), Job)
    assert_type(client.matching.cancel(model=client.models()[0], created_after=datetime.now(), dry_run=True), Changes)
    assert_type(client.matching.redrive(reason="worker_lost"), Changes)
    assert_type(client.models(), list[Model])
    assert_type(client.queues(), list[QueueDepth])
    assert_type(client.workers(), list[WorkerInfo])
    try:
        job.require_success()
    except JobFailed as error:
        assert_type(error.job, Job)
    except (Invalid, WaitTimeout) as error:
        print(error)

    client.submit("demo", "x", stpes=8)  # mistake
    client.submit("demo", "x", steps="8")  # mistake
    print(job.sate)  # mistake
    client.run("demo", "x", image=5)  # mistake
    print(job.status == "done")  # mistake
    client.run("demo", "x", priority="high")  # mistake
    client.jobs(status="done")  # mistake
    client.matching.update(priority="high", model="demo")  # mistake
    client.wait(job, timeout="5")  # mistake
    client.submit("sd", "x", controls=[{"id": "edges", "imgae": "a.png"}])  # mistake
    client.webhooks.create("https://example.com", events=["job.done"])  # mistake


async def main() -> None:
    async with AsyncClient() as client:
        result = await client.run("demo", "x", on_progress=ashow)
        assert_type(result.job.artifacts[0].seed, int)
        job = await client.submit("demo", "x", steps=8)
        async for event in client.events(job):
            assert_type(event.job, Job | None)
        await client.submit("demo", "x", stpes=8)  # mistake
        await client.run("demo", "x", image=5)  # mistake
        print(job.status == "done")  # mistake


asyncio.run(main())
"""
MISTAKES = {number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# mistake")}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script in a project that checks strictly, and finds the client as an installed package."""
    (tmp_path / "script.py").write_text(SCRIPT)
    config = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    return tmp_path / "script.py"


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "fusequeue" / "py.typed").is_file()


def output(command: list[str], script: Path) -> str:
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    run = subprocess.run(command, cwd=script.parent, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
def test_mypy_finds_mistakes_and_nothing_else(script: Path) -> None:
    # Other imports are not checked here: the client's own are, by `make lint`.
    text = output([sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", script.name], script)
    found = re.findall(r"^script\.py:(\d+): error: (.*)$", text, re.MULTILINE)
    assert {int(line) for line, _ in found} == MISTAKES, text
    assert len(re.findall(r": error: ", text)) == len(found), text


def pyright() -> list[str]:
    """Return the command of basedpyright: pyright with a node of its own."""
    if importlib.util.find_spec("basedpyright") is not None:
        return [sys.executable, "-m", "basedpyright"]
    on_path = shutil.which("basedpyright")
    if on_path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("basedpyright is not installed")
    return [on_path]


def test_pyright_finds_mistakes_and_nothing_else(script: Path) -> None:
    text = output([*pyright(), "--outputjson", "--pythonpath", sys.executable, script.name], script)
    found = [row for row in json.loads(text)["generalDiagnostics"] if row["severity"] == "error"]
    assert {row["range"]["start"]["line"] + 1 for row in found} == MISTAKES, text
