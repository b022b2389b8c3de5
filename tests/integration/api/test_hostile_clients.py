"""Clients without a key that try to occupy an API process, while another one measures `/healthz`."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from harness.api_process import Server
from harness.waiting import wait_until

POST = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
PREFLIGHT = (
    b"OPTIONS /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    b"Origin: https://x.example\r\nAccess-Control-Request-Method: POST\r\n\r\n"
)
ONE_BYTE_CHUNKS = b"1\r\n \r\n" * 10_000
STREAMING = {
    "one-byte chunks": (CHUNKED, ONE_BYTE_CHUNKS),
    "one-byte chunks without a route": (PREFLIGHT, ONE_BYTE_CHUNKS),
    "an endless body": (CHUNKED, b"10000\r\n" + b" " * 65_536 + b"\r\n"),
    "a body for GET": (CHUNKED.replace(b"POST", b"GET"), ONE_BYTE_CHUNKS),
    "an endless head": (POST, b"X-Header: a\r\n" * 5_000),
    "requests in advance": (b"", b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000),
    "refused methods": (b"", b"PUT /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n" * 2_000),
}


@contextlib.contextmanager
def attacking(server: Server, head: bytes, piece: bytes, clients: int = 4) -> Iterator[list[int]]:
    """Send `head` and then `piece` again and again, on new connections when the server closes one."""
    stop, connections = threading.Event(), [0]

    def attack() -> None:
        while not stop.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", server.port), timeout=5) as client,
            ):
                connections[0] += 1
                client.sendall(head)
                while not stop.is_set():
                    client.sendall(piece)
            stop.wait(0.05)

    threads = [threading.Thread(target=attack) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield connections
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


def healthz_s(server: Server, requests: int) -> list[float]:
    """Return how long requests of `/healthz` take, each on a new connection."""
    times = []
    for _ in range(requests):
        started = time.monotonic()
        assert httpx.get(server.url + "/healthz", timeout=30).status_code == 200
        times.append(time.monotonic() - started)
    return times


@pytest.mark.slow
def test_what_a_client_sends_without_a_key_does_not_stall_others(start: Callable[..., Server]) -> None:
    """Chunks of one byte raised the median from 2 ms to 3.3 s."""
    server = start(auth="keys")
    medians = {}
    for attack, (head, piece) in STREAMING.items():
        with attacking(server, head, piece) as connections:
            wait_until(lambda: connections[0] >= 4, "the attack runs")
            medians[attack] = statistics.median(healthz_s(server, 9))
    assert {attack: round(median_s, 2) for attack, median_s in medians.items() if median_s > 0.5} == {}
    assert b"Traceback" not in server.log.read_bytes()


def test_more_idle_connections_than_open_files_do_not_lock_the_api(start: Callable[..., Server]) -> None:
    """They did."""
    server = start(open_files="150")
    clients = []
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(OSError):
                clients.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5)))
        assert len(healthz_s(server, 2)) == 2
        body = {"model": "demo", "prompt": "x"}
        assert httpx.post(server.url + "/v1/jobs", json=body, timeout=30).status_code == 202
        assert httpx.get(server.url + "/readyz", timeout=30).status_code == 200
    metrics = httpx.get(server.url + "/metrics", timeout=30).text
    assert 'fusequeue_http_connections_closed_total{reason="evicted"}' in metrics
    assert not [line for line in server.log.read_text().splitlines() if json.loads(line)["level"] == "error"]
