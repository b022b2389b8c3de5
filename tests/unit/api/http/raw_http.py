"""Raw HTTP/1.1 over sockets: a server of a small application, and clients that send exact bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import uvicorn

from api.http.connections import Connections
from api.http.request_limits import ArrivalLimits
from api.http.server_protocol import ServerProtocol

QUICK = ArrivalLimits(
    idle_s=0.4, head_s=0.4, body_s=0.4, body_bytes_per_s=1000, unread_s=0.4, linger_s=0.3, check_every_s=0.05
)
LARGE = {"/large": 20_000_000, "/buffered": 60_000}


class PromptServer(uvicorn.Server):
    """A server that ends when `stopped` is set; uvicorn looks for it ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopped = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopped.wait()


@dataclass
class EchoServer:
    """An HTTP server with the limits of the API. Its application records each request with its body.

    `/early` responds before it reads the body, `/hold` when `release` is set, `/large` with 20 MB, `/buffered` with
    as much as uvicorn takes without waiting for the client, and `/stream` with a piece per piece of the body.
    """

    limits: ArrivalLimits = QUICK
    connections: Connections = field(default_factory=lambda: Connections(100, None, lambda _: False))
    port: int = 0
    seen: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    disconnects: int = 0
    finished: int = 0
    send_buffer: int | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[RawClient] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EchoServer]:
        listener = socket.socket()
        if self.send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        http = partial(ServerProtocol, connections=self.connections, limits=self.limits)
        options: dict[str, Any] = {
            "http": http,
            "interface": "asgi3",
            "lifespan": "off",
            "ws": "none",
            "log_config": None,
        }
        server = PromptServer(uvicorn.Config(self._app, **options, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield self
        finally:
            self.release.set()
            for client in self.clients:
                client.writer.transport.abort()
                with contextlib.suppress(OSError):
                    await client.writer.wait_closed()
            server.stopped.set()
            await serving

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path, body, more, status = scope["path"], b"", True, 200
        self.headers = scope["headers"]
        if path == "/stream":
            await self._stream(receive, send)
            return
        while more and path != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.seen.append((scope["method"], path, body))
        if path == "/hold":
            await self.release.wait()
        content = b"x" * LARGE[path] if path in LARGE else path.encode()
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for start in range(0, len(content), 65536):
            more = start + 65536 < len(content)
            await send({"type": "http.response.body", "body": content[start : start + 65536], "more_body": more})
        self.finished += 1

    async def _stream(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            more = message["more_body"]
            await send({"type": "http.response.body", "body": message["body"], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def connect(self) -> RawClient:
        self.clients.append(RawClient(*await asyncio.open_connection("127.0.0.1", self.port)))
        return self.clients[-1]

    async def send(self, data: bytes) -> bytes:
        """Send bytes on a new connection and return all that comes back until the server closes it."""
        client = await self.connect()
        client.writer.write(data)
        return await client.read_all()

    def with_limits(self, **changes: float) -> EchoServer:
        return replace(self, limits=replace(self.limits, **changes))


@dataclass
class RawClient:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def response(self) -> bytes:
        """Return the next response with a Content-Length."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)
        length = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
        return head + await asyncio.wait_for(self.reader.readexactly(int(length)), 20)

    async def read_all(self, timeout_s: float = 20) -> bytes:
        """Return the bytes until the server closes the connection."""
        data = b""
        try:
            async with asyncio.timeout(timeout_s):
                while piece := await self.reader.read(65536):
                    data += piece
        except ConnectionError:
            pass
        finally:
            self.writer.close()
        return data
