"""The Python client against an API process; the test acts as the worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from harness.api_process import Server
from harness.http_server import claimed, deliver, png

from fusequeue import AsyncClient, Client, Event, Job, NotFound, Result, WaitTimeout
from shared.job import Phase
from shared.job_record import Progress
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


async def test_a_job_from_submit_to_download(api: AsyncClient, queue: Queue, tmp_path: Path) -> None:
    """The input image is sent as bytes, the result is saved to a file."""
    job = await api.submit("demo", PROMPT, image=png(), strength=0.5, seed=7)
    wait = asyncio.create_task(api.wait(job.id, timeout_s=30))
    data = await deliver(queue, tmp_path, await claimed(queue, job.id))
    done = (await wait).require_success()
    assert done.seed == 7
    files = await api.download(done, tmp_path / "out", name="mine")
    assert [file.name for file in files] == ["mine-0.png"]
    assert files[0].read_bytes() == data
    assert sorted((tmp_path / "out").iterdir()) == files


async def test_events_are_in_order_and_end_with_the_whole_job(api: AsyncClient, queue: Queue, tmp_path: Path) -> None:
    job = await api.submit("demo", PROMPT)
    events: list[tuple[str, int]] = []
    ended: list[Job] = []

    async def read_events() -> None:
        async for event in api.events(job.id):
            events.append((event.status, event.progress.step))
            if event.job is not None:
                ended.append(event.job)

    reading = asyncio.create_task(read_events())
    async with asyncio.timeout(30):
        while not events:
            await asyncio.sleep(0.01)
        claim = await claimed(queue, job.id)
        while events[-1] != ("running", 2):
            await queue.claims.report_progress(
                ProgressReport(job.id, claim.epoch, Phase.DENOISING, Progress(step=2, total=4))
            )
            await asyncio.sleep(0.05)
        await deliver(queue, tmp_path, claim)
        await reading
    assert events[0] == ("queued", 0)
    assert ended[0].status == "succeeded"


async def test_events_continue_after_a_restart_of_the_api(
    server: Server, start: Callable[..., Server], api: AsyncClient, queue: Queue, tmp_path: Path
) -> None:
    """A client receives the final event from the new API process."""
    job = await api.submit("demo", PROMPT)
    stream = api.events(job.id)
    assert (await anext(stream)).status == "queued"
    await asyncio.to_thread(server.stop)
    restart = asyncio.create_task(asyncio.to_thread(start, port=str(server.port), namespace=server.settings.namespace))
    await deliver(queue, tmp_path, await claimed(queue, job.id))
    statuses = [event.status async for event in stream]
    await restart
    assert statuses[-1] == "succeeded"


async def test_a_job_continues_after_a_wait_timeout(api: AsyncClient) -> None:
    job = await api.submit("demo", PROMPT)
    with pytest.raises(WaitTimeout, match="queued"):
        await api.wait(job.id, timeout_s=0.2)
    assert (await api.cancel(job.id)).status == "canceled"
    await api.delete(job.id)
    with pytest.raises(NotFound):
        await api.get(job.id)


async def test_a_repeated_bulk_submit_enqueues_each_job_once(api: AsyncClient) -> None:
    """Repeats with the same key enqueue nothing, also when the lines need several requests."""
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


async def test_the_synchronous_client_does_the_same(server: Server, queue: Queue, tmp_path: Path) -> None:
    """Called from a thread without an event loop."""
    results: list[Job] = []
    submitted = threading.Event()

    def script() -> None:
        with Client(server.url) as client:
            job = client.submit("demo", PROMPT)
            results.append(job)
            submitted.set()
            results.append(client.wait(job.id, timeout_s=30))
            assert [event.status for event in client.events(job.id)] == ["succeeded"]
            assert [one.id for one in client.jobs(limit=1)] == [job.id]
            assert client.models()[0].id == "demo"

    running = asyncio.create_task(asyncio.to_thread(script))
    await asyncio.to_thread(submitted.wait, 30)
    await deliver(queue, tmp_path, await claimed(queue, results[0].id))
    await running
    assert results[1].status == "succeeded"


async def test_a_script_runs_a_job_and_shows_its_progress(
    server: Server, api: AsyncClient, queue: Queue, tmp_path: Path
) -> None:
    """Events arrive while the job runs, in the script's own thread."""
    steps: list[int] = []
    threads: set[threading.Thread] = set()

    def note(event: Event) -> None:
        threads.add(threading.current_thread())
        steps.append(event.progress.step)

    def script() -> tuple[Result, threading.Thread]:
        with Client(server.url) as client:
            result = client.run("demo", PROMPT, folder=tmp_path / "out", on_progress=note, timeout_s=60)
            return result, threading.current_thread()

    running = asyncio.create_task(asyncio.to_thread(script))
    async with asyncio.timeout(30):
        while not (found := [job async for job in api.jobs()]) or not steps:
            await asyncio.sleep(0.01)
        claim = await claimed(queue, found[0].id)
        while 2 not in steps:
            await queue.claims.report_progress(
                ProgressReport(found[0].id, claim.epoch, Phase.DENOISING, Progress(step=2, total=4))
            )
            await asyncio.sleep(0.05)
        data = await deliver(queue, tmp_path, claim)
        result, thread = await running
    assert [file.read_bytes() for file in result.files] == [data]
    assert threads == {thread}
