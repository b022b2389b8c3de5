"""Policies: settings that the queue's scripts follow, with one value for all processes of a namespace.

The scripts read them from Redis. Each running process announces its own settings there: what a process sets goes before
defaults, and then what the process that started last has. A process whose policies do not apply says so.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import structlog

from shared.config.settings import PREFIX, Settings
from shared.errors import RedisUnavailable
from shared.queue.client import QueueClient, QueueComponent
from shared.queue.policy_table import POLICIES, policy_value
from shared.queue.records import paired
from shared.queue.transactions import Transaction

log = structlog.get_logger()

ANNOUNCE_EVERY_S = 30.0
RETRY_S = 1.0
LIVE_MS = 120_000
"""How long an announcement counts while other processes announce theirs."""

KEPT_MS = 3_600_000
"""How long an announcement outlasts an outage in which no process can announce."""

PROCESS_STARTED_S = time.monotonic()

READ_BY_WORKERS = frozenset({"lease_ms", "aging_ms"})
"""Policies of which a worker also reads its own value: for its timers, and in its engine, which knows no Redis."""

Role: TypeAlias = Literal["api", "worker", "chores"]


class PolicySource(NamedTuple):
    """The policies of the running processes of one role with equal settings, by setting."""

    role: str
    set: Mapping[str, str]
    defaults: Mapping[str, str]

    @classmethod
    def of(cls, role: Role, settings: Settings) -> PolicySource:
        own = {name: str(policy_value(settings, name)) for name in POLICIES}
        is_set = settings.model_fields_set
        return cls(
            role,
            {name: value for name, value in own.items() if name in is_set},
            {name: value for name, value in own.items() if name not in is_set},
        )

    @classmethod
    def parse(cls, text: str) -> PolicySource:
        """Read an announcement, also that of a newer version, which can have other fields."""
        row = json.loads(text)
        return cls(row.get("role", ""), row.get("set", {}), row.get("defaults", {}))

    def text(self) -> str:
        return json.dumps(self._asdict(), sort_keys=True)


@dataclass(frozen=True)
class PolicyConflict:
    """A policy that running processes have set to several values: `used`, and by value the roles that have it."""

    setting: str
    used: str
    roles: Mapping[str, tuple[str, ...]]

    @property
    def variable(self) -> str:
        return f"{PREFIX}{self.setting.upper()}"

    @property
    def seen(self) -> str:
        values = (f"{value} ({', '.join(roles)})" for value, roles in self.roles.items() if value != self.used)
        users = ", ".join(self.roles.get(self.used, ()))
        return f"{self.used}{f' ({users})' if users else ''} applies, not {', '.join(values)}"

    @property
    def remedy(self) -> str:
        return f"set {self.variable} to one value for API, workers and chores, and restart those that differ"

    @property
    def message(self) -> str:
        return f"{self.variable} differs between processes: {self.seen}; {self.remedy}"


def applied(sources: Sequence[PolicySource]) -> dict[str, str]:
    """Return the policies that apply: what a process sets goes before defaults, and then what the last one has."""
    defaults = {name: value for source in sources for name, value in source.defaults.items()}
    return defaults | {name: value for source in sources for name, value in source.set.items()}


def _times(row: str) -> tuple[int, int]:
    """Return when a process started, and when it last announced."""
    started, seen, *_ = row.split()
    return int(started), int(seen)


def conflicts(used: Mapping[str, str], sources: Sequence[PolicySource]) -> list[PolicyConflict]:
    """Return the policies of which some process has set another value than the one that applies.

    A process that does not set a policy follows the others; a worker that reads its own value does not.
    """
    found = []
    for name in POLICIES:
        roles: dict[str, set[str]] = {}
        for source in sources:
            value = source.set.get(name)
            if value is None and source.role == "worker" and name in READ_BY_WORKERS:
                value = source.defaults.get(name)
            if value is not None:
                roles.setdefault(value, set()).add(source.role)
        applies = used.get(name)
        if applies is not None and roles.keys() - {applies}:
            found.append(PolicyConflict(name, applies, {value: tuple(sorted(roles[value])) for value in sorted(roles)}))
    return found


class Policies(QueueComponent):
    """Announces this process' policies, and reads those that apply: `QueueClient.policy` returns them."""

    def __init__(self, client: QueueClient) -> None:
        super().__init__(client)
        self.started_s = PROCESS_STARTED_S
        self.conflicts: Sequence[PolicyConflict] = ()
        """Those at the last announcement."""

    async def announce(self, role: Role) -> None:
        """Announce this process' policies, and load those that apply; a conflict is logged when it begins."""
        source = PolicySource.of(role, self._settings)
        uptime_ms = round((time.monotonic() - self.started_s) * 1000)

        async def attempt(transaction: Transaction) -> tuple[dict[str, str], list[PolicySource]]:
            return await self._announce(transaction, source.text(), uptime_ms)

        self._client.used_policies, sources = await self._transact(attempt, when_full=True)
        known, self.conflicts = self.conflicts, conflicts(self._client.used_policies, sources)
        for conflict in self.conflicts:
            if conflict not in known:
                log.error("policies_differ", message=conflict.message)

    async def _announce(
        self, transaction: Transaction, own: str, uptime_ms: int
    ) -> tuple[dict[str, str], list[PolicySource]]:
        """Note an announcement; return the policies that apply, and the sources of all running processes.

        A row counts for `LIVE_MS`, without times in which no process announced, as in an outage.
        """
        name = self._keys.policy_sources
        flat, known = map(paired, await transaction.read(("HGETALL", name), ("HGETALL", self._keys.policies)))
        rows = {text: _times(times) for text, times in flat.items()}
        now = transaction.now_ms
        silent_ms = now - max((seen for _, seen in rows.values()), default=now)
        pause_ms = silent_ms if silent_ms > LIVE_MS / 2 else 0
        live = {text: (started, seen + pause_ms) for text, (started, seen) in rows.items()}
        live[own] = (max(rows.get(own, (0, 0))[0], now - uptime_ms), now)
        for text, (started, seen) in live.items():
            if seen < now - LIVE_MS:
                transaction.write("HDEL", name, text)
            elif text == own or pause_ms:
                transaction.write("HSET", name, text, f"{started} {seen}")
        transaction.write("PEXPIRE", name, KEPT_MS)
        running = sorted((started, text) for text, (started, seen) in live.items() if seen >= now - LIVE_MS)
        sources = [PolicySource.parse(text) for _, text in running]
        used = applied(sources)
        for policy, value in used.items():
            if known.get(policy) != value:
                transaction.write("HSET", self._keys.policies, policy, value)
        return used, sources

    async def try_announce(self, role: Role) -> bool:
        """Announce this process' policies; an error is only logged. False when Redis cannot be reached."""
        try:
            await self.announce(role)
        except RedisUnavailable as error:
            log.debug("policies_not_announced", error=error.message)
            return False
        except Exception:  # without an announcement a process still works
            log.exception("policies_not_announced")
        return True

    async def keep_announced(self, role: Role) -> None:
        """Announce this process' policies until canceled."""
        while True:
            wait_s = ANNOUNCE_EVERY_S if await self.try_announce(role) else RETRY_S
            await asyncio.sleep(random.uniform(0.7, 1.0) * wait_s)

    async def load(self) -> list[PolicySource]:
        """Load the policies that apply; return those that running processes have announced."""
        used, sources = await self._hashes([self._keys.policies, self._keys.policy_sources])
        oldest = await self._client.now_ms() - LIVE_MS
        found = [PolicySource.parse(text) for text, times in sources.items() if int(times.split()[1]) >= oldest]
        self._client.used_policies, self.conflicts = used, conflicts(used, found)
        return found
