"""The commands that speak to a service, against an API process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from harness.api_process import Server
from harness.http_server import ROOT, claimed, deliver, png
from typer.testing import CliRunner

from cli.main import app
from shared.queue import Queue

Run = Callable[..., Awaitable[Result]]
ORDER = ("queued", "running", "succeeded")
PROMPT = "a red circle on a blue ground, left"


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start(max_attempts="1")


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    queue = Queue.connect(server.settings)
    yield queue
    await queue.close()


@pytest.fixture
def run(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in a folder of its own, on a thread, as the test's loop has a worker's part to play."""
    monkeypatch.chdir(tmp_path)
    runner = CliRunner(env={"FUSEQUEUE_URL": server.url, "COLUMNS": "200"})

    async def fusequeue(*words: str) -> Result:
        return await asyncio.to_thread(runner.invoke, app, words)

    return fusequeue


def lines(done: Result) -> list[dict[str, Any]]:
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def submitted(queue: Queue) -> str:
    """Wait for the one job that a command has submitted, and return its id."""
    async with asyncio.timeout(30):
        while True:
            records, _ = await queue.jobs.page("default")
            if records:
                return records[0].job.id
            await asyncio.sleep(0.05)


async def test_submit_saves_what_the_job_made(run: Run, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "start.png").write_bytes(png())
    words = ("submit", PROMPT, "--image", "start.png", "-s", "seed=7", "-s", "strength=0.5", "-o", "out", "--json")
    running = asyncio.create_task(run(*words))
    data = await deliver(queue, tmp_path, await claimed(queue, await submitted(queue)))
    *events, job = lines(await running)
    # Which of them are seen is a matter of when the stream was opened.
    assert [one["status"] for one in events] == sorted((one["status"] for one in events), key=ORDER.index)
    assert (job["status"], job["seed"], job["strength"]) == ("succeeded", 7, 0.5)
    assert [(tmp_path / file).read_bytes() for file in job["files"]] == [data]


async def test_a_job_is_listed_watched_and_canceled(run: Run) -> None:
    (job,) = lines(await run("submit", PROMPT, "--no-wait", "--json"))
    assert [one["id"] for one in lines(await run("jobs", "--json", "--status", "queued"))] == [job["id"]]
    listed = await run("jobs")
    assert PROMPT in listed.stdout
    late = await run("submit", "later", "--timeout", "0")
    assert (late.exit_code, "continues" in late.stderr) == (6, True)
    assert [one["status"] for one in lines(await run("cancel", job["id"], "--json"))] == ["canceled"]
    watched = await run("watch", job["id"])
    assert watched.exit_code == 1
    assert "canceled" in watched.stdout


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("submit", "x", "-s", "steps=900"), 2, "steps must be 1 to 100, not 900"),
        (("submit", "x", "-s", "steps"), 2, "NAME=VALUE"),
        (("submit", "x", "--image", "none.png"), 2, "none.png"),
        (("submit", "x", "--model", "none"), 4, "there are: demo"),
        (("watch", "job_1"), 4, "there is no job job_1"),
        (("dead", "redrive", "job_1"), 4, "there is no dead letter job_1"),
        (("jobs", "--url", "http://127.0.0.1:9"), 3, "fusequeue up"),
    ],
)
async def test_what_goes_wrong_is_one_line_and_a_status(
    run: Run, words: tuple[str, ...], status: int, told: str
) -> None:
    """Scripts read the status, people the line; neither sees a traceback."""
    done = await run(*words)
    assert done.exit_code == status, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


async def test_the_service_tells_of_itself(run: Run) -> None:
    assert [model["id"] for model in lines(await run("models", "--json"))] == ["demo"]
    await run("submit", PROMPT, "--no-wait")
    (line,) = lines(await run("queues", "--json"))
    assert (line["model"], line["jobs"]["standard"]) == ("demo", 1)
    assert "none" in (await run("workers")).stdout


async def test_the_doctor_looks_at_all_of_it(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks run as processes, with the caller's environment."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", server.settings.redis_url)
    monkeypatch.setenv("FUSEQUEUE_MODELS", str(ROOT / "models.toml"))
    found = {one["name"]: one["verdict"] for one in lines(await run("doctor", "--json"))}
    assert (found["api"], found["models file"], found["workers"]) == ("ok", "ok", "warning")
    assert "device" in found
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "redis://127.0.0.1:9/0")
    told = await run("doctor")
    assert told.exit_code == 1
    assert "fusequeue up" in told.stdout


async def test_dead_letters_are_read_redriven_and_purged(run: Run, queue: Queue) -> None:
    (job,) = lines(await run("submit", PROMPT, "--no-wait", "--json"))
    for _ in range(2):
        await claimed(queue, job["id"])
        await queue.client.redis.zadd(queue.client.redis_keys.leases, {job["id"]: 1}, xx=True)
        await queue.maintenance.reclaim()
    (letter,) = lines(await run("dead", "list", "--json"))
    assert (letter["id"], letter["reason"]) == (job["id"], "worker_lost")
    assert PROMPT in (await run("dead", "show", job["id"])).stdout
    assert lines(await run("dead", "redrive", job["id"], "--json")) == [{"id": job["id"], "redriven": True}]
    assert [one["status"] for one in lines(await run("jobs", "--json"))] == ["queued"]
    await claimed(queue, job["id"])
    for _ in range(2):
        await queue.client.redis.zadd(queue.client.redis_keys.leases, {job["id"]: 1}, xx=True)
        await queue.maintenance.reclaim()
        if not lines(await run("dead", "list", "--json")):
            await claimed(queue, job["id"])
    assert (await run("dead", "purge", job["id"])).exit_code == 0
    assert lines(await run("jobs", "--json")) == []
