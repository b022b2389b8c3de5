"""Batches, asked for with the unmodified `openai` SDK of a real API; the worker is played by hand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness.api_process import Server
from harness.http_server import ROOT, WORKER, png

from shared.config import models_file
from shared.job import Artifact, Outcome, State
from shared.queue import Claim, Queue
from shared.runtime.clock import now_ms
from shared.storage import Storage, connect
from worker.chores import batch_files, batches
from worker.chores.batch_files import BatchContext
from worker.chores.batches import BatchRunner

GENERATIONS = "/v1/images/generations"


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    opened = Queue.connect(server.settings)
    yield opened
    await opened.close()


@pytest.fixture
async def storage(server: Server) -> AsyncIterator[Storage]:
    opened = connect(server.settings)
    yield opened
    await opened.close()


@pytest.fixture
def context(server: Server, queue: Queue, storage: Storage) -> BatchContext:
    settings = server.settings
    return BatchContext(settings, models_file.load(settings.models), queue, storage)


def line(number: int, url: str = GENERATIONS, **body: Any) -> dict[str, Any]:
    asked = {"model": "demo", "prompt": f"a red circle, number {number}", "steps": 2, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": asked}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    written = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=("in.jsonl", BytesIO(written.encode())), purpose="batch").id


def begin(client: openai.OpenAI, lines: list[Any], endpoint: Any = GENERATIONS, **more: Any) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **more
    )


def told_in(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batches, batch_files):
        monkeypatch.setattr(module, "CHUNK_LINES", 10)


async def work(context: BatchContext, batch_id: str) -> None:
    """Do all that can be done about a batch at once."""
    while await BatchRunner(context, await context.queue.batches.get("default", batch_id)).advance():
        pass


async def make(queue: Queue, storage: Storage, *, limit: int = 10**9) -> int:
    """Play a worker until nothing is left to claim; returns how many jobs it ended."""
    made = 0
    while made < limit:
        claims = await queue.claims.claim(WORKER, ["demo"], min(64, limit - made))
        if not claims:
            return made
        await asyncio.gather(*(_make(queue, storage, claim) for claim in claims))
        made += len(claims)
    return made


async def _make(queue: Queue, storage: Storage, claim: Claim) -> None:
    data, key = png(), f"jobs/{claim.job.id}/{claim.attempt}/0.png"
    if "stored" in claim.job.prompt:
        await storage.put(key, data, "image/png")
    artifact = Artifact(
        index=0, key=key, content_type="image/png", bytes=len(data), width=64, height=64, seed=claim.job.seed
    )
    await queue.claims.settle(WORKER, claim.job.id, claim.epoch, Outcome(state=State.SUCCEEDED, artifacts=(artifact,)))


async def test_files_create_batches_create_retrieve_content(client: openai.OpenAI, context: BatchContext) -> None:
    """A batch from its file to its files: pictures by URL or as base64, and bad lines by what is wrong with them."""
    lines = [
        line(1, prompt="stored", seed=5),
        "",
        line(2, prompt="stored", response_format="b64_json"),
        line(3, size="4096x64"),
        line(4, model="nobody"),
    ]
    batch = begin(client, lines, metadata={"order": "7"})
    assert (batch.status, batch.metadata) == ("validating", {"order": "7"})

    await work(context, batch.id)
    running = client.batches.retrieve(batch.id)
    assert running.status == "in_progress"
    assert running.request_counts is not None
    assert running.request_counts.model_dump() == {"total": 4, "completed": 0, "failed": 2}
    jobs, _ = await context.queue.jobs.page("default", batch_id=batch.id)
    assert {(job.job.priority, job.job.batch_id) for job in jobs} == {("bulk", batch.id)}
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)

    assert await make(context.queue, context.storage) == 2
    await work(context, batch.id)
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    good, bad = told_in(client, done.output_file_id), told_in(client, done.error_file_id)
    by_url, as_base64 = (one["response"]["body"]["data"][0] for one in good)
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(by_url["url"])).content == png()
    assert (by_url["seed"], as_base64["b64_json"][:4]) == (5, "iVBO")
    assert {(one["custom_id"], one["error"]["code"], one["error"]["param"]) for one in bad} == {
        ("line-3", "invalid_request", "size"),
        ("line-4", "model_not_found", "model"),
    }
    assert client.files.retrieve(done.output_file_id or "").purpose == "batch_output"
    assert client.files.delete(batch.input_file_id).deleted


INVALID: list[tuple[list[Any], str, int | None]] = [
    ([line(1), "{no json"], "invalid_json_line", 2),
    ([line(1), line(1)], "duplicate_custom_id", 2),
    (["", line(1, url="/v1/jobs")], "mismatched_url", 2),
    ([{**line(1), "method": "GET"}], "invalid_method", 1),
    ([{"method": "POST", "url": GENERATIONS, "body": {}}], "missing_required_parameter", 1),
    ([{**line(1), "body": "words"}], "missing_required_parameter", 1),
    (["\n \n"], "empty_file", None),
    ([line(number) for number in range(50_001)], "too_many_lines", None),
]


async def test_a_file_that_is_invalid_fails_as_a_whole(client: openai.OpenAI, context: BatchContext) -> None:
    """Before any line of it becomes a job, and says where."""
    for lines, code, number in INVALID:
        batch = begin(client, lines)
        await work(context, batch.id)
        failed = client.batches.retrieve(batch.id)
        assert failed.status == "failed"
        assert failed.errors is not None
        assert [(one.code, one.line) for one in failed.errors.data or ()] == [(code, number)]
    assert await context.queue.jobs.page("default") == ([], None)


async def test_other_endpoints_take_their_own_bodies(client: openai.OpenAI, context: BatchContext) -> None:
    """Edits need a picture, jobs are answered with the job; a line may not choose its batch."""
    async with httpx.AsyncClient(timeout=60) as http:
        ref = (await http.post(f"{client.base_url}inputs", files={"file": png()})).json()["id"]
    edit = "/v1/images/edits"
    edits = begin(client, [line(1, edit, image={"file_id": ref}), line(2, edit)], edit)
    jobs = begin(client, [line(3, "/v1/jobs", priority="interactive", batch_id="mine")], "/v1/jobs")
    for batch in (edits, jobs):
        await work(context, batch.id)
    assert await make(context.queue, context.storage) == 2
    for batch in (edits, jobs):
        await work(context, batch.id)
    edits, jobs = (client.batches.retrieve(batch.id) for batch in (edits, jobs))
    assert [one["custom_id"] for one in told_in(client, edits.output_file_id)] == ["line-1"]
    assert [one["error"]["param"] for one in told_in(client, edits.error_file_id)] == ["image"]
    body = told_in(client, jobs.output_file_id)[0]["response"]["body"]
    assert (body["object"], body["status"], body["priority"], body["batch_id"]) == ("job", "succeeded", "bulk", jobs.id)
    with pytest.raises(openai.APIStatusError) as told:
        client.post("/jobs", body={"model": "demo", "prompt": "x", "batch_id": jobs.id}, cast_to=object)
    assert told.value.param == "batch_id"


async def test_a_canceled_batch_tells_of_every_line(
    client: openai.OpenAI, context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those done, those that waited, and those whose turn had not come."""
    small_chunks(monkeypatch)
    batch = begin(client, [line(number) for number in range(40)])
    for _ in range(3):  # validated, and 20 of them in line
        await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    assert await make(context.queue, context.storage, limit=5) == 5
    assert client.batches.cancel(batch.id).status == "cancelling"
    await work(context, batch.id)
    ended = client.batches.retrieve(batch.id)
    assert ended.status == "cancelled"
    good, bad = told_in(client, ended.output_file_id), told_in(client, ended.error_file_id)
    assert Counter(one["error"]["code"] for one in bad) == {"job_canceled": 15, "batch_cancelled": 20}
    assert sorted(one["custom_id"] for one in good + bad) == sorted(f"line-{number}" for number in range(40))
    assert client.batches.cancel(batch.id).status == "cancelled"


