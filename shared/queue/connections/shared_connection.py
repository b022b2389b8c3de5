"""One connection for the commands of many callers, which the pools of redis-py do not share.

A command on a pool's connection passes a lock, three timeouts and a dozen coroutines: 0.2 ms of CPU time, here 0.05 ms.
Whatever goes wrong here - no connection, an error as the reply, silence - raises `NotShared`; the caller then sends
the command again through the pool, which reconnects, follows a failover, and raises the error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis.exceptions import RedisError

from shared.runtime.asyncio_tools import cancel_and_wait

MAX_WAITING = 1_000
"""Commands without a reply."""

MAX_COMMAND_BYTES = 64 * 1024
"""Of the commands of one caller: longer ones would delay those of others."""

IDLE_S = 20.0
"""After which a connection is not trusted: a firewall can have forgotten it."""

RETRY_S = 1.0
"""After a fault, in which all commands go through the pool."""

CONNECT_S = 0.5
"""How long a command waits for a new connection: in a burst, each one without it would take one from the pool."""

_CHECK_S = 0.5

Command = tuple[Any, ...]


class NotShared(Exception):
    """A command has got no reply on the shared connection, or an error: send it through the pool."""


class SharedConnection:
    """Sends commands in order on one connection; `make` returns a connection of redis-py.

    A connection without a reply for `timeout_s` is closed.
    """

    def __init__(self, make: Callable[[], Any], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._connection: Any = None
        self._unsent: list[bytes] = []
        self._waiting: deque[tuple[float, asyncio.Future[Any]]] = deque()
        self._serving: asyncio.Task[None] | None = None
        self._connecting: asyncio.Future[None] | None = None
        self._replied_at = self._failed_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    async def replies(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one piece, and return their replies; raises `NotShared`."""
        loop = asyncio.get_running_loop()
        connection = await self._usable()
        now = loop.time()
        try:
            packed = b"".join([hiredis.pack_command(command) for command in commands])
        except (TypeError, ValueError) as error:  # a value that the pool converts
            raise NotShared from error
        if len(packed) > MAX_COMMAND_BYTES:
            raise NotShared
        futures = [loop.create_future() for _ in commands]
        self._waiting.extend((now, future) for future in futures)
        if self._timer is None:
            self._timer = loop.call_later(_CHECK_S, self._check)
        if not self._unsent:  # one system call for all commands of this turn of the loop
            loop.call_soon(self._send, connection)
        self._unsent.append(packed)
        found = [await future for future in futures]
        if fault := next((reply for reply in found if isinstance(reply, Exception)), None):
            raise NotShared from fault
        return found

    def _send(self, connection: Any) -> None:
        if connection is self._connection:
            connection.write(b"".join(self._unsent))
            self._unsent.clear()

    async def close(self) -> None:
        """Close the connection."""
        if self._serving is not None:
            await cancel_and_wait((self._serving,))

    async def _usable(self) -> Any:
        """Return the connection, a new one if there is none or it is not trusted; raises `NotShared`."""
        now = asyncio.get_running_loop().time()
        if self._connection is not None:
            if self._connection.is_outdated:
                self._failed_at = now
                self._end()
            elif now - self._replied_at > IDLE_S and not self._waiting:
                self._end()
        if self._connection is None:
            await self._connect(now)
        if self._connection is None or len(self._waiting) >= MAX_WAITING:
            raise NotShared
        return self._connection

    async def _connect(self, now: float) -> None:
        """Wait until a connection is made, or cannot be: for `CONNECT_S`, and not at all soon after a fault."""
        if self._serving is None or self._serving.done():
            if now - self._failed_at <= RETRY_S:
                return
            self._connecting = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._connecting))
        if self._connecting is not None:
            await asyncio.wait((self._connecting,), timeout=CONNECT_S)

    async def _serve(self, connecting: asyncio.Future[None]) -> None:
        """Connect, and hand replies to their callers until the connection ends."""
        connection, loop = self._make(), asyncio.get_running_loop()
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            try:
                await connection.connect()
                self._connection, self._replied_at = connection, loop.time()
                connecting.set_result(None)
                while True:
                    reply = await connection.read_reply()
                    self._replied_at = loop.time()
                    if not self._waiting:  # not a reply
                        return
                    _, future = self._waiting.popleft()
                    if not future.done():
                        future.set_result(reply)
            finally:
                if not connecting.done():
                    connecting.set_result(None)
                    self._failed_at = loop.time()
                elif self._connection is connection:  # not replaced
                    self._connection, self._failed_at = None, loop.time()
                    self._return_to_pool()
                await connection.disconnect(nowait=True)

    def _end(self) -> None:
        """Use the connection no longer, and send its callers to the pool; the next command makes another one."""
        if self._serving is not None:
            self._serving.cancel()
        self._connection = self._serving = None
        self._return_to_pool()

    def _return_to_pool(self) -> None:
        self._unsent.clear()
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(NotShared())

    def _check(self) -> None:
        """Close a connection whose oldest command has waited for too long."""
        self._timer, loop = None, asyncio.get_running_loop()
        if self._waiting and loop.time() - self._waiting[0][0] > self._timeout_s:
            self._failed_at = loop.time()
            self._end()
        if self._waiting:
            self._timer = loop.call_later(_CHECK_S, self._check)
