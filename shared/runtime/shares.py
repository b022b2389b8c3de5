"""Bounded resources that tenants share, so that no tenant gets all of one.

A tenant may hold as much as it leaves free: half of a resource if it is the only one, a third next to another that does
the same, and something is always free for the next. What is idle is never reserved for a certain tenant.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared.errors import Overloaded
from shared.runtime import metrics


def may_take(amount: int, *, held: int, free: int) -> bool:
    """Return whether a tenant that holds `held` units may take more; its first may be all that is free."""
    return amount <= free and (held == 0 or held + amount <= free - amount)


class SharedPool:
    """`size` units of a resource, in one event loop. `name` labels its metrics."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._in_use = metrics.shared_in_use.labels(name)
        self._held: dict[str, int] = {}
        self._used = 0

    @property
    def free(self) -> int:
        return self.size - self._used

    def take(self, tenant: str, amount: int) -> bool:
        """Take units for a tenant, and return whether its share and the pool allow it."""
        held = self._held.get(tenant, 0)
        if not may_take(amount, held=held, free=self.free):
            return False
        self._set(tenant, held + amount, self._used + amount)
        return True

    def release(self, tenant: str, amount: int) -> None:
        self._set(tenant, self._held.get(tenant, 0) - amount, self._used - amount)

    def refusal(self, message: str) -> Overloaded:
        """Count a refusal, and return its error."""
        metrics.share_refusals.labels(self.name).inc()
        return Overloaded(f"{message}; try again later")

    def _set(self, tenant: str, held: int, used: int) -> None:
        self._used = used
        self._in_use.set(used)
        if held > 0:
            self._held[tenant] = held
        else:
            self._held.pop(tenant, None)


@dataclass(eq=False)
class _Waiter:
    tenant: str
    amount: int
    admitted: asyncio.Event


class SharedTurns:
    """Turns at a pool: work that does not fit waits, and waiting tenants are admitted one after the other.

    A tenant has at most `max_waiting` waiters, and each waits for `timeout_s` at most.
    """

    def __init__(self, pool: SharedPool, *, max_waiting: int, timeout_s: float) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._waiting: dict[str, deque[_Waiter]] = {}  # the order of tenants is that of their turns

    @asynccontextmanager
    async def turn(self, tenant: str, amount: int) -> AsyncIterator[None]:
        """Hold `amount` units, at most all, while the block runs; raises `Overloaded`."""
        waiter = _Waiter(tenant, min(amount, self._pool.size), asyncio.Event())
        line = self._waiting.setdefault(tenant, deque())
        if len(line) >= self._max_waiting:
            raise self._pool.refusal(f"{self._max_waiting} requests of this tenant wait for {self._pool.name}")
        line.append(waiter)
        self._admit()
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await waiter.admitted.wait()
            except TimeoutError:
                if not waiter.admitted.is_set():
                    raise self._pool.refusal(f"no room for {self._pool.name} in {self._timeout_s:g} s") from None
            yield
        finally:
            self._leave(waiter)
            self._admit()

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.admitted.is_set():
            self._pool.release(waiter.tenant, waiter.amount)
            return
        line = self._waiting[waiter.tenant]
        line.remove(waiter)
        if not line:
            del self._waiting[waiter.tenant]

    def _admit(self) -> None:
        while self._admit_next():
            pass

    def _admit_next(self) -> bool:
        """Admit the next waiter in the order of turns, and return whether there was one with room.

        A waiter that lacks only free units holds up those behind it.
        """
        for tenant, line in self._waiting.items():
            waiter = line[0]
            if self._pool.take(tenant, waiter.amount):
                del self._waiting[tenant]
                line.popleft()
                if line:
                    self._waiting[tenant] = line  # behind the others
                waiter.admitted.set()
                return True
            if waiter.amount > self._pool.free:
                return False
        return False
