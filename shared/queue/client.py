"""Connections to the Redis of one namespace: its scripts and commands, and its checks."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from shared.config.settings import Settings
from shared.errors import ConfigurationError, IncompatibleRedis, RedisUnavailable
from shared.job import QUEUE_SCHEMA
from shared.queue.connections.errors import translated
from shared.queue.connections.failover import Failover
from shared.queue.connections.pools import (
    connect_blocking,
    connect_commands,
    connect_renewals,
    share_blocking,
    share_commands,
)
from shared.queue.connections.redis_traits import durability, schema_remedy
from shared.queue.connections.shared_connection import NotShared, SharedConnection
from shared.queue.policy_table import policy_value
from shared.queue.records import paired, start_after
from shared.queue.redis_keys import RedisKeys
from shared.queue.scripts import REPLAYED, script_methods, script_text
from shared.queue.transactions import Transaction, transact

if TYPE_CHECKING:
    from redis.commands.core import AsyncScript

log = structlog.get_logger()
Item = TypeVar("Item")

LIST_ROUNDS = 5
"""Reads of an index for one page."""

EXPIRED_ROWS = 200
"""Rows of a further read for one page, when those before it have expired."""


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
        self.shared_blocking: SharedConnection | None = None  # for one caller: its reads would delay others
        self.redis_keys = RedisKeys(namespace)
        self.settings = settings
        self.process = secrets.token_hex(8)  # names this one among those that wait for jobs
        self.scripts = script_methods(self)
        self.durability_warning = ""
        self.used_policies: Mapping[str, str] = {}
        """Those that apply, as `Policies` last read them; `policy` returns one."""
        self._loaded: dict[str, AsyncScript] = {}

    @classmethod
    def connect(cls, settings: Settings) -> QueueClient:
        """Return a client with connection pools of their own for commands, blocking reads and renewals of leases."""
        failover, url = Failover(), settings.redis_url
        try:
            commands, blocking = connect_commands(url, failover), connect_blocking(url, failover)
            client = cls(
                commands,
                namespace=settings.namespace,
                settings=settings,
                blocking=blocking,
                renewals=connect_renewals(url, settings.lease_ms, failover),
                failover=failover,
            )
            client.shared, client.shared_blocking = share_commands(commands), share_blocking(blocking)
            commands.connection_pool.connection_class(**commands.connection_pool.connection_kwargs)
        except (ValueError, TypeError) as error:  # of an option after the `?`
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

    async def command(self, *command: str | float, blocking: bool = False) -> Any:
        """Run a command that may be sent again, and return its reply; `blocking` reads are those of one caller.

        Fields of stream entries come as dicts or flat lists.
        """
        shared, redis = (self.shared_blocking, self.blocking) if blocking else (self.shared, self.redis)
        with translated():
            if shared is not None:
                with suppress(NotShared):
                    return (await shared.replies([command]))[0]
            return await redis.execute_command(*command)

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

    def policy(self, name: str) -> int:
        """Return the value of a policy that is a whole number: this process' own until those that apply are read."""
        used = self.used_policies.get(name)
        return int(policy_value(self.settings, name) if used is None else used)

    async def check(self, *, quiet: bool = False) -> None:
        """Raise `IncompatibleRedis` when this Redis evicts jobs or holds a queue of another schema.

        A Redis whose restart loses the jobs is usable, as for development: it sets `durability_warning`, which is
        logged when it changes, unless `quiet`.
        """
        await self._schema()  # in a cluster, this leads to the node that serves the namespace
        info = await self._info()
        self._leave_replica(str(info.get("role", "")))
        self._note_durability(info, quiet)
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise IncompatibleRedis(
                f"Redis can evict jobs: its maxmemory-policy is {policy}; "
                "run `redis-cli CONFIG SET maxmemory-policy noeviction`, and set it in redis.conf"
            )
        known = await self._schema()
        if known is None:  # a full Redis refuses SET, also of a key that exists
            with translated():
                await self.redis.set(self.redis_keys.schema, QUEUE_SCHEMA, nx=True)
            known = await self._schema()
        version = int(known or 0)
        if version != QUEUE_SCHEMA:
            namespace = self.settings.namespace
            raise IncompatibleRedis(
                f"the queue of namespace {namespace} has schema {version}, this program has schema {QUEUE_SCHEMA}; "
                + schema_remedy(version)
            )

    async def _schema(self) -> str | None:
        with translated():
            known = await self.redis.get(self.redis_keys.schema)
        return None if known is None else str(known)

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
        trait = durability(info)
        warning = f"{trait.seen}: {trait.remedy}" if trait.remedy else ""
        if warning and warning != self.durability_warning and not quiet:
            log.warning("redis_not_durable", message=warning)
        self.durability_warning = warning

    async def close(self) -> None:
        for shared in (self.shared, self.shared_blocking):
            if shared is not None:
                await shared.close()
        with translated():
            for client in {self.redis, self.blocking, self.renewals}:
                await client.aclose()


class QueueComponent:
    """Base of a queue's components."""

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self._redis = client.redis
        self._keys = client.redis_keys
        self._settings = client.settings
        self._scripts = client.scripts

    async def _transact(self, attempt: Callable[[Transaction], Awaitable[Item]], *, when_full: bool = False) -> Item:
        return await transact(self._client, attempt, when_full=when_full)

    async def _replies(self, commands: Iterable[Sequence[str | int]]) -> list[Any]:
        """Return the replies to commands, in one round trip."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for command in commands:
                    pipe.execute_command(*command)
                return list(await pipe.execute())

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
