"""The Python client against an API process, with a worker's part played by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from harness.api_process import Server
from harness.http_server import claimed, deliver, png

from fusequeue import AsyncClient, Client, Job, NotFound, WaitTimeout
from shared.job import Phase, Progress
from shared.queue import ProgressReport, Queue

PROMPT = "a red circle on a blue ground, left"


@pytest.fixture
async def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
async def api(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url) as client:
        yield client


@pytest.fixture
async def queue(server: Server) -> AsyncIterator[Queue]:
    queue = Queue.connect(server.settings)
    yield queue
    await queue.close()


async def test_a_job_from_submit_to_file(api: AsyncClient, queue: Queue, tmp_path: Path) -> None:
    """A picture goes in as bytes; the result comes back as a file that is whole."""
    job = await api.submit("demo", PROMPT, image=png(), strength=0.5, seed=7)
    waiting = asyncio.create_task(api.wait(job.id, timeout_s=30))
    data = await deliver(queue, tmp_path, await claimed(queue, job.id))
    done = (await waiting).require_success()
    assert done.seed == 7
    files = await api.download(done, tmp_path / "out", name="mine")
    assert [file.name for file in files] == ["mine-0.png"]
    assert files[0].read_bytes() == data
    assert sorted((tmp_path / "out").iterdir()) == files


async def test_events_come_in_order_up_to_the_whole_job(api: AsyncClient, queue: Queue, tmp_path: Path) -> None:
    job = await api.submit("demo", PROMPT)
    seen: list[tuple[str, int]] = []
    ended: list[Job] = []

    async def follow() -> None:
        async for event in api.events(job.id):
            seen.append((event.status, event.progress.step))
            if event.job is not None:
                ended.append(event.job)

    following = asyncio.create_task(follow())
    async with asyncio.timeout(30):
        while not seen:
            await asyncio.sleep(0.01)
        claim = await claimed(queue, job.id)
        while seen[-1] != ("running", 2):
            await queue.claims.report_progress(
                ProgressReport(job.id, claim.epoch, Phase.DENOISING, Progress(step=2, total=4))
            )
            await asyncio.sleep(0.05)
        await deliver(queue, tmp_path, claim)
        await following
    assert seen[0] == ("queued", 0)
    assert ended[0].status == "succeeded"


async def test_events_outlive_the_api_process(
    server: Server, start: Callable[..., Server], api: AsyncClient, queue: Queue, tmp_path: Path
) -> None:
    """Whoever follows a job hears of its end, though the process that told of it was replaced meanwhile."""
    job = await api.submit("demo", PROMPT)
    stream = api.events(job.id)
    assert (await anext(stream)).status == "queued"
    await asyncio.to_thread(server.stop)
    again = asyncio.create_task(asyncio.to_thread(start, port=str(server.port), namespace=server.settings.namespace))
    await deliver(queue, tmp_path, await claimed(queue, job.id))
    statuses = [event.status async for event in stream]
    await again
    assert statuses[-1] == "succeeded"


async def test_what_has_not_ended_in_time_goes_on(api: AsyncClient) -> None:
    job = await api.submit("demo", PROMPT)
    with pytest.raises(WaitTimeout, match="queued"):
        await api.wait(job.id, timeout_s=0.2)
    assert (await api.cancel(job.id)).status == "canceled"
    await api.delete(job.id)
    with pytest.raises(NotFound):
        await api.get(job.id)


async def test_many_jobs_once_each_however_often_they_are_sent(api: AsyncClient) -> None:
    """The second time with the same key enqueues nothing, over several requests' worth of lines."""
    bodies = [{"model": "demo", "prompt": PROMPT, "seed": at, "batch_id": "many"} for at in range(2_100)]
    bodies[5]["steps"] = 0
    first = [result async for result in api.submit_many(bodies, idempotency_key="k")]
    again = [result async for result in api.submit_many(bodies, idempotency_key="k")]
    some = [body if at % 700 == 3 else None for at, body in enumerate(bodies)]
    assert [result async for result in api.submit_many(some, idempotency_key="k")] == again[3::700]
    assert [result async for result in api.submit_many([None] * 5, idempotency_key="k")] == []
    assert [result.line for result in first] == list(range(1, 2_101))
    assert [result.id for result in first] == [result.id for result in again]
    assert first[5].error is not None
    assert first[5].error.param == "steps"
    listed = [job.id async for job in api.jobs(batch_id="many")]
    assert len(set(listed)) == len(listed) == 2_099
    assert len([job async for job in api.jobs(batch_id="many", limit=150)]) == 150


async def test_the_plain_client_does_the_same(server: Server, queue: Queue, tmp_path: Path) -> None:
    """From a thread without a loop, as scripts call it."""
    made: list[Job] = []
    submitted = threading.Event()

    def script() -> None:
        with Client(server.url) as client:
            job = client.submit("demo", PROMPT)
            made.append(job)
            submitted.set()
            made.append(client.wait(job.id, timeout_s=30))
            assert [event.status for event in client.events(job.id)] == ["succeeded"]
            assert [one.id for one in client.jobs(limit=1)] == [job.id]
            assert client.models()[0]["id"] == "demo"

    running = asyncio.create_task(asyncio.to_thread(script))
    await asyncio.to_thread(submitted.wait, 30)
    await deliver(queue, tmp_path, await claimed(queue, made[0].id))
    await running
    assert made[1].status == "succeeded"
