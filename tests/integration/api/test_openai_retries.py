"""Files and batches sent again by the `openai` SDK as it is, after a first try whose answer never came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from harness.api_process import Server
from harness.disconnecting_client import send_and_disconnect, write_is_blocked
from harness.waiting import wait_until
from openai import OpenAI
from redis import Redis

from shared.queue import Queue

LINES = b'{"custom_id":"a","method":"POST","url":"/v1/jobs","body":{}}\n'
TRIES = 3
ASKED = {"endpoint": "/v1/images/generations", "completion_window": "24h"}


class Losing(httpx.BaseTransport):
    """Loses the answers of first tries: each goes to a server whose Redis hangs, and is given up while it does."""

    def __init__(self, redis: Redis, made: Callable[[], int]) -> None:
        self._inner = httpx.HTTPTransport()
        self._redis = redis
        self._made = made
        self.losing = True
        self.retries: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            return self._inner.handle_request(request)
        self.retries.append(request.headers["x-stainless-retry-count"])
        if not self.losing or self.retries[-1] != "0":
            return self._inner.handle_request(request)
        before = self._made()
        for _ in range(TRIES):
            self._redis.client_pause(60_000, all=False)
            try:
                send_and_disconnect(request, lambda: write_is_blocked(self._redis))
            except httpx.ReadTimeout as error:
                self._redis.client_unpause()
                if self._more_than(before):
                    raise error
        raise AssertionError(f"nothing came of {TRIES} requests")

    def _more_than(self, before: int) -> bool:
        """Say whether what nobody heard of is made; it is not where another write than its own was waited for."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self._made() > before, "it is made", 10)
            return True
        return False

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def clients(server: Server) -> Iterator[tuple[OpenAI, OpenAI, Losing]]:
    """The SDK, and the SDK on a line that loses answers."""
    url = f"{server.url}/v1"
    with OpenAI(base_url=url, api_key="none") as plain, Redis.from_url(server.settings.redis_url) as redis:
        line = Losing(redis, lambda: len(plain.files.list().data) + len(plain.batches.list().data))
        with OpenAI(base_url=url, api_key="none", max_retries=1, http_client=httpx.Client(transport=line)) as client:
            yield plain, client, line


def test_a_retry_finds_the_file_and_the_batch_of_its_first_try(clients: tuple[OpenAI, OpenAI, Losing]) -> None:
    """Nothing is made twice; once answers arrive again, the same request means another one."""
    plain, client, line = clients
    file = client.files.create(file=("a.jsonl", LINES), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, **ASKED)  # type: ignore[arg-type]
    assert line.retries == ["0", "1", "0", "1"]
    assert [one.id for one in plain.files.list().data] == [file.id]
    assert [one.id for one in plain.batches.list().data] == [batch.id]
    assert plain.files.content(file.id).read() == LINES

    line.losing = False
    retry = {"x-stainless-retry-count": "1"}
    files = [client.files.create(file=("a.jsonl", LINES), purpose="batch", extra_headers=retry) for _ in range(2)]
    batches = [client.batches.create(input_file_id=file.id, **ASKED, extra_headers=retry) for _ in range(2)]  # type: ignore[arg-type]
    assert len({one.id for one in (file, *files)}) == len({one.id for one in (batch, *batches)}) == 3


@asynccontextmanager
async def gate(url: str, opened: asyncio.Event) -> AsyncIterator[str]:
    """Another address of a server, which passes on what comes while it is open."""
    tasks: set[asyncio.Task[None]] = set()
    host, _, port = url.removeprefix("http://").partition(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await opened.wait()
            writer.write(data)
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        there, back = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(pump(reader, back), pump(there, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (back, writer):
                one.transport.abort()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_retry_waits_for_a_file_that_is_being_stored(start: Callable[..., Server], s3_server: str) -> None:
    """Its first try, whose client has left, goes on storing what it got."""
    own = {
        "s3_bucket": "images",
        "s3_access_key_id": "test",
        "s3_secret_access_key": "test",
        "storage_timeout_s": "60",
    }
    opened = asyncio.Event()
    opened.set()
    async with gate(s3_server, opened) as address:
        server = await asyncio.to_thread(start, s3_endpoint_url=address, **own)
        queue = Queue.connect(server.settings)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

            def send(retry: int) -> asyncio.Future[httpx.Response]:
                sent: dict[str, Any] = {"files": {"file": ("a.jsonl", LINES)}, "data": {"purpose": "batch"}}
                sent["headers"] = {"x-stainless-retry-count": str(retry)}
                return asyncio.ensure_future(http.post("/v1/files", **sent))

            opened.clear()
            first = send(0)
            async with asyncio.timeout(60):
                while not (
                    tries := [
                        key
                        async for key in queue.client.redis.scan_iter(f"{queue.client.redis_keys.prefix}sync_calls:*")
                    ]
                ):
                    await asyncio.sleep(0.01)
                first.cancel()  # and so the connection is closed
                await asyncio.wait({first})
                retrying = send(1)
                while (await queue.client.redis.zrange(tries[0], 0, -1, withscores=True))[0][1] < 1000:
                    await asyncio.sleep(0.01)
            opened.set()
            made = (await retrying).json()["id"]
            assert [one["id"] for one in (await http.get("/v1/files")).json()["data"]] == [made]
        await queue.close()
