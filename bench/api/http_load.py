"""A closed loop of keep-alive connections over plain sockets: it shares the machine's cores with what it measures."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

Request = bytes


class ClosedLoop(NamedTuple):
    """Number of connections, for how long they repeat their requests, and the requests of one."""

    connections: int
    seconds: float
    request: Callable[[], Request]


class LoopRate(NamedTuple):
    """Responses, their number per second, and their times in milliseconds."""

    requests: int
    per_second: float
    p50_ms: float
    p99_ms: float


class _Connection(asyncio.Protocol):
    """Sends a request, reads its response, and sends the next until `end`, or until a response ends the connection.

    The server ends it where the response begins before the request has arrived, as that to bulk submits does.
    """

    def __init__(self, load: ClosedLoop, end: float, times: list[float]) -> None:
        self._load, self._end, self._times = load, end, times
        self._received = b""
        self._sent_at = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request())

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator or not _complete(head.lower(), body):
            return
        if not head.startswith((b"HTTP/1.1 20", b"HTTP/1.0 20")):
            self._finish(RuntimeError(self._received[:1000].decode("utf-8", "replace")))
            return
        now = time.perf_counter()
        self._times.append(now - self._sent_at)
        self._received = b""
        if now < self._end and b"\r\nconnection: close" not in head.lower():
            self._send()
        else:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc or ConnectionError("the server closed the connection"))

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)
            self._transport.close()


def _complete(head: bytes, body: bytes) -> bool:
    """Return whether the body of a response with this head, in lower case, has arrived."""
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])


async def run(port: int, load: ClosedLoop) -> LoopRate:
    """Run the loop and return its rate."""
    loop, times = asyncio.get_running_loop(), list[float]()
    started = time.perf_counter()
    end = started + load.seconds

    async def one_client() -> None:
        while time.perf_counter() < end:
            _, connection = await loop.create_connection(lambda: _Connection(load, end, times), "127.0.0.1", port)
            await connection.done

    async with asyncio.timeout(load.seconds + 60):
        await asyncio.gather(*(one_client() for _ in range(load.connections)))
    seconds = time.perf_counter() - started
    ordered = sorted(1000 * one for one in times)
    return LoopRate(len(times), len(times) / seconds, statistics.median(ordered), ordered[-1 - len(ordered) // 100])


def get(path: str) -> Request:
    """Return a GET request."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def post(path: str, body: bytes, content_type: str = "application/json") -> Request:
    """Return a POST request."""
    head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-type: {content_type}", f"content-length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body
