"""Connections to the queue's Redis, the conversion of its errors, and its checks."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.config.settings import Settings
from shared.errors import ConfigurationError, IncompatibleRedis, RedisFull, RedisUnavailable, ScriptFailed
from shared.job import QUEUE_SCHEMA
from shared.queue.connections.failover import Failover, following
from shared.queue.connections.shared_connection import NotShared, SharedConnection
from shared.queue.records import paired, start_after
from shared.queue.redis_keys import RedisKeys
from shared.queue.scripts import REPLAYED, script_methods, script_text
from shared.runtime.clock import now_ms

if TYPE_CHECKING:
    from redis.commands.core import AsyncScript

log = structlog.get_logger()
Item = TypeVar("Item")

COMMAND_TIMEOUT_S = 5.0
"""Timeout of a command or script: far above their durations, so that only a lost server reaches it."""

LEAST_TIMEOUT_S = 0.5

CONNECTIONS = 32
"""Connections for commands, per process. In a burst callers wait for one; redis-py's default pool raises an error."""

REFUSED_WHEN_FULL = "command not allowed when used memory > 'maxmemory'"
"""Text of Redis' refusal at `maxmemory`: an error of its own for a command, part of an error's text for a script."""

_SERVER_STATES = re.compile(r"READONLY|MASTERDOWN|LOADING|MISCONF|NOREPLICAS|CLUSTERDOWN|UNBLOCKED|NOPERM|NOAUTH|OOM")
"""Errors of a command in a script that a later call does not get."""

LIST_ROUNDS = 5
"""Reads of an index for one page."""

EXPIRED_ROWS = 200
"""Rows of a further read for one page, when those before it have expired."""

MAX_BLOCK_MS = 2000
"""Longest blocking read."""

BLOCK_MARGIN_S = 3.0
"""Socket timeout beyond the duration of a blocking read, so that the read always ends first."""


def schema_remedy(version: int) -> str:
    """Return what to do about a queue of another schema version."""
    if version > QUEUE_SCHEMA:
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
        if REFUSED_WHEN_FULL in str(error):
            raise RedisFull("Redis has no memory left; retry later, or raise its maxmemory") from error
        if _is_fault_of_script(error):
            raise ScriptFailed(f"a script of the queue failed: {error!s}") from error
        raise RedisUnavailable(f"cannot reach Redis: {error!s}", public=_public(error)) from error


def _is_fault_of_script(error: Exception) -> bool:
    """Return whether a script itself raised the error, not a command in it that the server's state refuses."""
    text = str(error)
    return isinstance(error, ResponseError) and "user_script" in text and not _SERVER_STATES.search(text)


def _public(error: Exception) -> str | None:
    """Return the kind of fault, without the address that the error's text can contain."""
    if isinstance(error, AuthenticationError | NoPermissionError):
        return "redis: access denied"
    if isinstance(error, BusyLoadingError):
        return "redis: still loads its data"
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "redis: no response in time"
    return "redis: responds with an error" if isinstance(error, ResponseError) else None


def _pool_options(url: str, failover: Failover | None, timeout_s: float, retries: int) -> dict[str, Any]:
    return {
        "decode_responses": True,
        "encoding_errors": "replace",
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, COMMAND_TIMEOUT_S),
        "health_check_interval": 30,
        "protocol": 2,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        **parse_url(url),
        **following(url, failover or Failover()),  # last: a pool's `from_url` prefers the class of TLS or a socket file
    }


def connect_commands(url: str, failover: Failover | None = None) -> Redis:
    """Return a client for commands and scripts, which can be repeated: short timeout, one retry."""
    options = _pool_options(url, failover, COMMAND_TIMEOUT_S, 1)
    return Redis.from_pool(BlockingConnectionPool(max_connections=CONNECTIONS, timeout=COMMAND_TIMEOUT_S, **options))


def connect_blocking(url: str, failover: Failover | None = None) -> Redis:
    """Return a client for blocking reads, without retries."""
    return Redis.from_pool(ConnectionPool(**_pool_options(url, failover, MAX_BLOCK_MS / 1000 + BLOCK_MARGIN_S, 0)))


def connect_renewals(url: str, lease_ms: int, failover: Failover | None = None) -> Redis:
    """Return a client for renewals of leases: its timeout leaves time for the retry within a lease.

    Connections can hang while others work: a process that redis-server has forked keeps them open when it is killed.
    """
    timeout_s = min(COMMAND_TIMEOUT_S, max(LEAST_TIMEOUT_S, lease_ms / 1000 / 4))
    options = _pool_options(url, failover, timeout_s, 1)
    return Redis.from_pool(BlockingConnectionPool(max_connections=2, timeout=timeout_s, **options))