async def test_a_batch_ends_with_its_window(
    client: openai.OpenAI, context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits then expires, what was not taken up is told of, and what is done is delivered."""
    small_chunks(monkeypatch)
    batch = begin(client, [line(number) for number in range(30)])
    for _ in range(2):
        await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    assert await make(context.queue, context.storage, limit=4) == 4
    queue, name = context.queue, context.queue.client.redis_keys.batch("default", batch.id)
    await queue.client.redis.hset(name, "expires_at_ms", now_ms() - 1)
    for job_id in await queue.client.redis.zrange(queue.client.redis_keys.deadlines, 0, -1):
        await queue.client.redis.zadd(queue.client.redis_keys.deadlines, {job_id: 1})
    assert await queue.maintenance.expire() == 6
    await work(context, batch.id)
    ended = client.batches.retrieve(batch.id)
    assert ended.status == "expired"
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 30, "completed": 4, "failed": 26}
    good, bad = told_in(client, ended.output_file_id), told_in(client, ended.error_file_id)
    assert {one["error"]["code"] for one in bad} == {"batch_expired"}
    assert len({one["custom_id"] for one in good + bad}) == len(good) + len(bad) == 30


async def test_a_piece_that_came_too_late_counts_for_nothing(
    client: openai.OpenAI, context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chores on one piece: one is written, and no line becomes two jobs."""
    small_chunks(monkeypatch)
    batch = begin(client, [line(number, **({"size": "1x1"} if number % 5 == 0 else {})) for number in range(20)])
    await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    stale = await context.queue.batches.get("default", batch.id)
    assert await BatchRunner(context, stale).advance()
    assert not await BatchRunner(context, stale).advance()
    await work(context, batch.id)
    assert await make(context.queue, context.storage) == 16
    assert await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    writing = await context.queue.batches.get("default", batch.id)
    assert await BatchRunner(context, writing).advance()
    assert not await BatchRunner(context, writing).advance()
    await work(context, batch.id)
    ended = client.batches.retrieve(batch.id)
    ids = [one["custom_id"] for one in told_in(client, ended.output_file_id) + told_in(client, ended.error_file_id)]
    assert sorted(ids) == sorted(f"line-{number}" for number in range(20))


async def test_a_full_queue_is_waited_for(start: Callable[..., Server]) -> None:
    """Lines for which there is no room stay in the file; none is lost, and none is told to be bad."""
    server = start(max_queued_jobs_per_tenant="7")
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    context = BatchContext(server.settings, models_file.load(server.settings.models), queue, storage)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        batch = begin(client, [line(number) for number in range(20)])
        while not (batch := client.batches.retrieve(batch.id)).completed_at:
            await work(context, batch.id)
            assert (await queue.batches.get("default", batch.id)).open_jobs <= 7
            await make(queue, storage)
        assert len({one["custom_id"] for one in told_in(client, batch.output_file_id)}) == 20
    await queue.close()
    await storage.close()


async def test_batches_are_listed_page_by_page_and_followed(client: openai.OpenAI, context: BatchContext) -> None:
    """Newest first; a stream of events shows one until its end."""
    file_id = upload(client, [line(1)])
    made = [
        client.batches.create(input_file_id=file_id, endpoint=GENERATIONS, completion_window="24h").id for _ in range(5)
    ]
    assert [batch.id for batch in client.batches.list(limit=2)] == list(reversed(made))
    for gone in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            gone("batch_none")
    with pytest.raises(openai.NotFoundError) as told:
        client.batches.create(input_file_id="file_none", endpoint=GENERATIONS, completion_window="24h")
    assert told.value.param == "input_file_id"

    async def finish() -> None:
        await work(context, made[0])
        await make(context.queue, context.storage)
        await work(context, made[0])

    seen = []
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("GET", f"{client.base_url}batches/{made[0]}/events") as events,
    ):
        ending = None
        async for told_line in events.aiter_lines():
            if told_line.startswith("data: "):
                seen.append(json.loads(told_line[6:])["status"])
                ending = ending or asyncio.create_task(finish())
        assert ending is not None
        await ending
    assert (seen[0], seen[-1]) == ("validating", "completed")


