"""Running, waiting and following a job with the asynchronous client, against the real API."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import WORKER, png

from fusequeue import (
    AsyncClient,
    Client,
    Event,
    InvalidArgument,
    Job,
    JobFailed,
    OutputParams,
    SubmitParams,
    Unreachable,
    WaitTimeout,
)
from shared.job import State
from shared.job_record import Artifact, Outcome
from shared.queue import Claim, Queue

PROMPT = "a red circle on a blue ground, left"
Work = Callable[..., Awaitable[bytes]]


async def test_run_returns_and_saves_the_images_of_a_new_job(api: AsyncClient, work: Work, tmp_path: Path) -> None:
    running = asyncio.create_task(api.run("demo", PROMPT, seed=7, steps=4, folder=tmp_path / "new" / "out"))
    data = await work()
    result = await running
    assert (result.job.status, result.job.seed, result.job.steps) == ("succeeded", 7, 4)
    assert result.data == (data,)
    assert result.files == (tmp_path / "new" / "out" / f"{result.job.id}-0.png",)
    assert result.files[0].read_bytes() == data
    assert [image.size for image in result.images()] == [(64, 64)]


async def test_a_result_shows_itself_without_its_bytes(api: AsyncClient, work: Work) -> None:
    """A notebook shows the image, and a traceback or a log a line."""
    running = asyncio.create_task(api.run("demo", PROMPT, seed=7))
    data = await work()
    result = await running
    assert repr(result) == f"<Result of {result.job.id}: demo, seed 7, {len(data):,} bytes>"
    assert result._repr_png_() == data
    assert replace(result, data=(b"RIFF",))._repr_png_() is None


async def test_a_result_without_a_folder_can_be_saved_later(api: AsyncClient, work: Work, tmp_path: Path) -> None:
    running = asyncio.create_task(api.run("demo", PROMPT))
    await work()
    result = await running
    assert result.files == ()
    assert [file.name for file in result.save(str(tmp_path / "later"), name="mine").files] == ["mine-0.png"]
    assert [file.name for file in (tmp_path / "later").iterdir()] == ["mine-0.png"]


async def test_run_leaves_out_what_a_put_url_has(
    api: AsyncClient, next_job: Callable[[], Awaitable[Claim]], fake_queue: Queue, tmp_path: Path
) -> None:
    """The service cannot read it; its location is where the script has sent it."""
    output: OutputParams = {"put_url": "https://bucket.example/circle.png?X-Amz-Signature=secret"}
    running = asyncio.create_task(api.run("demo", PROMPT, output=output, folder=tmp_path))
    claim = await next_job()
    location = "https://bucket.example/circle.png"
    size: dict[str, Any] = {"bytes": 9, "width": 64, "height": 64}
    artifact = Artifact(index=0, key="a.png", content_type="image/png", seed=7, location=location, **size)
    outcome = Outcome(state=State.SUCCEEDED, artifacts=(artifact,))
    assert await fake_queue.claims.settle(WORKER, claim.job.id, claim.epoch, outcome)
    result = await running
    assert (result.data, result.files, await api.download(result.job, tmp_path)) == ((), (), [])
    assert result.job.artifacts[0].location == location
    assert result.job.output is not None
    assert result.job.output.put_urls == (location,)


async def test_run_raises_for_a_job_without_a_result(api: AsyncClient, work: Work) -> None:
    running = asyncio.create_task(api.run("demo", PROMPT))
    await work("the model failed")
    with pytest.raises(JobFailed, match="the model failed") as caught:
        await running
    assert caught.value.job.status == "failed"


async def test_a_job_continues_when_run_stops_waiting(api: AsyncClient) -> None:
    with pytest.raises(WaitTimeout, match=r"queued after 1 s; it continues") as caught:
        await api.run("demo", PROMPT, timeout_s=1)
    assert (await api.get(caught.value.job)).status == "queued"


async def test_waits_have_a_limit_by_default() -> None:
    waits = [AsyncClient.run, AsyncClient.wait, Client.run, Client.wait]
    limits = [inspect.signature(method).parameters["timeout_s"].default for method in waits]
    async with AsyncClient() as client:
        limits.append(inspect.signature(client.batches.wait).parameters["timeout_s"].default)
    assert all(0 < limit < math.inf for limit in limits)


@pytest.mark.parametrize("timeout_s", [math.nan, -1, "5", True, object()])
async def test_a_time_that_is_none_is_refused_before_a_job_is_submitted(api: AsyncClient, timeout_s: Any) -> None:
    job = await api.submit("demo", PROMPT)
    calls: list[Awaitable[object]] = [
        api.run("demo", PROMPT, timeout_s=timeout_s),
        api.wait(job, timeout_s=timeout_s),
        api.wait(job, timeout_s=timeout_s, on_progress=print),
        api.batches.wait("batch_1", timeout_s=timeout_s),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=r"^timeout_s: "):
            await call
    with pytest.raises(InvalidArgument, match=r"^wait_s: "):
        await api.get(job, wait_s=timeout_s)
    with pytest.raises(InvalidArgument, match=r"^timeout_s: "):
        AsyncClient(timeout_s=timeout_s)
    assert [one.id async for one in api.jobs()] == [job.id]


async def test_only_a_wait_can_have_no_end(api: AsyncClient, work: Work) -> None:
    job = await api.submit("demo", PROMPT)
    for call in (api.wait(job, timeout_s=None), api.wait(job, timeout_s=math.inf)):
        waiting = asyncio.create_task(call)
        if (await api.get(job)).status == "queued":
            await work()
        assert (await waiting).status == "succeeded"
    with pytest.raises(InvalidArgument, match=r"^timeout_s: inf has no end"):
        AsyncClient(timeout_s=math.inf)
    with pytest.raises(InvalidArgument, match=r"^wait_s: inf has no end"):
        await api.get(job, wait_s=math.inf)


async def test_what_run_could_not_use_is_found_before_the_job(api: AsyncClient, tmp_path: Path) -> None:
    """Not minutes later, when the images are there."""
    (tmp_path / "file").write_text("x")
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (InvalidArgument, "^folder: 5 is not a path", {"folder": 5}),
        (NotADirectoryError, "file", {"folder": tmp_path / "file"}),
        (FileNotFoundError, "/proc/images", {"folder": "/proc/images"}),
        (InvalidArgument, "^on_progress: 'bar' is not a function", {"on_progress": "bar"}),
    ]
    for kind, message, arguments in wrong:
        with pytest.raises(kind, match=message):
            await api.run("demo", PROMPT, **arguments)
    assert [job async for job in api.jobs()] == []


@pytest.mark.parametrize("is_async", [False, True])
async def test_progress_is_passed_to_a_function_or_a_coroutine_function(
    api: AsyncClient, work: Work, is_async: bool
) -> None:
    events: list[Event] = []

    async def append(event: Event) -> None:
        await asyncio.sleep(0)
        events.append(event)

    job = await api.submit("demo", PROMPT)
    await work()
    done = await api.wait(job, on_progress=append if is_async else events.append)
    assert done.status == "succeeded"
    assert [event.job for event in events][-1] == done


async def test_a_fault_of_a_callback_ends_the_wait_and_not_the_job(api: AsyncClient) -> None:
    job = await api.submit("demo", PROMPT)
    await api.cancel(job)

    def fail(event: Event) -> None:
        raise ZeroDivisionError(event.status)

    with pytest.raises(ZeroDivisionError, match="canceled"):
        await api.wait(job, on_progress=fail)


async def test_a_wait_with_progress_ends_while_its_stream_is_silent(api: AsyncClient) -> None:
    queued = (await api.submit("demo", PROMPT)).model_dump(mode="json")
    streams: list[str] = []

    class Silent(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

    def respond(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return httpx.Response(202, json=queued)
        streams.append(request.url.path)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Silent())

    async with AsyncClient(transport=httpx.MockTransport(respond)) as client:
        with pytest.raises(WaitTimeout, match="queued"):
            await client.run("demo", PROMPT, timeout_s=0.2, on_progress=print)
    assert streams == [f"/v1/jobs/{queued['id']}/events"]


async def test_a_wait_ends_while_the_service_does_not_respond() -> None:
    """The retries of a request would take minutes."""

    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with AsyncClient(timeout_s=0.05, transport=httpx.MockTransport(hang)) as client:
        with pytest.raises(Unreachable, match=r"no response in 0\.05 s"):
            await client.wait("job_1", timeout_s=0.05)


async def test_a_stream_of_events_outlasts_the_timeout_of_a_request() -> None:
    """The service sends something every 15 s, which is longer than some requests may take."""
    timeouts: list[dict[str, float]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"])
        return httpx.Response(404, json={"detail": "no such job", "code": "not_found"})

    async with AsyncClient(timeout_s=2, transport=httpx.MockTransport(handler)) as client:
        with pytest.raises(Exception, match="no such job"):
            await anext(client.events("job_1"))
    assert (timeouts[0]["connect"], timeouts[0]["read"]) == (2, 60)


async def test_a_job_is_accepted_wherever_its_id_is(api: AsyncClient, work: Work, tmp_path: Path) -> None:
    jobs = [await api.submit("demo", PROMPT, seed=seed) for seed in range(2)]
    assert (await api.get(jobs[0])).id == (await api.get(jobs[0].id)).id
    assert (await api.cancel(jobs[1])).status == "canceled"
    await work()
    done = await api.wait(jobs[0], timeout_s=30)
    assert isinstance(done, Job)
    assert [event.job async for event in api.events(jobs[0])] == [done]
    assert await api.download(done, tmp_path / "a") == [tmp_path / "a" / f"{done.id}-0.png"]
    assert await api.download(done.id, str(tmp_path / "b")) == [tmp_path / "b" / f"{done.id}-0.png"]
    assert await api.read(done.artifacts[0]) == await api.read(done.artifacts[0].url) == png()
    for job in jobs:
        await api.delete(job)
    assert [job async for job in api.jobs()] == []


@pytest.mark.parametrize("method", [Client.run, Client.submit, Client.map, AsyncClient.run])
def test_help_has_each_parameter_with_its_text(method: Callable[..., Any]) -> None:
    text = inspect.getdoc(method) or ""
    assert "\nsteps: int\n    Denoising steps.\n" in text
    assert "\nmask: ImageSource\n    Where `image` is repainted: white.\n" in text
    for name in SubmitParams.__annotations__:
        assert f"\n{name}: " in text
