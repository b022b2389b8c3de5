"""Transactions: a decision in Python about what it reads in Redis, whose commands run if that is still the same.

For what is rare. The scripts of the hot path decide themselves, or take a decision with fences of their own.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from shared.errors import RedisUnavailable
from shared.queue.quotas import quota_exceeded
from shared.queue.script_arguments import AddedSize

if TYPE_CHECKING:
    from shared.queue.client import QueueClient

T = TypeVar("T")
Command: TypeAlias = Sequence[str | int | float]

READ_AT_ONCE = 500
"""Commands of one script: more would block Redis for over 2 ms."""

MOST_ATTEMPTS = 30
CONFLICT_PAUSE_S = 0.01
"""Longest pause after the first conflict; it grows with each."""


class TooManyConflicts(RedisUnavailable):
    """All attempts have failed, as others change what they read."""


class Transaction:
    """One attempt. Times are those of Redis at the last read."""

    def __init__(self, client: QueueClient, *, when_full: bool = False) -> None:
        self.now_ms = 0
        self._client = client
        self._when_full = when_full
        self._fences: list[tuple[list[str], str]] = []
        self._writes: list[Sequence[Any]] = []
        self._added: list[AddedSize] = []

    async def read(self, *commands: Command, fenced: bool = True) -> list[Any]:
        """Return the replies to commands; `fenced`: nothing is written if one of them has changed by then."""
        texts, replies = [[str(part) for part in command] for command in commands], list[str]()
        for first in range(0, len(texts), READ_AT_ONCE):
            some = json.dumps(texts[first : first + READ_AT_ONCE])
            self.now_ms, *found = await self._client.scripts.read_replies(some)
            replies += found
        if fenced:
            self._fences += zip(texts, replies, strict=True)
        return [_reply(json.loads(reply)) for reply in replies]

    async def time_ms(self) -> int:
        """Return the time of Redis."""
        await self.read(("EXISTS", self._client.redis_keys.schema), fenced=False)
        return self.now_ms

    def write(self, *command: str | float) -> None:
        """Add a command."""
        self._writes.append([str(part) for part in command])

    def call(self, function: str, *args: str | float | bool) -> None:
        """Add a call of one of the `FUNCTIONS` of `transact.lua`."""
        self._writes.append([function, *args])

    def add_size(self, tenant: str, size: str) -> None:
        """Count what a tenant will keep; `commit` raises `QuotaExceeded` if that is too much."""
        self._added.append(AddedSize(tenant, size))

    async def commit(self) -> bool:
        """Run the commands; False if something has changed."""
        if not self._writes and not self._added:
            return True
        fences, writes = json.dumps(self._fences), json.dumps(self._writes)
        result = await self._client.scripts.transact(self._when_full, fences, writes, *self._added)
        if result not in ("ok", "changed"):
            raise quota_exceeded(self._added[0].tenant, result)
        return result == "ok"


async def transact(
    client: QueueClient, attempt: Callable[[Transaction], Awaitable[T]], *, when_full: bool = False
) -> T:
    """Return what `attempt` returns; it is repeated while others change what it reads.

    `when_full`: also while Redis has no memory left, unless it adds what clients send.
    """
    for number in range(MOST_ATTEMPTS):
        await asyncio.sleep(random.uniform(0, CONFLICT_PAUSE_S * number))
        transaction = Transaction(client, when_full=when_full)
        result = await attempt(transaction)
        if await transaction.commit():
            return result
    raise TooManyConflicts("Redis is busy: what a request reads is changed by others all the time; retry later")


def _reply(value: Any) -> Any:
    """Return a reply as the Redis client does: Lua has no empty list, and no null."""
    if isinstance(value, list):
        return [_reply(one) for one in value]
    if value is False:
        return None
    return [] if value == {} else value
