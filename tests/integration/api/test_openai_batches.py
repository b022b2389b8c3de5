"""Batches with the unmodified `openai` SDK and a real API; the tests act as the worker."""

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
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from harness.api_process import Server
from harness.api_thread import ApiThread
from harness.http_server import ROOT, WORKER, png
from harness.queue import come_due

from api.protocols.openai.batches import batch_files, batch_runner
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_runner import BatchRunner
from shared.auth import Scope
from shared.config import models_file
from shared.job import State
from shared.job_record import Artifact, Outcome
from shared.queue import Claim, Queue
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.runtime.clock import SyncedClock, now_ms
from shared.storage import Storage, connect

GENERATIONS = "/v1/images/generations"


@pytest.fixture
def server(serve: Callable[..., ApiThread]) -> ApiThread:
    return serve()


@pytest.fixture
def client(server: ApiThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def queue(server: ApiThread) -> AsyncIterator[Queue]:
    opened = Queue.connect(server.settings)
    yield opened
    await opened.close()


@pytest.fixture
async def storage(server: ApiThread) -> AsyncIterator[Storage]:
    opened = connect(server.settings)
    yield opened
    await opened.close()


@pytest.fixture
def context(server: ApiThread, queue: Queue, storage: Storage) -> BatchContext:
    settings = server.settings
    return BatchContext(settings, models_file.load(settings.models), queue, storage, SyncedClock(now_ms()))


def line(number: int, url: str = GENERATIONS, **body: Any) -> dict[str, Any]:
    inline = {} if url == "/v1/jobs" else {"response_format": "url"}  # most tests store no images
    fields = {"model": "demo", "prompt": f"a red circle, number {number}", "steps": 2, **inline, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": fields}


def upload(client: openai.OpenAI, lines: list[Any]) -> str:
    content = "\n".join(item if isinstance(item, str) else json.dumps(item) for item in lines)
    return client.files.create(file=("in.jsonl", BytesIO(content.encode())), purpose="batch").id


def create(client: openai.OpenAI, lines: list[Any], endpoint: Any = GENERATIONS, **more: Any) -> openai.types.Batch:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **more
    )


def read_lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(row) for row in client.files.content(file_id).text.splitlines()]


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batch_runner, batch_files):
        monkeypatch.setattr(module, "CHUNK_LINES", 10)


async def advance(context: BatchContext, batch_id: str) -> None:
    """Run all steps that are possible now."""
    while await BatchRunner(context, await context.queue.batches.get("default", batch_id)).advance():
        pass


async def finish_jobs(queue: Queue, storage: Storage, *, limit: int = 10**9) -> int:
    """Finish the queued jobs as a worker, and return their number."""
    count = 0
    while count < limit:
        claims = await queue.claims.claim(WORKER, ["demo"], min(64, limit - count))
        if not claims:
            return count
        await asyncio.gather(*(_finish(queue, storage, claim) for claim in claims))
        count += len(claims)
    return count


async def _finish(queue: Queue, storage: Storage, claim: Claim) -> None:
    data, key = png(), f"jobs/{claim.job.id}/{claim.epoch}/0.png"
    if "stored" in claim.job.prompt:
        await storage.put(key, data, "image/png")
    artifact = Artifact(
        index=0, key=key, content_type="image/png", bytes=len(data), width=64, height=64, seed=claim.job.seed
    )
    await queue.claims.settle(WORKER, claim.job.id, claim.epoch, Outcome(state=State.SUCCEEDED, artifacts=(artifact,)))


