"""Connections that follow a failover of Redis behind one name, a DNS name or a virtual address.

An old primary that has become a replica keeps its connections. A connection that notices it by an error closes, and so
do all others of the process before their next command; a command refused by a replica has changed nothing, so it is
repeated on a new connection, which the name leads to the new primary.

A node of a Redis Cluster refuses a command in the same way if another one owns the slot of its keys, and names that
one. All keys of a namespace are in one slot, so all connections go there, until one cannot be made.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hiredis import pack_command
from redis import asyncio as aio
from redis import connection as sync
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

_ERRORS = (ReadOnlyError, MovedError, MasterDownError, BusyLoadingError)
_TEXTS = ("READONLY", "MASTERDOWN", "UNBLOCKED")  # in the error of a script, and of an interrupted blocking read

Address = tuple[str, int]
"""Host and port."""


class NotPrimary(ConnectionError):
    """The server is not the primary, or not yet. As a connection error it is retried on a new connection."""


class Failover:
    """Counts the failovers that connections have noticed, and knows the address to which a cluster has led them."""

    def __init__(self) -> None:
        self.count = 0
        self._owner: Address | None = None

    def note(self, since: int, owner: Address | None = None) -> None:
        """Record a failover that was noticed by a connection from after `since` failovers; `owner` serves the slot."""
        if since >= self.count:
            self.count = since + 1
            self._owner = owner

    def address(self, named: Address) -> Address:
        """Return where to connect; the URL has `named`."""
        return self._owner or named

    def forget(self, address: Address) -> None:
        """Connect by the URL again if a cluster has led here: this node is gone, or does not respond."""
        if self._owner == address:
            self._owner = None


def _is_noticed(error: RedisError) -> bool:
    return isinstance(error, _ERRORS) or any(text in str(error) for text in _TEXTS)


class _AsyncFollowing:
    def __init__(self, *args: Any, failover: Failover, **options: Any) -> None:
        super().__init__(*args, **options)
        self._failover, self._since = failover, failover.count

    async def connect(self) -> None:
        """Connect unless connected since the last failover; a pool calls this before each use."""
        if self._since != self._failover.count:
            self._since = self._failover.count
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
        await super().connect()  # type: ignore[misc]

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*args, **options)  # type: ignore[misc]
        except RuntimeError as error:  # from uvloop for a connection that the server has reset; asyncio's is an OSError
            raise ConnectionError(str(error)) from error

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except RedisError as error:
            if not _is_noticed(error):
                if isinstance(error, ConnectionError | RedisTimeoutError):
                    self._lost()
                raise
            self._failover.note(self._since, self._owner(error))
            self._since = self._failover.count
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise NotPrimary(str(error)) from error

    def _owner(self, error: RedisError) -> Address | None:
        """Return the node that serves the slot, by an error of a cluster."""
        return None

    def _lost(self) -> None:
        """Let the next connection go by the URL."""

    def pack_command(self, *args: Any) -> list[bytes]:
        """Pack a command; the client's own code for it takes 1 us per value, a submit of 250 jobs has 4,000."""
        try:
            return [pack_command((*args[0].split(), *args[1:]))]
        except (AttributeError, TypeError, ValueError):  # a value that only the client converts
            return list(super().pack_command(*args))  # type: ignore[misc]

    # For a connection that many callers share: without the timeouts and checks of each command.

    @property
    def is_outdated(self) -> bool:
        """Whether there was a failover since it has connected."""
        return self._since != self._failover.count

    def write(self, packed: bytes) -> None:
        """Send packed commands; reading reports a connection that the server has reset."""
        with suppress(RuntimeError):  # from uvloop
            self._writer.write(packed)  # type: ignore[attr-defined]

    async def read_reply(self) -> Any:
        """Return the next reply, which can be an error."""
        return await self._parser.read_response()  # type: ignore[attr-defined]


class _Following:
    def __init__(self, *args: Any, failover: Failover, **options: Any) -> None:
        super().__init__(*args, **options)
        self._failover, self._since = failover, failover.count

    def connect(self) -> None:
        """Connect unless connected since the last failover; a pool calls this before each use."""
        if self._since != self._failover.count:
            self._since = self._failover.count
            self.disconnect()  # type: ignore[attr-defined]
        super().connect()  # type: ignore[misc]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except RedisError as error:
            if not _is_noticed(error):
                raise
            self._failover.note(self._since)
            self._since = self._failover.count
            self.disconnect()  # type: ignore[attr-defined]
            raise NotPrimary(str(error)) from error


class _AsyncToOwner(_AsyncFollowing):
    """A connection that a cluster can lead to another node."""

    host: str
    port: int

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._named = (self.host, self.port)

    async def _connect(self) -> None:
        self.host, self.port = self._failover.address(self._named)
        try:
            await super()._connect()  # type: ignore[misc]
        except (OSError, TimeoutError):
            self._lost()
            raise

    def _owner(self, error: RedisError) -> Address | None:
        return (error.host or self.host, error.port) if isinstance(error, MovedError) else None

    def _lost(self) -> None:
        self._failover.forget((self.host, self.port))


class _AsyncTcp(_AsyncToOwner, aio.Connection): ...


class _AsyncTls(_AsyncToOwner, aio.SSLConnection): ...


class _AsyncUnix(_AsyncFollowing, aio.UnixDomainSocketConnection): ...


class _Tcp(_Following, sync.Connection): ...


class _Tls(_Following, sync.SSLConnection): ...


class _Unix(_Following, sync.UnixDomainSocketConnection): ...


_ASYNC = {"redis": _AsyncTcp, "rediss": _AsyncTls, "unix": _AsyncUnix}
_SYNC = {"redis": _Tcp, "rediss": _Tls, "unix": _Unix}


def following(url: str, failover: Failover, *, threads: bool = False) -> dict[str, Any]:
    """Return the options of a pool whose connections follow a failover; `threads`: without asyncio."""
    scheme = url.partition(":")[0]
    return {"connection_class": (_SYNC if threads else _ASYNC)[scheme], "failover": failover}