class QueueClient:
    """Connections to the Redis of one namespace, with its key names, settings and scripts."""

    def __init__(
        self,
        redis: Redis,
        *,
        namespace: str,
        settings: Settings,
        blocking: Redis | None = None,
        renewals: Redis | None = None,
        failover: Failover | None = None,
    ) -> None:
        # Any: redis-py types every reply for bytes and text both, whatever decode_responses says.
        self.redis: Any = redis
        self.blocking: Any = redis if blocking is None else blocking
        self.renewals: Any = redis if renewals is None else renewals
        self.failover = failover or Failover()
        self.shared: SharedConnection | None = None
        self.redis_keys = RedisKeys(namespace)
        self.settings = settings
        self.process = secrets.token_hex(8)  # names this one among those that wait for jobs
        self.scripts = script_methods(self)
        self.durability_warning = ""
        self._loaded: dict[str, AsyncScript] = {}

    @classmethod
    def connect(cls, settings: Settings) -> QueueClient:
        """Return a client with connection pools of their own for commands, blocking reads and renewals of leases."""
        failover, url = Failover(), settings.redis_url
        try:
            commands = connect_commands(url, failover)
            client = cls(
                commands,
                namespace=settings.namespace,
                settings=settings,
                blocking=connect_blocking(url, failover),
                renewals=connect_renewals(url, settings.lease_ms, failover),
                failover=failover,
            )
            client.shared = SharedConnection(commands.connection_pool.make_connection, COMMAND_TIMEOUT_S)
        except ValueError as error:  # of an option after the `?`
            raise ConfigurationError(f"FUSEQUEUE_REDIS_URL: {error}") from error
        return client

    async def run(self, name: str, *args: str | float) -> Any:
        """Run the script `name`. A repetition after a lost reply returns the first reply, as `REPLAYED` explains."""
        script = self._loaded.get(name)
        if script is None:
            script = self._loaded[name] = self.redis.register_script(script_text(name, self.settings))
        keys = [self.redis_keys.prefix]
        if name in REPLAYED:
            keys.append(self.redis_keys.reply(secrets.token_hex(8)))
        client = self.renewals if name == "renew" else self.redis
        with translated():
            if self.shared is not None and client is self.redis:
                with suppress(NotShared):
                    return (await self.shared.replies([("EVALSHA", script.sha, len(keys), *keys, *args)]))[0]
            try:
                return await script(keys=keys, args=args, client=client)
            except NoScriptError:  # it was loaded into a server that turned out to be a replica
                return await script(keys=keys, args=args, client=client)

    async def hashes(self, names: Sequence[str]) -> list[dict[str, str]]:
        """Return the hashes with these names, in one round trip."""
        with translated():
            if self.shared is not None:
                with suppress(NotShared):
                    return [paired(flat) for flat in await self.shared.replies([("HGETALL", name) for name in names])]
            if len(names) == 1:  # a pipeline costs more
                return [await self.redis.hgetall(names[0])]
            async with self.redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(name)
                return list(await pipe.execute())

    async def now_ms(self) -> int:
        """Return the time of Redis, the only clock that API, workers and chores share."""
        with translated():
            seconds, micros = await self.redis.time()
        return int(seconds) * 1000 + int(micros) // 1000

    async def check(self, *, quiet: bool = False) -> None:
        """Raise `IncompatibleRedis` when this Redis evicts jobs or holds a queue of another schema.

        A Redis whose restart loses the jobs is usable, as for development: it sets `durability_warning`, which is
        logged when it changes, unless `quiet`.
        """
        info = await self._info()
        self._leave_replica(str(info.get("role", "")))
        self._note_durability(info, quiet)
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise IncompatibleRedis(
                f"Redis can evict jobs: its maxmemory-policy is {policy}; "
                "run `redis-cli CONFIG SET maxmemory-policy noeviction`, and set it in redis.conf"
            )
        with translated():
            known = await self.redis.get(self.redis_keys.schema)
            if known is None:  # a full Redis refuses SET, also of a key that exists
                await self.redis.set(self.redis_keys.schema, QUEUE_SCHEMA, nx=True)
                known = await self.redis.get(self.redis_keys.schema)
            version = int(known or 0)
        if version != QUEUE_SCHEMA:
            namespace = self.settings.namespace
            raise IncompatibleRedis(
                f"the queue of namespace {namespace} has schema {version}, this program has schema {QUEUE_SCHEMA}; "
                + schema_remedy(version)
            )

    async def check_primary(self) -> None:
        """Leave a server that has become a replica: it serves reads, which can be old. Raises `RedisUnavailable`."""
        with translated():
            try:
                role = await self.redis.execute_command("ROLE")
            except ResponseError:  # some services do not allow ROLE
                return
        self._leave_replica(str(role[0]))

    def _leave_replica(self, role: str) -> None:
        if role == "slave":
            self.failover.note(self.failover.count)
            raise RedisUnavailable("cannot reach Redis: this server has become a replica")

    async def _info(self) -> Mapping[str, Any]:
        with translated():
            try:
                return dict(await self.redis.info())
            except ResponseError as error:  # some services do not allow INFO
                log.warning("redis_settings_unknown", reason=str(error))
                return {}

    def _note_durability(self, info: Mapping[str, Any], quiet: bool) -> None:
        trait = _durability(info)
        warning = f"{trait.seen}: {trait.remedy}" if trait.remedy else ""
        if warning and warning != self.durability_warning and not quiet:
            log.warning("redis_not_durable", message=warning)
        self.durability_warning = warning

    async def close(self) -> None:
        if self.shared is not None:
            await self.shared.close()
        with translated():
            for client in {self.redis, self.blocking, self.renewals}:
                await client.aclose()