async def test_files_create_batches_create_retrieve_content(client: openai.OpenAI, context: BatchContext) -> None:
    """From the input file to the output files: images as URLs or base64, and the errors of invalid lines."""
    lines = [
        line(1, prompt="stored", seed=5),
        "",
        line(2, prompt="stored", response_format=None),
        line(3, size="4096x64"),
        line(4, model="unknown"),
    ]
    keep = {"anchor": "created_at", "seconds": 3_600}
    batch = create(client, lines, metadata={"order": "7"}, output_expires_after=keep)
    assert (batch.status, batch.metadata) == ("validating", {"order": "7"})

    await advance(context, batch.id)
    running = client.batches.retrieve(batch.id)
    assert running.status == "in_progress"
    assert running.request_counts is not None
    assert running.request_counts.model_dump() == {"total": 4, "completed": 0, "failed": 2}
    jobs, _ = await context.queue.jobs.page("default", batch_id=batch.id)
    assert {(job.job.priority, job.job.batch_id) for job in jobs} == {("bulk", batch.id)}
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)

    assert await finish_jobs(context.queue, context.storage) == 2
    await advance(context, batch.id)
    done = client.batches.retrieve(batch.id)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    results, errors = read_lines(client, done.output_file_id), read_lines(client, done.error_file_id)
    by_url, as_base64 = (row["response"]["body"]["data"][0] for row in results)
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(by_url["url"])).content == png()
    assert (by_url["seed"], as_base64["b64_json"][:4]) == (5, "iVBO")
    assert {(row["custom_id"], row["error"]["code"], row["error"]["param"]) for row in errors} == {
        ("line-3", "invalid_request", "size"),
        ("line-4", "model_not_found", "model"),
    }
    output = client.files.retrieve(done.output_file_id or "")
    assert (output.purpose, (output.expires_at or 0) - output.created_at) == ("batch_output", 3_600)
    assert [file.id for file in client.files.list(purpose="batch")] == [batch.input_file_id]
    assert client.files.delete(batch.input_file_id).deleted


INVALID: list[tuple[list[Any], str, int | None]] = [
    ([line(1), "{invalid json"], "invalid_json_line", 2),
    ([line(1), line(1)], "duplicate_custom_id", 2),
    (["", line(1, url="/v1/jobs")], "mismatched_url", 2),
    ([{**line(1), "method": "GET"}], "invalid_method", 1),
    ([{"method": "POST", "url": GENERATIONS, "body": {}}], "missing_required_parameter", 1),
    ([{**line(1), "body": "text"}], "missing_required_parameter", 1),
    (["\n \n"], "empty_file", None),
    ([line(number) for number in range(21)], "too_many_lines", None),
]


