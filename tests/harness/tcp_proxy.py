"""TCP proxy that injects network faults between a client and a server on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import struct
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from shared.config.settings import Settings
from shared.queue.scripts import script_text

_CHUNK = 65_536
_NOT_APPLIED = (b"-NOSCRIPT", b"-LOADING")


@dataclass(eq=False)
class _Connection:
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    tail: bytes = b""
    dropping: _DroppedReply | None = None
    swallowing: bool = False

    def close(self) -> None:
        """Reset both sides: neither gets what is still buffered."""
        for _, writer in (self.client, self.server):
            if not writer.transport.is_closing():
                end = writer.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # else it ends in order
            writer.transport.abort()


@dataclass(eq=False)
class _DroppedReply:
    pattern: bytes
    left: int
    then: Literal["cut", "silent"]


@dataclass(eq=False)
class TcpProxy:
    """Forwards connections to `target_port`: `async with TcpProxy(server.port) as proxy`, then connect to `proxy.port`.

    `delay_s` delays each chunk of both directions; `refusing` closes new connections. `dropped` counts lost
    replies, `opened` all connections.
    """

    target_port: int
    delay_s: float = 0.0
    refusing: bool = False
    dropped: int = 0
    opened: int = 0
    port: int = 0
    _drops: list[_DroppedReply] = field(default_factory=list)
    connections: set[_Connection] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_replies(self, pattern: bytes, count: int = 1, then: Literal["cut", "silent"] = "cut") -> None:
        """Lose the replies of the next `count` commands that contain `pattern`, after the server has applied them.

        Then the connection is cut, or stays open and `silent`, so that its client runs into its timeout.
        """
        self._drops.append(_DroppedReply(pattern, count, then))

    def cut(self) -> None:
        """Reset all connections."""
        for connection in tuple(self.connections):
            connection.close()

    def half_close(self) -> None:
        """End the server's side of all connections: clients read the end, and can still write."""
        for connection in tuple(self.connections):
            connection.swallowing = True
            with contextlib.suppress(OSError):
                connection.client[1].write_eof()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        try:
            server = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection((reader, writer), server)
        self.connections.add(connection)
        self.opened += 1
        pumps = [asyncio.create_task(pump(connection)) for pump in (self._requests, self._replies)]
        self._tasks.update(pumps)
        await asyncio.wait(pumps)
        self._tasks.difference_update(pumps)
        self.connections.discard(connection)

    async def _requests(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # uvloop: a write to a closed connection
            while data := await connection.client[0].read(_CHUNK):
                await self._pause()
                self._match(connection, data)
                connection.server[1].write(data)
                await connection.server[1].drain()
        connection.close()

    async def _replies(self, connection: _Connection) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # uvloop: a write to a closed connection
            while data := await connection.server[0].read(_CHUNK):
                await self._pause()
                if self._loses(connection, data):
                    if connection.dropping is not None and connection.dropping.then == "cut":
                        break
                    connection.swallowing = True
                if not connection.swallowing:
                    connection.client[1].write(data)
                    await connection.client[1].drain()
        connection.close()

    def _match(self, connection: _Connection, data: bytes) -> None:
        seen = connection.tail + data
        for drop in self._drops:
            if drop.left and connection.dropping is None and drop.pattern in seen:
                connection.dropping = drop
                drop.left -= 1
                self._drops = [other for other in self._drops if other.left]
                seen = b""
        connection.tail = seen[-256:]

    def _loses(self, connection: _Connection, data: bytes) -> bool:
        """Return whether these bytes are a reply to lose; an error before the command ran is passed on."""
        drop = connection.dropping
        if drop is None or connection.swallowing:
            return False
        if data.startswith(_NOT_APPLIED):
            drop.left += 1
            self._drops = [*(other for other in self._drops if other is not drop), drop]
            connection.dropping = None
            return False
        self.dropped += 1
        return True

    async def _pause(self) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)


def script_pattern(name: str, settings: Settings) -> bytes:
    """Return the bytes by which a call of the script `name` is recognized: its SHA1."""
    return hashlib.sha1(script_text(name, settings).encode()).hexdigest().encode()
