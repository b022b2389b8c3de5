"""Connections of one client: streams and waits keep no other request from being sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

import httpx
import pytest
from harness.canned import JOB

from fusequeue import AsyncClient, Event, Unreachable
from fusequeue.transport import MAX_REQUESTS

MANY = MAX_REQUESTS + 20
EVENT = b'data: {"id": "job_1", "status": "queued"}\n\n'


class BusyService:
    """Holds event streams open, and responds to waits once `waits` of them have arrived, to other requests at once."""

    def __init__(self) -> None:
        self.waits = 0
        self.url = ""
        self._all_wait = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                target = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
                if target.endswith(b"/events"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT)
                    await asyncio.Event().wait()
                if b"wait=" in target:
                    self.waits += 1
                    if self.waits == MANY:
                        self._all_wait.set()
                    await self._all_wait.wait()
                body = json.dumps(JOB).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def service() -> AsyncIterator[BusyService]:
    service = BusyService()
    server = await asyncio.start_server(service.handle, "127.0.0.1", 0, backlog=MANY)
    service.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield service
    server.close()
    await service.end()


@pytest.fixture
async def api(service: BusyService) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.url, retries=0) as client:
        yield client


async def test_requests_are_sent_while_many_streams_are_open(api: AsyncClient) -> None:
    streams = [api.events("job_1") for _ in range(MANY)]
    async with asyncio.timeout(60):
        first: list[Event] = await asyncio.gather(*map(anext, streams))
        assert {event.status for event in first} == {"queued"}
        assert (await api.get("job_1")).ended
    for stream in streams:
        await stream.aclose()


async def test_many_waits_are_sent_at_once(api: AsyncClient, service: BusyService) -> None:
    """The service responds to none before it has all."""
    async with asyncio.timeout(60):
        jobs = await asyncio.gather(*(api.wait("job_1") for _ in range(MANY)))
    assert ({job.status for job in jobs}, service.waits) == ({"succeeded"}, MANY)


async def test_a_wait_for_a_connection_of_the_callers_own_transport_has_no_limit() -> None:
    timeouts: list[dict[str, float | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"])
        return httpx.Response(200, json=JOB)

    async with AsyncClient("http://api.test", transport=httpx.MockTransport(handler)) as client:
        await client.wait("job_1")
        await client.get("job_1")
    assert [timeout["pool"] for timeout in timeouts] == [None, None]


async def test_other_requests_have_a_bounded_number_of_connections() -> None:
    present = most = 0

    async def handler(_: httpx.Request) -> httpx.Response:
        nonlocal present, most
        present += 1
        most = max(most, present)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        present -= 1
        return httpx.Response(200, json=JOB)

    async with AsyncClient("http://api.test", transport=httpx.MockTransport(handler)) as client:
        await asyncio.gather(*(client.get("job_1") for _ in range(3 * MAX_REQUESTS)))
    assert most == MAX_REQUESTS


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/a.png", "http://api.test: ReadTimeout; is it running? `fusequeue up` starts one here"),
        ("https://images.test:8443/a.png?signature=s", "https://images.test:8443: ReadTimeout"),
    ],
)
async def test_the_error_of_a_request_without_a_response_names_its_host_and_reason(url: str, message: str) -> None:
    """An image can be on another host; httpx's timeouts have no text."""

    def handler(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    async with AsyncClient("http://api.test", retries=0, transport=httpx.MockTransport(handler)) as client:
        with pytest.raises(Unreachable) as caught:
            await client.read(url)
    assert str(caught.value) == message
