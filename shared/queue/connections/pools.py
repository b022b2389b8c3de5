"""Connections for commands, for blocking reads and for renewals of leases: pools, and one that callers share."""

from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from shared.queue.connections.failover import Failover, following
from shared.queue.connections.shared_connection import SharedConnection

COMMAND_TIMEOUT_S = 5.0
"""Timeout of a command or script: far above their durations, so that only a lost server reaches it."""

LEAST_TIMEOUT_S = 0.5

CONNECTIONS = 32
"""Connections for commands, per process. In a burst callers wait for one; redis-py's default pool raises an error."""

MAX_BLOCK_MS = 2000
"""Longest blocking read."""

BLOCK_TIMEOUT_S = MAX_BLOCK_MS / 1000 + 3.0
"""Socket timeout of a blocking read: longer than it blocks, so that the read always ends first."""


def _pool_options(url: str, failover: Failover | None, timeout_s: float, retries: int) -> dict[str, Any]:
    return {
        "decode_responses": True,
        "encoding_errors": "replace",
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, COMMAND_TIMEOUT_S),
        "health_check_interval": 30,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        **parse_url(url),
        "protocol": 2,  # whatever the URL says: replies of 3 have other types
        **following(url, failover or Failover()),  # last: a pool's `from_url` prefers the class of TLS or a socket file
    }


def connect_commands(url: str, failover: Failover | None = None) -> Redis:
    """Return a client for commands and scripts, which can be repeated: short timeout, one retry."""
    options = _pool_options(url, failover, COMMAND_TIMEOUT_S, 1)
    return Redis.from_pool(BlockingConnectionPool(max_connections=CONNECTIONS, timeout=COMMAND_TIMEOUT_S, **options))


def connect_blocking(url: str, failover: Failover | None = None) -> Redis:
    """Return a client for blocking reads, without retries."""
    return Redis.from_pool(ConnectionPool(**_pool_options(url, failover, BLOCK_TIMEOUT_S, 0)))


def connect_renewals(url: str, lease_ms: int, failover: Failover | None = None) -> Redis:
    """Return a client for renewals of leases: its timeout leaves time for the retry within a lease.

    Connections can hang while others work: a process that redis-server has forked keeps them open when it is killed.
    """
    timeout_s = min(COMMAND_TIMEOUT_S, max(LEAST_TIMEOUT_S, lease_ms / 1000 / 4))
    options = _pool_options(url, failover, timeout_s, 1)
    return Redis.from_pool(BlockingConnectionPool(max_connections=2, timeout=timeout_s, **options))


def share_commands(commands: Redis) -> SharedConnection:
    """Return a connection like those of the pool for commands, which all callers share."""
    return SharedConnection(commands.connection_pool.make_connection, COMMAND_TIMEOUT_S)


def share_blocking(blocking: Redis) -> SharedConnection:
    """Return a connection like those of the pool for blocking reads, for the reads of one caller."""
    return SharedConnection(blocking.connection_pool.make_connection, BLOCK_TIMEOUT_S)
