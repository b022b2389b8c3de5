"""Calls that the unmodified `openai` SDK retries after a lost or refused response."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from harness.api_process import Server
from harness.api_thread import ApiThread
from harness.disconnecting_client import send_and_disconnect, write_is_blocked
from harness.waiting import wait_until
from openai import OpenAI
from redis import Redis

from shared.queue import Queue
from shared.storage.folder import FolderStorage

LINES = b'{"custom_id":"a","method":"POST","url":"/v1/jobs","body":{}}\n'
MAX_REQUESTS = 3
PARAMS = {"endpoint": "/v1/images/generations", "completion_window": "24h"}


class LossyTransport(httpx.BaseTransport):
    """Loses the responses of first attempts: disconnects while Redis blocks the server's write."""

    def __init__(self, redis: Redis, count: Callable[[], int]) -> None:
        self._inner = httpx.HTTPTransport()
        self._redis = redis
        self._count = count
        self.losing = True
        self.retries: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            return self._inner.handle_request(request)
        self.retries.append(request.headers["x-stainless-retry-count"])
        if not self.losing or self.retries[-1] != "0":
            return self._inner.handle_request(request)
        before = self._count()
        for _ in range(MAX_REQUESTS):
            self._redis.client_pause(60_000, all=False)
            try:
                send_and_disconnect(request, lambda: write_is_blocked(self._redis))
            except httpx.ReadTimeout as error:
                self._redis.client_unpause()
                if self._more_than(before):
                    raise error
        raise AssertionError(f"{MAX_REQUESTS} requests created nothing")

    def _more_than(self, before: int) -> bool:
        """Return whether the request took effect; not if another blocked write triggered the disconnect."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self._count() > before, "the request takes effect", 10)
            return True
        return False

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def clients(server: Server) -> Iterator[tuple[OpenAI, OpenAI, LossyTransport]]:
    """The SDK, and the SDK with the lossy transport, and this transport."""
    url = f"{server.url}/v1"
    with OpenAI(base_url=url, api_key="none") as plain, Redis.from_url(server.settings.redis_url) as redis:
        transport = LossyTransport(redis, lambda: len(plain.files.list().data) + len(plain.batches.list().data))
        with OpenAI(
            base_url=url, api_key="none", max_retries=1, http_client=httpx.Client(transport=transport)
        ) as client:
            yield plain, client, transport


def test_a_retry_returns_the_file_and_the_batch_of_its_first_attempt(
    clients: tuple[OpenAI, OpenAI, LossyTransport],
) -> None:
    """Nothing is created twice; after a delivered response the same request creates another object."""
    plain, client, transport = clients
    file = client.files.create(file=("a.jsonl", LINES), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, **PARAMS)  # type: ignore[arg-type]
    assert transport.retries == ["0", "1", "0", "1"]
    assert [item.id for item in plain.files.list().data] == [file.id]
    assert [item.id for item in plain.batches.list().data] == [batch.id]
    assert plain.files.content(file.id).read() == LINES

    transport.losing = False
    retry = {"x-stainless-retry-count": "1"}
    files = [client.files.create(file=("a.jsonl", LINES), purpose="batch", extra_headers=retry) for _ in range(2)]
    batches = [client.batches.create(input_file_id=file.id, **PARAMS, extra_headers=retry) for _ in range(2)]  # type: ignore[arg-type]
    assert len({item.id for item in (file, *files)}) == len({item.id for item in (batch, *batches)}) == 3


def test_a_job_with_an_idempotency_key_outlives_its_client(serve: Callable[..., ApiThread]) -> None:
    """The client can come back with its key; without one, the job is canceled. No worker ends the jobs."""
    server = serve(disconnect_grace_s=0, sync_wait_s=1)

    def states() -> dict[str, str]:
        jobs = httpx.get(f"{server.url}/v1/jobs", timeout=60).json()["data"]
        return {job["prompt"]: job["status"] for job in jobs}

    for prompt, headers in (("kept", {"Idempotency-Key": "a"}), ("left", {})):
        body = {"model": "demo", "prompt": prompt}
        request = httpx.Request("POST", f"{server.url}/v1/images/generations", json=body, headers=headers)
        with pytest.raises(httpx.ReadTimeout):
            send_and_disconnect(request, lambda prompt=prompt: prompt in states())
    wait_until(lambda: states()["left"] == "canceled", "the job without a key is canceled")
    assert states() == {"kept": "queued", "left": "canceled"}
    body = {"model": "demo", "prompt": "kept"}
    again = httpx.post(f"{server.url}/v1/images/generations", json=body, headers={"Idempotency-Key": "a"}, timeout=60)
    assert again.json()["code"] == "wait_timeout"
    assert len(states()) == 2


def test_a_retry_after_the_longest_wait_waits_for_the_same_job(serve: Callable[..., ApiThread]) -> None:
    """OpenAI's SDKs send a call again after a 504, with its number. No worker ends the job."""
    server = serve(sync_wait_s=1)
    body = {"model": "demo", "prompt": "slow"}
    for retry in range(2):
        headers = {"x-stainless-retry-count": str(retry)}
        answer = httpx.post(f"{server.url}/v1/images/generations", json=body, headers=headers, timeout=60)
        assert answer.json()["code"] == "wait_timeout", answer.text
    assert len(httpx.get(f"{server.url}/v1/jobs", timeout=60).json()["data"]) == 1