STOPPING = """
import os, signal, sys
from shared.queue.batches import Batches
from worker.chores.__main__ import main

read, written = map(int, sys.argv[1:])
commit = Batches.commit

async def stopping(self, batch, *update):
    if batch.read >= read and batch.written >= written:
        os.kill(os.getpid(), signal.SIGSTOP)
    return await commit(self, batch, *update)

Batches.commit = stopping
sys.exit(main())
"""
"""A chores worker that stops (SIGSTOP) before it commits what follows so many lines: it is not done before a kill."""


@contextmanager
def chores(server: Server, folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start chores workers, `STOPPING` ones where it is told after how many lines; all are ended at the end."""
    started: list[subprocess.Popen[bytes]] = []
    values = server.settings.model_dump(include={"redis_url", "namespace", "models", "storage_dir"})
    env = {**os.environ, **{f"FUSEQUEUE_{name.upper()}": str(value) for name, value in values.items()}}

    def begin(*stops_at: int) -> subprocess.Popen[bytes]:
        with (folder / "chores.log").open("ab") as log:
            program = ["-c", STOPPING, *map(str, stops_at)] if stops_at else ["-m", "worker.chores"]
            command = [sys.executable, *program]
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
        return started[-1]

    try:
        yield begin
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait(60)
        print((folder / "chores.log").read_text()[-3000:])


@asynccontextmanager
async def worker(queue: Queue, storage: Storage) -> AsyncIterator[None]:
    """A worker's part, played by hand for as long as this lasts."""

    async def play() -> None:
        while True:
            if not await make(queue, storage):
                await asyncio.sleep(0.05)

    playing = asyncio.create_task(play())
    yield
    playing.cancel()
    await asyncio.wait({playing})


@pytest.mark.timeout(300)
async def test_every_line_is_told_of_once_whatever_is_killed(
    start: Callable[..., Server], tmp_path: Path, eventually: Any
) -> None:
    """5,000 lines, 50 of them bad; the chores worker and the API are killed as they are taken up, and as they end."""
    server = start()
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    lines = [line(number, **({"size": "1x1"} if number % 100 == 7 else {})) for number in range(5_000)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        batch = begin(client, lines)
    counts: list[tuple[int, int]] = []

    async def reached(read: int, written: int) -> bool:
        now = await queue.batches.get("default", batch.id)
        counts.append((now.completed, now.failed))
        return now.status.terminal or (now.read >= read and now.written >= written)

    async with worker(queue, storage):
        with chores(server, tmp_path) as chores_worker:
            for read, written in ((1_000, 0), (5_000, 1_000)):
                process = chores_worker(read, written)
                await eventually(lambda read=read, written=written: reached(read, written), "work is done", 90)
                process.send_signal(signal.SIGKILL)
                server.process.kill()
                server.process.wait(60)
                assert not (await queue.batches.get("default", batch.id)).status.terminal
                server = start(port=str(server.port), namespace=server.settings.namespace)
                row = f"default|{batch.id}"  # it is looked at again after a while: now
                redis, keys = queue.client.redis, queue.client.redis_keys
                assert await redis.zadd(keys.active_batches, {row: 1}, xx=True, ch=True) == 1
            chores_worker()
            await eventually(lambda: reached(10**9, 0), "the batch has ended", 90)
    await queue.close()
    await storage.close()
    assert counts == sorted(counts)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        done = client.batches.retrieve(batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 5_000, "completed": 4_950, "failed": 50}
        good, bad = told_in(client, done.output_file_id), told_in(client, done.error_file_id)
    assert (len(good), len(bad)) == (4_950, 50)
    assert {one["custom_id"] for one in good + bad} == {f"line-{number}" for number in range(5_000)}
    assert len({one["response"]["request_id"] for one in good}) == 4_950
