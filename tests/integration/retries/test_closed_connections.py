"""Connections that Redis has closed, on the event loop of the processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from harness.tcp_proxy import TcpProxy
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError, RedisError

from shared.queue.connections.failover import Failover, following


@pytest.fixture
async def connection(redis_server: Any) -> AsyncIterator[Any]:
    """A connection that was reset while it was idle."""
    async with TcpProxy(redis_server.port) as proxy:
        pool = ConnectionPool.from_url(proxy.redis_url, socket_timeout=5, **following(proxy.redis_url, Failover()))
        connection = pool.make_connection()
        await connection.connect()
        proxy.cut()
        await asyncio.sleep(0.05)
        yield connection
        await connection.disconnect(nowait=True)


async def test_a_command_on_a_closed_connection_fails_as_a_connection_error(connection: Any) -> None:
    """As such it is repeated. uvloop raises a `RuntimeError`, which ended jobs and requests."""
    with pytest.raises(ConnectionError):
        await connection.send_command("PING")


async def test_a_shared_connection_notices_that_it_is_closed_when_it_reads(connection: Any) -> None:
    connection.write(b"PING\r\n")
    with pytest.raises((RedisError, OSError)):
        await connection.read_reply()
