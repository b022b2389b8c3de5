"""A redis-server of a benchmark's own, without persistence, and what it measures of itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from bench.common.service import launched
from cli.up.ports import reserved_port
from cli.up.redis_server import HASH_VALUE_BYTES, HOST, STREAM_NODE_BYTES, find
from shared.queue import QueueClient

FIRST_PORT = 6450
START_TRIES, START_GAP_S = 300, 0.1
NOT_IN_SCRIPTS = ("cmdstat_evalsha", "cmdstat_info", "cmdstat_script")

Result = TypeVar("Result")


@contextmanager
def private_redis(folder: Path, *options: str) -> Iterator[str]:
    """Run a redis-server without persistence, with its log in `folder`, and yield its URL."""
    fixed = ["--bind", HOST, "--save", "", "--appendonly", "no", "--dir", str(folder)]
    fixed += ["--stream-node-max-bytes", str(STREAM_NODE_BYTES), "--hash-max-ziplist-value", str(HASH_VALUE_BYTES)]
    command = [str(find().path), *fixed, *options]
    with reserved_port(HOST, FIRST_PORT) as port, launched([*command, "--port", str(port)], folder / "redis.log", None):
        url = f"redis://{HOST}:{port}/0"
        retry = Retry(ConstantBackoff(START_GAP_S), START_TRIES)
        with Redis.from_url(url, socket_timeout=5, retry=retry, retry_on_error=[RedisError]) as client:
            _prefer(client.info("server")["process_id"])
        yield url


def _prefer(pid: int) -> None:
    """Run the server before all other processes, where the user may: it counts the time it waits for a core."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))


class Usage(NamedTuple):
    """What scripts have cost so far, by the server's own count: microseconds, and commands run by them."""

    microseconds: int
    commands: int


@dataclass(frozen=True)
class ScriptCost:
    """One run of a script."""

    name: str
    microseconds: int
    commands: int


class MeasuredClient(QueueClient):
    """A queue's client that asks the server after every script what it cost; scripts wait for each other.

    Not SLOWLOG: it logs the commands of scripts too, which lengthens them.
    """

    costs: list[ScriptCost] | None = None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._one_at_a_time = asyncio.Lock()

    async def run(self, name: str, *args: str | float) -> Any:
        if self.costs is None:
            return await super().run(name, *args)
        async with self._one_at_a_time:
            before = await self._usage()
            reply = await super().run(name, *args)
            after = await self._usage()
        self.costs.append(ScriptCost(name, after.microseconds - before.microseconds, after.commands - before.commands))
        return reply

    async def measured(self, call: Callable[[], Awaitable[Result]]) -> tuple[Result, list[ScriptCost]]:
        """Return the result of `call` and the costs of its scripts."""
        self.costs = []
        try:
            return await call(), self.costs
        finally:
            self.costs = None

    async def used_bytes(self) -> int:
        return int((await self.redis.info("memory"))["used_memory"])

    async def server(self) -> str:
        """Return the server's version and allocator, on which the time of the scripts' garbage collection depends."""
        info = await self.redis.info()
        return f"{info['redis_version']}, {info['mem_allocator']}"

    async def _usage(self) -> Usage:
        stats = await self.redis.info("commandstats")
        script = stats.get("cmdstat_evalsha", {"usec": 0})
        commands = sum(row["calls"] for name, row in stats.items() if not name.startswith(NOT_IN_SCRIPTS))
        return Usage(script["usec"], commands)
