"""The API with real sockets and a real Redis, mostly as a process: streams, memory, outages, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.api_process import Server
from harness.api_thread import ApiThread
from harness.http_server import BODY, ROOT, claimed, deliver, png
from harness.waiting import wait_until
from redis import Redis

from api.__main__ import DRAIN_S
from shared.job import Phase
from shared.job_record import Progress
from shared.queue import Claim, ProgressReport, Queue
from shared.runtime.asyncio_tools import cancel_and_wait

NDJSON = {"Content-Type": "application/x-ndjson"}
LINE = json.dumps(BODY).encode() + b"\n"


@pytest.fixture
async def queue_of() -> AsyncIterator[Callable[[Server | ApiThread], Queue]]:
    """Connect a queue, like a worker, to the Redis of a server."""
    made: list[Queue] = []

    def build(server: Server | ApiThread) -> Queue:
        made.append(Queue.connect(server.settings))
        return made[-1]

    yield build
    for queue in made:
        await queue.close()


def bulk(lines: int, bad: frozenset[int] = frozenset()) -> Iterator[bytes]:
    for number in range(1, lines + 1):
        yield b'{"model":"demo","prompt":"x","steps":0}\n' if number in bad else LINE


def send_bulk(server: Server, body: Iterator[bytes], **headers: str) -> list[dict[str, Any]]:
    all_headers = {**NDJSON, **headers}
    with httpx.stream("POST", server.url + "/v1/jobs:bulk", content=body, headers=all_headers, timeout=60) as response:
        assert response.status_code == 200
        return [json.loads(line) for line in response.iter_lines()]


def test_5000_lines_with_10_invalid_ones_use_constant_memory(start: Callable[..., Server]) -> None:
    server = start()
    bad = frozenset(range(250, 5001, 500))
    send_bulk(server, bulk(1000))  # warm-up: load everything and fill the pools
    before = server.reset_peak()
    results = send_bulk(server, bulk(5000, bad))
    assert [result["line"] for result in results] == list(range(1, 5001))
    errors = {result["line"]: result["error"] for result in results if "error" in result}
    assert set(errors) == bad
    assert {error["param"] for error in errors.values()} == {"steps"}
    assert len({result["id"] for result in results if "id" in result}) == 4990
    assert server.peak_kb() - before < 6_000


def test_a_result_arrives_before_the_next_line_is_sent(serve: Callable[..., ApiThread]) -> None:
    with connected(serve()) as client:
        client.sendall(head("Transfer-Encoding: chunked"))
        received = b""
        for number in range(1, 4):
            client.sendall(b"%x\r\n%s\r\n" % (len(LINE), LINE))
            while b'"line":%d,' % number not in received:
                received += client.recv(4096)
        client.sendall(b"0\r\n\r\n")
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(4096)


def test_a_client_can_send_everything_before_it_reads(start: Callable[..., Server]) -> None:
    server = start()
    lines = 60_000
    send_bulk(server, bulk(1000))
    before = server.reset_peak()
    with connected(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sendall(head(f"Content-Length: {2 * lines}") + b"x\n" * lines)
        received, ends = 0, b""
        while not ends.endswith(b"0\r\n\r\n"):
            piece = client.recv(1 << 20)
            assert piece, "cut off"
            received += len(piece)
            ends = (ends + piece)[-64:]
    assert received > 100 * lines
    assert server.peak_kb() - before < 8_000


def test_a_disconnected_clients_complete_lines_are_submitted(start: Callable[..., Server]) -> None:
    server = start()
    with connected(server) as client:
        client.sendall(head("Content-Length: 100000") + LINE * 3 + LINE[:-20])
        while client.recv(4096).count(b'"line":') == 0:
            pass
    wait_until(lambda: b"bulk_client_disconnected" in server.log.read_bytes(), "the API detects the disconnect")
    assert len(httpx.get(server.url + "/v1/jobs", timeout=60).json()["data"]) == 3
    assert b"Traceback" not in server.log.read_bytes()


def test_a_body_of_50_mb_is_refused_without_buffering(start: Callable[..., Server]) -> None:
    server = start()
    httpx.post(server.url + "/v1/jobs", content=b"{", headers={"Content-Type": "application/json"}, timeout=60)
    before = server.reset_peak()
    large = b" " * 50_000_000
    for path, content_type in (
        ("/v1/jobs", "application/json"),
        ("/v1/inputs", "multipart/form-data; boundary=x"),
        ("/v1/jobs/job_00000000000000000000000000/cancel", "application/json"),
    ):
        response = httpx.post(server.url + path, content=large, headers={"Content-Type": content_type}, timeout=60)
        assert (response.status_code, response.json()["code"]) == (413, "payload_too_large"), path
    chunked = {"headers": {"Content-Type": "application/json"}, "timeout": 60}
    refused = httpx.post(server.url + "/v1/webhooks", content=(large[:1_000_000] for _ in range(50)), **chunked)
    assert refused.status_code == 413
    assert server.peak_kb() - before < 8_000
    # A job can have an image as a data URL.
    refused = httpx.post(server.url + "/v1/jobs", content=(large[:1_000_000] for _ in range(50)), **chunked)
    assert refused.status_code == 413
    assert server.peak_kb() - before < 36_000


async def test_events_arrive_as_they_happen(
    serve: Callable[..., ApiThread], queue_of: Callable[[Server | ApiThread], Queue], tmp_path: Path
) -> None:
    server = serve()
    queue = queue_of(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
        async with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
            lines = stream.aiter_lines()
            await until(lines, '"status":"queued"')
            await until(lines, ": keep-alive")
            claim = await claimed(queue, job_id)
            await until(lines, '"status":"running"')
            # Repeated: progress published before the API subscribes is lost.
            reporting = asyncio.create_task(report_half(queue, claim))
            await until(lines, '"percent":50')
            await cancel_and_wait((reporting,))
            await deliver(queue, tmp_path, claim)
            last = await until(lines, '"status":"succeeded"')
            assert json.loads(last.removeprefix("data: "))["artifacts"]
            assert "".join([rest async for rest in lines]) == "", "the stream ends"


async def report_half(queue: Queue, claim: Claim) -> None:
    while await queue.claims.report_progress(
        ProgressReport(claim.job.id, claim.epoch, Phase.DENOISING, Progress(step=1, total=2))
    ):
        await asyncio.sleep(0.05)


async def test_all_subscribers_of_one_job_receive_its_end(
    start: Callable[..., Server], queue_of: Callable[[Server | ApiThread], Queue], tmp_path: Path
) -> None:
    server = start()
    queue = queue_of(server)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
        subscribers = [asyncio.ensure_future(client.get(f"/v1/jobs/{job_id}/events")) for _ in range(100)]
        gauge = "fusequeue_event_subscribers 100.0"
        while gauge not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.02)
        # One reader serves all of them; between two reads it is not blocked.
        while (await readers(queue)) != (1, 1):
            await asyncio.sleep(0.02)
        await deliver(queue, tmp_path, await claimed(queue, job_id))
        responses = await asyncio.wait_for(asyncio.gather(*subscribers), 60)
        assert all('"status":"succeeded"' in response.text for response in responses)
        while "fusequeue_event_subscribers 0.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.02)


async def readers(queue: Queue) -> tuple[int, int]:
    """Return the numbers of Redis clients that wait for events and that subscribe to progress."""
    ((_, listening),) = await queue.client.redis.pubsub_numsub(queue.client.redis_keys.progress)
    return (await queue.client.redis.info("clients"))["blocked_clients"], listening


async def test_shutdown_ends_streams_and_waits_at_once(start: Callable[..., Server]) -> None:
    server = start()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
        waiting = asyncio.ensure_future(client.get(f"/v1/jobs/{job_id}", params={"wait": 60}))
        async with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
            lines = stream.aiter_lines()
            await until(lines, '"status":"queued"')
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            async for _ in lines:
                pass
        assert (await waiting).json()["status"] == "queued"
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert time.monotonic() - started < DRAIN_S, "all connections finished before the drain timeout"
    assert b"Traceback" not in server.log.read_bytes()


async def test_the_api_recovers_when_redis_returns(
    start: Callable[..., Server], queue_of: Callable[[Server | ApiThread], Queue], durable_server: Any, tmp_path: Path
) -> None:
    server = start()
    queue = queue_of(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
        async with client.stream("GET", f"/v1/jobs/{job_id}/events") as stream:
            lines = stream.aiter_lines()
            await until(lines, '"status":"queued"')
            durable_server.kill()
            await without_redis(client)
            await asyncio.to_thread(durable_server.start)
            await asyncio.to_thread(wait_until, lambda: server.responds("/readyz"), "the API is ready again")
            assert (await client.get(f"/v1/jobs/{job_id}")).json()["status"] == "queued"
            await deliver(queue, tmp_path, await claimed(queue, job_id))
            await until(lines, '"status":"succeeded"')


async def without_redis(client: httpx.AsyncClient) -> None:
    """Check the status of every path while Redis is unavailable."""
    refused = await client.post("/v1/jobs", json=BODY)
    assert (refused.status_code, refused.json()["code"]) == (503, "redis_unavailable")
    assert refused.headers["retry-after"]
    while (await client.get("/readyz")).status_code != 503:  # a check is as old as a second
        await asyncio.sleep(0.05)
    assert (await client.get("/healthz")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200


def test_what_an_api_stores_has_the_permissions_of_its_umask(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(umask="027")
    sent = httpx.post(server.url + "/v1/inputs", files={"file": ("a.png", png())}, timeout=60)
    assert sent.status_code == 201
    (stored,) = (path for path in (tmp_path / "storage").rglob("*.*") if path.is_file())
    assert stat.S_IMODE(stored.stat().st_mode) == 0o640
    assert stat.S_IMODE(stored.parent.stat().st_mode) == 0o750


@pytest.mark.parametrize(("trusted", "scheme"), [({}, "http"), ({"trusted_proxies": "127.0.0.1"}, "https")])
def test_forwarded_headers_count_only_from_trusted_proxies(
    serve: Callable[..., ApiThread], trusted: dict[str, str], scheme: str
) -> None:
    server = serve(auth="insecure-no-keys", **trusted)  # without keys, no other request of a proxy is served
    response = httpx.post(server.url + "/v1/jobs", json=BODY, headers={"X-Forwarded-Proto": "https"}, timeout=60)
    assert response.headers["location"].startswith(f"{scheme}://127.0.0.1:{server.port}/v1/jobs/")


def test_a_trusted_proxy_uses_idle_connections_again(serve: Callable[..., ApiThread]) -> None:
    """Those of others are closed meanwhile."""
    server = serve(auth="insecure-no-keys", trusted_proxies="127.0.0.1", keep_alive_s=0.1)
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(server) as proxy, connected(server, "127.0.0.2") as other:
        for client in (proxy, other):
            client.sendall(request)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert other.recv(65536) == b""
        proxy.sendall(request)
        assert proxy.recv(65536).startswith(b"HTTP/1.1 200")


def head(*headers: str) -> bytes:
    fields = ("Host: localhost", "Content-Type: application/x-ndjson", *headers)
    return ("POST /v1/jobs:bulk HTTP/1.1\r\n" + "".join(f"{field}\r\n" for field in fields) + "\r\n").encode()


@contextlib.contextmanager
def connected(server: Server | ApiThread, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60, source_address=(source, 0)) as client:
        yield client


async def until(lines: AsyncIterator[str], words: str) -> str:
    async with asyncio.timeout(60):
        async for line in lines:
            if words in line:
                return line
    raise AssertionError(f"the stream finished without {words}")


def test_the_startup_error_of_an_evicting_redis_has_no_traceback(durable_server: Any, tmp_path: Path) -> None:
    """The last log line names the cause and the remedy."""
    env = {**os.environ, "FUSEQUEUE_REDIS_URL": durable_server.url, "FUSEQUEUE_STORAGE_DIR": str(tmp_path)}
    with Redis.from_url(durable_server.url) as redis:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        command = [sys.executable, "-m", "api", "--port", "0"]
        finished = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=90, check=False)
        redis.config_set("maxmemory-policy", "noeviction")
    entry = json.loads(finished.stderr.splitlines()[-1])
    assert (finished.returncode, entry["event"], entry["code"]) == (1, "api_failed", "incompatible_redis")
    assert "CONFIG SET maxmemory-policy noeviction" in entry["error"]
    assert "Traceback" not in finished.stderr