class QueueComponent:
    """Base of a queue's components."""

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self._redis = client.redis
        self._blocking = client.blocking
        self._keys = client.redis_keys
        self._settings = client.settings
        self._scripts = client.scripts

    async def _hashes(self, names: Iterable[str]) -> list[dict[str, str]]:
        return await self._client.hashes(list(names))

    async def _ids_after(
        self, index: str, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[str], bool]:
        """Return up to `limit` ids of an index after the id `after`, and whether there are more."""
        with translated():
            start = 0 if after is None else await start_after(self._redis, index, after, newest_first=newest_first)
            ids = await self._redis.zrange(index, start, start + limit, desc=newest_first)
        return ids[:limit], len(ids) > limit

    async def _page_of(
        self,
        index: str,
        read: Callable[[list[str]], Awaitable[list[Item]]],
        after: str | None,
        limit: int,
        *,
        newest_first: bool,
    ) -> tuple[list[Item], bool]:
        """Return up to `limit` items of an index after the id `after`, and whether there are more.

        `read` leaves out items that have expired: an empty page would end a client's paging.
        """
        found: list[Item] = []
        rows = limit + 1
        for _ in range(LIST_ROUNDS):
            ids, more = await self._ids_after(index, after, rows, newest_first=newest_first)
            found += await read(ids)
            if not more or len(found) > limit:
                break
            after, rows = ids[-1], EXPIRED_ROWS
        return found[:limit], more or len(found) > limit


LEAST_VERSION = (6, 2)
MOST_SKEW_MS = 5_000
FULL_MEMORY = 0.9
"""Fraction of maxmemory above which a submit can fail at any moment."""


@dataclass(frozen=True)
class RedisTrait:
    """One finding: `remedy` is empty if it is good; `fatal` if nothing works without it."""

    name: str
    seen: str
    remedy: str = ""
    fatal: bool = False


async def examine(client: QueueClient) -> list[RedisTrait]:
    """Return version, settings, memory, clock and schema of Redis; raises `RedisUnavailable`."""
    skew_ms = now_ms() - await client.now_ms()
    with translated():
        version = int(await client.redis.get(client.redis_keys.schema) or QUEUE_SCHEMA)  # an empty Redis has none
        try:
            info = await client.redis.info("everything")
        except ResponseError:  # some services do not allow INFO
            info = {}
    clock = "synchronize the clocks of both machines (NTP)" if abs(skew_ms) > MOST_SKEW_MS else ""
    schema = f"{schema_remedy(version)} (this program has schema {QUEUE_SCHEMA})" if version != QUEUE_SCHEMA else ""
    return [
        *_traits(info),
        RedisTrait("redis clock", f"{skew_ms / 1000:+.1f} s from this machine", clock),
        RedisTrait("queue schema", str(version), schema, fatal=True),
    ]


def _traits(info: Mapping[str, Any]) -> list[RedisTrait]:
    """Return the findings in Redis' INFO, which is empty if it is not allowed."""
    if not info:
        return [RedisTrait("redis settings", "INFO is not allowed for this user", "allow INFO, to see the settings")]
    version, policy = str(info.get("redis_version", "0")), str(info.get("maxmemory_policy", "noeviction"))
    known = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    upgrade = "" if known >= LEAST_VERSION else "upgrade Redis to 6.2 or later"
    keep = "redis-cli CONFIG SET maxmemory-policy noeviction, and set it in redis.conf: eviction loses jobs"
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    memory = f"{used / 2**20:.0f} MiB used" + (f" of {most / 2**20:.0f} MiB" if most else ", no maxmemory")
    full = most and used > FULL_MEMORY * most
    return [
        RedisTrait("redis version", version, upgrade, fatal=True),
        RedisTrait("redis eviction", policy, "" if policy == "noeviction" else keep, fatal=True),
        _durability(info),
        RedisTrait("redis memory", memory, "raise maxmemory, or lower FUSEQUEUE_MAX_QUEUED_JOBS" if full else ""),
    ]


def _durability(info: Mapping[str, Any]) -> RedisTrait:
    if not int(info.get("aof_enabled", 1)):
        remedy = "redis-cli CONFIG SET appendonly yes, and set it in redis.conf: a restart loses the jobs"
        return RedisTrait("redis durability", "appendonly no", remedy)
    if info.get("aof_last_write_status", "ok") != "ok":
        seen, remedy = "the last write to disk failed", "free disk space, and read the Redis log"
        return RedisTrait("redis durability", seen, remedy)
    return RedisTrait("redis durability", "appendonly yes")
