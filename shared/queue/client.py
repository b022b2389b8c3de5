"""Connections to the queue's Redis, and the conversion of its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError, ResponseError

from shared.config.settings import Settings
from shared.errors import IncompatibleRedis, RedisUnavailable
from shared.job import SCHEMA_VERSION
from shared.queue.redis_keys import RedisKeys
from shared.queue.scripts import Scripts, script_text

if TYPE_CHECKING:
    from redis.commands.core import AsyncScript

log = structlog.get_logger()

COMMAND_TIMEOUT_S = 5.0
"""Timeout of a command or script: far above their durations, so that only a lost server reaches it."""

CONNECTIONS = 32
"""Connections for commands, per process. In a burst callers wait for one; redis-py's default pool raises an error."""

MAX_BLOCK_MS = 2000
"""Longest blocking read."""

BLOCK_MARGIN_S = 3.0
"""Socket timeout beyond the duration of a blocking read, so that the read always ends first."""


def schema_remedy(version: int) -> str:
    """Return what to do about a queue of another schema version."""
    if version > SCHEMA_VERSION:
        return "upgrade this program"
    return (
        "finish its jobs with the earlier version of fusequeue, then start this one with another "
        "FUSEQUEUE_NAMESPACE, an empty Redis or, for `fusequeue up`, another --data-dir"
    )


@contextmanager
def translated() -> Iterator[None]:
    """Convert all errors of the Redis client to `RedisUnavailable`."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise _unavailable(error) from error


def _unavailable(error: Exception) -> RedisUnavailable:
    return RedisUnavailable(f"cannot reach Redis: {error!s}")


def connect_commands(url: str) -> Redis:
    """Return a client for commands and idempotent scripts: short timeout, one retry."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=COMMAND_TIMEOUT_S,
        decode_responses=True,
        encoding_errors="replace",
        socket_timeout=COMMAND_TIMEOUT_S,
        socket_connect_timeout=COMMAND_TIMEOUT_S,
        health_check_interval=30,
        protocol=2,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 1),
    )
    return Redis.from_pool(pool)


def connect_blocking(url: str) -> Redis:
    """Return a client for blocking reads and claims, without retries."""
    return Redis.from_url(
        url,
        decode_responses=True,
        encoding_errors="replace",
        socket_timeout=MAX_BLOCK_MS / 1000 + BLOCK_MARGIN_S,
        socket_connect_timeout=COMMAND_TIMEOUT_S,
        health_check_interval=30,
        protocol=2,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 0),
    )


class QueueClient:
    """Connections to the Redis of one namespace, with its key names, settings and scripts."""

    def __init__(self, redis: Redis, *, namespace: str, settings: Settings, blocking: Redis | None = None) -> None:
        # Any: redis-py types every reply for bytes and text both, whatever decode_responses says.
        self.redis: Any = redis
        self.blocking: Any = redis if blocking is None else blocking
        self.redis_keys = RedisKeys(namespace)
        self.settings = settings
        self.scripts = Scripts(self)
        self._loaded: dict[str, AsyncScript] = {}

    @classmethod
    def connect(cls, settings: Settings) -> QueueClient:
        """Return a client with two connection pools: one for commands, one for blocking reads."""
        redis, blocking = connect_commands(settings.redis_url), connect_blocking(settings.redis_url)
        return cls(redis, namespace=settings.namespace, settings=settings, blocking=blocking)

    async def run(self, name: str, *args: str | float, once: bool = False) -> Any:
        """Run the script `name`; with `once` through the client that never retries."""
        script = self._loaded.get(name)
        if script is None:
            script = self._loaded[name] = self.redis.register_script(script_text(name, self.settings))
        with translated():
            return await script(keys=[self.redis_keys.prefix], args=args, client=self.blocking if once else self.redis)

    async def ping(self) -> None:
        with translated():
            await self.redis.ping()

    async def check(self) -> None:
        """Raise `IncompatibleRedis` when this Redis could lose jobs or holds a queue of another schema."""
        policy = await self._eviction_policy()
        if policy != "noeviction":
            raise IncompatibleRedis(
                f"Redis can evict jobs: its maxmemory-policy is {policy}; "
                "run `redis-cli CONFIG SET maxmemory-policy noeviction`, and set it in redis.conf"
            )
        with translated():
            await self.redis.set(self.redis_keys.schema, SCHEMA_VERSION, nx=True)
            version = int(await self.redis.get(self.redis_keys.schema) or 0)
        if version != SCHEMA_VERSION:
            namespace = self.settings.namespace
            raise IncompatibleRedis(
                f"the queue of namespace {namespace} has schema {version}, this program has schema {SCHEMA_VERSION}; "
                + schema_remedy(version)
            )

    async def _eviction_policy(self) -> str:
        try:
            memory = await self.redis.info("memory")
        except ResponseError as error:  # some services do not allow INFO
            log.warning("eviction_policy_unknown", reason=str(error))
            return "noeviction"
        except (RedisError, OSError, TimeoutError) as error:
            raise _unavailable(error) from error
        return str(memory.get("maxmemory_policy", "noeviction"))

    async def close(self) -> None:
        with translated():
            await self.redis.aclose()
            if self.blocking is not self.redis:
                await self.blocking.aclose()


class QueueComponent:
    """Base of a queue's components."""

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self._redis = client.redis
        self._blocking = client.blocking
        self._keys = client.redis_keys
        self._settings = client.settings
        self._scripts = client.scripts