async def test_retries_of_refused_calls_make_jobs_of_their_own(start: Callable[..., Server]) -> None:
    """Equal calls that still wait keep their jobs; a retry waits for one that its client has left, or that of a process
    that has died. No worker ends the jobs."""
    server = await asyncio.to_thread(start, sync_wait_s="60")
    queue = Queue.connect(server.settings)
    body = {"model": "demo", "prompt": "equal"}
    async with httpx.AsyncClient(timeout=90) as http:

        async def call(retry: int, jobs: int) -> asyncio.Task[httpx.Response]:
            """Send a call, and return it when there are so many jobs."""
            headers = {"x-stainless-retry-count": str(retry)}
            sent = http.post(f"{server.url}/v1/images/generations", json=body, headers=headers)
            task = asyncio.create_task(sent)
            async with asyncio.timeout(60):
                while len(await job_ids()) < jobs:
                    await asyncio.sleep(0.01)
            return task

        async def job_ids() -> list[str]:
            return [job["id"] for job in (await http.get(f"{server.url}/v1/jobs")).json()["data"]]

        async def scores(least: int) -> list[float]:
            """Return the scores of the calls, when one of them is at least `least`."""
            redis, prefix = queue.client.redis, queue.client.redis_keys.prefix
            async with asyncio.timeout(60):
                while True:
                    (name,) = [key async for key in redis.scan_iter(f"{prefix}sync_calls:*")]
                    found = sorted(score for _, score in await redis.zrange(name, 0, -1, withscores=True))
                    if found[-1] >= least:
                        return found
                    await asyncio.sleep(0.01)

        waiting = [await call(retry, jobs) for retry, jobs in ((0, 1), (0, 2), (1, 3))]
        assert await scores(1) == [1, 1, 1]
        waiting.pop().cancel()  # closes its connection
        waiting.append(await call(2, 3))
        assert await scores(1001) == [1, 1, 1001]
        server.process.kill()
        await asyncio.to_thread(server.process.wait, 60)
        await asyncio.gather(*waiting, return_exceptions=True)
        again = {"port": str(server.port), "namespace": server.settings.namespace, "sync_wait_s": "60"}
        server = await asyncio.to_thread(start, **again)
        waiting = [await call(1, 3), await call(1, 3), await call(3, 3)]
        assert await scores(2001) == [1001, 1001, 2001]
        assert len(await job_ids()) == 3
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await queue.close()


async def test_a_retry_waits_for_the_upload_of_its_first_attempt(
    serve: Callable[..., ApiThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt continues its upload after the disconnect."""
    opened, put = threading.Event(), FolderStorage.put

    async def put_when_opened(*args: Any) -> None:
        assert await asyncio.to_thread(opened.wait, 60)
        await put(*args)

    monkeypatch.setattr(FolderStorage, "put", put_when_opened)
    server = serve()
    queue = Queue.connect(server.settings)
    redis, pattern = queue.client.redis, f"{queue.client.redis_keys.prefix}sync_calls:*"
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:

        def send(retry: int) -> asyncio.Future[httpx.Response]:
            request: dict[str, Any] = {"files": {"file": ("a.jsonl", LINES)}, "data": {"purpose": "batch"}}
            request["headers"] = {"x-stainless-retry-count": str(retry)}
            return asyncio.ensure_future(http.post("/v1/files", **request))

        first = send(0)
        async with asyncio.timeout(60):
            while not (calls := [key async for key in redis.scan_iter(pattern)]):
                await asyncio.sleep(0.01)
            first.cancel()  # closes the connection
            await asyncio.wait({first})
            retrying = send(1)
            while (await redis.zrange(calls[0], 0, -1, withscores=True))[0][1] < 1000:
                await asyncio.sleep(0.01)
        opened.set()
        file_id = (await retrying).json()["id"]
        assert [item["id"] for item in (await http.get("/v1/files")).json()["data"]] == [file_id]
    await queue.close()