async def test_an_invalid_file_fails_the_batch(
    client: openai.OpenAI, context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any line becomes a job; the errors name the lines."""
    monkeypatch.setattr(batch_runner, "MAX_LINES", 20)
    for lines, code, number in INVALID:
        batch = create(client, lines)
        await advance(context, batch.id)
        failed = client.batches.retrieve(batch.id)
        assert failed.status == "failed"
        assert failed.errors is not None
        assert [(error.code, error.line) for error in failed.errors.data or ()] == [(code, number)]
    assert await context.queue.jobs.page("default") == ([], None)


async def test_each_endpoint_has_its_own_bodies(client: openai.OpenAI, context: BatchContext) -> None:
    """An edit needs an image, a job results in a job object, and a line cannot set its batch."""
    async with httpx.AsyncClient(timeout=60) as http:
        ref = (await http.post(f"{client.base_url}inputs", files={"file": png()})).json()["id"]
    edit = "/v1/images/edits"
    edits = create(client, [line(1, edit, image={"file_id": ref}), line(2, edit)], edit)
    jobs = create(client, [line(3, "/v1/jobs", priority="interactive", batch_id="mine")], "/v1/jobs")
    for batch in (edits, jobs):
        await advance(context, batch.id)
    assert await finish_jobs(context.queue, context.storage) == 2
    for batch in (edits, jobs):
        await advance(context, batch.id)
    edits, jobs = (client.batches.retrieve(batch.id) for batch in (edits, jobs))
    assert [row["custom_id"] for row in read_lines(client, edits.output_file_id)] == ["line-1"]
    assert [row["error"]["param"] for row in read_lines(client, edits.error_file_id)] == ["image"]
    body = read_lines(client, jobs.output_file_id)[0]["response"]["body"]
    assert (body["object"], body["status"], body["priority"], body["batch_id"]) == ("job", "succeeded", "bulk", jobs.id)
    with pytest.raises(openai.APIStatusError) as error:
        client.post("/jobs", body={"model": "demo", "prompt": "x", "batch_id": jobs.id}, cast_to=object)
    assert error.value.param == "batch_id"


async def test_a_line_for_later_starts_and_ends_within_the_window_of_its_batch(
    client: openai.OpenAI, context: BatchContext
) -> None:
    """A delay counts from the submit of the batch."""
    beyond = (datetime.now(UTC) + timedelta(hours=25)).isoformat()
    jobs = [line(number, "/v1/jobs", not_before=start) for number, start in enumerate((3600, beyond, 90_000), 1)]
    jobs.append(line(4, "/v1/jobs", after=["job_00000000000000000000000000"]))
    batch = create(client, jobs, "/v1/jobs")
    await advance(context, batch.id)
    ((record,), _) = await context.queue.jobs.page("default")
    assert record.waits
    assert record.job.not_before_ms == record.job.created_at_ms + 3_600_000
    window_ms = 86_400_000
    assert record.deadline_at_ms == pytest.approx(1000 * batch.created_at + window_ms, abs=5000)
    assert await finish_jobs(context.queue, context.storage) == 0
    await come_due(context.queue, record.job.id)
    assert await context.queue.maintenance.queue_due() == 1
    assert await finish_jobs(context.queue, context.storage) == 1
    await advance(context, batch.id)
    ended = client.batches.retrieve(batch.id)
    assert [row["custom_id"] for row in read_lines(client, ended.output_file_id)] == ["line-1"]
    assert [row["error"]["param"] for row in read_lines(client, ended.error_file_id)] == [
        "not_before",
        "not_before",
        "after",
    ]


async def test_a_line_cannot_start_from_a_job_that_has_not_ended(client: openai.OpenAI, context: BatchContext) -> None:
    """Its deadline, the end of the batch, would count from an unknown time."""
    job = client.post("/jobs", body={"model": "demo", "prompt": "x"}, cast_to=object)
    assert isinstance(job, dict)
    batch = create(client, [line(1, "/v1/jobs", image={"job": job["id"]}, strength=0.5)], "/v1/jobs")
    await advance(context, batch.id)
    (row,) = read_lines(client, client.batches.retrieve(batch.id).error_file_id)
    assert row["error"]["param"] == "image"
    assert "cannot wait" in row["error"]["message"]


async def test_urls_in_the_output_of_a_keyed_service_need_no_key(serve: Callable[..., ApiThread]) -> None:
    """Of images and of jobs, until the images expire; a base64 image is the default, as in synchronous calls."""
    server = serve(auth="keys", presign_expires_s=60)
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    key, _ = await queue.api_keys.create("default", frozenset((Scope.JOBS_READ, Scope.JOBS_WRITE)))
    catalog = models_file.load(server.settings.models)
    context = BatchContext(server.settings, catalog, queue, storage, SyncedClock(now_ms()))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        images = create(client, [line(1, prompt="stored"), line(2, prompt="stored", response_format=None)])
        jobs = create(client, [line(1, "/v1/jobs", prompt="stored")], "/v1/jobs")
        for batch in (images, jobs):
            await advance(context, batch.id)
        assert await finish_jobs(queue, storage) == 3
        for batch in (images, jobs):
            await advance(context, batch.id)
        outputs = [client.batches.retrieve(batch.id).output_file_id for batch in (images, jobs)]
        by_url, inline, job = (row["response"]["body"] for output in outputs for row in read_lines(client, output))
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="none").models.list()
    assert inline["data"][0]["b64_json"]
    async with httpx.AsyncClient(timeout=60) as http:
        for url in (by_url["data"][0]["url"], job["artifacts"][0]["url"]):
            assert (await http.get(url)).content == png()
            record = await queue.jobs.get(url.split("/")[5])
            assert record is not None
            assert int(httpx.URL(url).params["expires"]) == (record.expires_at_ms or 0) // 1000
            assert (await http.get(url.partition("?")[0])).status_code == 401
    await queue.close()
    await storage.close()


async def test_a_canceled_batch_has_a_result_or_an_error_for_every_line(
    client: openai.OpenAI, context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For finished, queued and unsubmitted lines."""
    small_chunks(monkeypatch)
    batch = create(client, [line(number) for number in range(40)])
    for _ in range(3):  # validated, and 20 lines submitted
        await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    assert await finish_jobs(context.queue, context.storage, limit=5) == 5
    assert client.batches.cancel(batch.id).status == "cancelling"
    await advance(context, batch.id)
    ended = client.batches.retrieve(batch.id)
    assert ended.status == "cancelled"
    results, errors = read_lines(client, ended.output_file_id), read_lines(client, ended.error_file_id)
    assert Counter(row["error"]["code"] for row in errors) == {"job_canceled": 15, "batch_cancelled": 20}
    assert sorted(row["custom_id"] for row in results + errors) == sorted(f"line-{number}" for number in range(40))
    assert client.batches.cancel(batch.id).status == "cancelled"


async def test_a_batch_expires_at_the_end_of_its_window(
    client: openai.OpenAI, context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queued jobs expire, unsubmitted lines have an error, and finished results are kept."""
    small_chunks(monkeypatch)
    batch = create(client, [line(number) for number in range(30)])
    for _ in range(2):
        await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    assert await finish_jobs(context.queue, context.storage, limit=4) == 4
    queue, name = context.queue, context.queue.client.redis_keys.batch("default", batch.id)
    await queue.client.redis.hset(name, "expires_at_ms", now_ms() - 1)
    for job_id in await queue.client.redis.zrange(queue.client.redis_keys.deadlines, 0, -1):
        await queue.client.redis.hset(queue.client.redis_keys.job(job_id), "deadline", 1)
        await queue.client.redis.zadd(queue.client.redis_keys.deadlines, {job_id: 1})
    assert await queue.maintenance.expire() == 6
    await advance(context, batch.id)
    ended = client.batches.retrieve(batch.id)
    assert ended.status == "expired"
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 30, "completed": 4, "failed": 26}
    results, errors = read_lines(client, ended.output_file_id), read_lines(client, ended.error_file_id)
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}
    assert len({row["custom_id"] for row in results + errors}) == len(results) + len(errors) == 30


async def test_an_outdated_step_has_no_effect(
    client: openai.OpenAI, context: BatchContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two chores that run the same step, one is committed, and no line becomes two jobs."""
    small_chunks(monkeypatch)
    batch = create(client, [line(number, **({"size": "1x1"} if number % 5 == 0 else {})) for number in range(20)])
    await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    stale = await context.queue.batches.get("default", batch.id)
    assert await BatchRunner(context, stale).advance()
    assert not await BatchRunner(context, stale).advance()
    await advance(context, batch.id)
    assert await finish_jobs(context.queue, context.storage) == 16
    assert await BatchRunner(context, await context.queue.batches.get("default", batch.id)).advance()
    writing = await context.queue.batches.get("default", batch.id)
    assert await BatchRunner(context, writing).advance()
    assert not await BatchRunner(context, writing).advance()
    await advance(context, batch.id)
    ended = client.batches.retrieve(batch.id)
    ids = [
        row["custom_id"] for row in read_lines(client, ended.output_file_id) + read_lines(client, ended.error_file_id)
    ]
    assert sorted(ids) == sorted(f"line-{number}" for number in range(20))


async def test_a_batch_waits_while_the_queue_is_full(serve: Callable[..., ApiThread]) -> None:
    """Refused lines stay in the file; none is lost or reported as an error."""
    server = serve(max_queued_jobs_per_tenant=7)
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    context = BatchContext(
        server.settings, models_file.load(server.settings.models), queue, storage, SyncedClock(now_ms())
    )
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        batch = create(client, [line(number) for number in range(20)])
        while not (batch := client.batches.retrieve(batch.id)).completed_at:
            await advance(context, batch.id)
            assert (await queue.batches.get("default", batch.id)).open_jobs <= 7
            await finish_jobs(queue, storage)
        assert len({row["custom_id"] for row in read_lines(client, batch.output_file_id)}) == 20
    await queue.close()
    await storage.close()


async def test_batches_are_paged_and_streamed(client: openai.OpenAI, context: BatchContext) -> None:
    """Newest first; an event stream shows a batch until its end."""
    file_id = upload(client, [line(1)])
    ids = [
        client.batches.create(input_file_id=file_id, endpoint=GENERATIONS, completion_window="24h").id for _ in range(5)
    ]
    assert [batch.id for batch in client.batches.list(limit=2)] == list(reversed(ids))
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call("batch_none")
    with pytest.raises(openai.NotFoundError) as error:
        client.batches.create(input_file_id="file_none", endpoint=GENERATIONS, completion_window="24h")
    assert error.value.param == "input_file_id"

    async def finish() -> None:
        await advance(context, ids[0])
        await finish_jobs(context.queue, context.storage)
        await advance(context, ids[0])

    statuses = []
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("GET", f"{client.base_url}batches/{ids[0]}/events") as events,
    ):
        finishing = None
        async for event in events.aiter_lines():
            if event.startswith("data: "):
                statuses.append(json.loads(event[6:])["status"])
                finishing = finishing or asyncio.create_task(finish())
        assert finishing is not None
        await finishing
    assert (statuses[0], statuses[-1]) == ("validating", "completed")


STOPPING = """
import os, signal, sys
from shared.queue.batches import Batches
from api.chores.__main__ import main

read, written = map(int, sys.argv[1:])
commit = Batches.commit

async def stopping(self, batch, *update):
    if batch.read >= read and batch.written >= written:
        os.kill(os.getpid(), signal.SIGSTOP)
    return await commit(self, batch, *update)

Batches.commit = stopping
sys.exit(main())
"""
"""A chores worker that stops (SIGSTOP) before a commit after so many lines, so that it is killed in the step."""


@contextmanager
def chores(server: Server, folder: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start chores workers, with line counts as `STOPPING`; all are stopped at the end."""
    started: list[subprocess.Popen[bytes]] = []
    values = server.settings.model_dump(include={"redis_url", "namespace", "models", "storage_dir"})
    env = {**os.environ, **{f"FUSEQUEUE_{name.upper()}": str(value) for name, value in values.items()}}

    def start_worker(*stops_at: int) -> subprocess.Popen[bytes]:
        with (folder / "chores.log").open("ab") as log:
            program = ["-c", STOPPING, *map(str, stops_at)] if stops_at else ["-m", "api.chores"]
            command = [sys.executable, *program]
            started.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))
        return started[-1]

    try:
        yield start_worker
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait(60)
        print((folder / "chores.log").read_text()[-3000:])


@asynccontextmanager
async def worker(queue: Queue, storage: Storage) -> AsyncIterator[None]:
    """Finish queued jobs in the background."""

    async def run() -> None:
        while True:
            if not await finish_jobs(queue, storage):
                await asyncio.sleep(0.05)

    task = asyncio.create_task(run())
    yield
    await cancel_and_wait((task,))


@pytest.mark.timeout(300)
async def test_every_line_has_one_result_after_kills(
    start: Callable[..., Server], tmp_path: Path, eventually: Any
) -> None:
    """2,000 lines, 20 of them invalid; the chores worker and the API are killed during submission and writing."""
    server = start()
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    lines = [line(number, **({"size": "1x1"} if number % 100 == 7 else {})) for number in range(2_000)]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        batch = create(client, lines)
    counts: list[tuple[int, int]] = []

    async def reached(read: int, written: int) -> bool:
        now = await queue.batches.get("default", batch.id)
        counts.append((now.completed, now.failed))
        return now.status.terminal or (now.read >= read and now.written >= written)

    async with worker(queue, storage):
        with chores(server, tmp_path) as chores_worker:
            for read, written in ((500, 0), (2_000, 500)):
                process = chores_worker(read, written)
                await eventually(lambda read=read, written=written: reached(read, written), "the step is reached", 90)
                process.send_signal(signal.SIGKILL)
                server.process.kill()
                server.process.wait(60)
                assert not (await queue.batches.get("default", batch.id)).status.terminal
                server = start(port=str(server.port), namespace=server.settings.namespace)
                redis, keys = queue.client.redis, queue.client.redis_keys  # due now instead of after a while
                assert await redis.zadd(keys.active_batches("default"), {batch.id: 1}, xx=True, ch=True) == 1
                await redis.zadd(keys.batch_tenants, {"default": 1})
            chores_worker()
            await eventually(lambda: reached(10**9, 0), "the batch has ended", 90)
    await queue.close()
    await storage.close()
    assert counts == sorted(counts)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        done = client.batches.retrieve(batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 2_000, "completed": 1_980, "failed": 20}
        results, errors = read_lines(client, done.output_file_id), read_lines(client, done.error_file_id)
    assert (len(results), len(errors)) == (1_980, 20)
    assert {row["custom_id"] for row in results + errors} == {f"line-{number}" for number in range(2_000)}
    assert len({row["response"]["request_id"] for row in results}) == 1_980


async def test_a_byte_order_mark_before_the_first_line_is_left_out(
    client: openai.OpenAI, context: BatchContext, queue: Queue, storage: Storage
) -> None:
    """Editors and shells of Windows write one."""
    batch = create(client, ["\ufeff" + json.dumps(line(1)), line(2)])
    await advance(context, batch.id)
    assert await finish_jobs(queue, storage) == 2
    await advance(context, batch.id)
    done = client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.completed if done.request_counts else 0) == ("completed", 2)
