"""Pauses: models, tenants or everything that operators hold back. Running jobs run on, and submits are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError

from shared.errors import Conflict
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.records import RANKS
from shared.queue.transactions import Command, Transaction

MAX_PAUSES = 1000
MAX_REASON_CHARS = 200
_WAKES = 32
"""Signatures of a model and priority, or of all, for which a worker is woken; each claim wakes the next."""


class PauseKind(StrEnum):
    """What is paused."""

    ALL = "all"
    MODEL = "model"
    TENANT = "tenant"


@dataclass(frozen=True)
class Pause:
    """One pause: `name` is that of the model or tenant, empty for everything; `key_id` that of the API key, if any."""

    kind: PauseKind
    name: str
    reason: str
    paused_at_ms: int
    key_id: str | None = None


@dataclass(frozen=True)
class Pauses:
    """All pauses."""

    by_name: Mapping[tuple[PauseKind, str], Pause] = field(default_factory=dict)

    def has_model(self, model: str) -> bool:
        """Return whether jobs of the model do not start."""
        return (PauseKind.ALL, "") in self.by_name or (PauseKind.MODEL, model) in self.by_name

    @property
    def tenants(self) -> frozenset[str]:
        """The paused tenants."""
        return frozenset(name for kind, name in self.by_name if kind is PauseKind.TENANT)


class PauseControls(QueueComponent):
    """Sets and ends pauses; workers follow at their next claim."""

    async def set(self, pause: Pause) -> None:
        """Pause; a repetition replaces the reason. Raises `Conflict` at `MAX_PAUSES`."""
        row = _PAUSE.dump_json(pause).decode()
        field = _field(pause.kind, pause.name)

        async def attempt(transaction: Transaction) -> None:
            known, count = await transaction.read(("HEXISTS", self._keys.pauses, field), ("HLEN", self._keys.pauses))
            if not known and count >= MAX_PAUSES:
                raise Conflict(f"too many pauses: at most {MAX_PAUSES}; end some, or pause everything")
            transaction.write("HSET", self._keys.pauses, field, row)

        await self._transact(attempt, when_full=True)

    async def end(self, kind: PauseKind, name: str = "") -> bool:
        """End a pause and wake workers; False if there is none."""
        field = _field(kind, name)

        async def attempt(transaction: Transaction) -> bool:
            (known,) = await transaction.read(("HEXISTS", self._keys.pauses, field))
            if known:
                transaction.write("HDEL", self._keys.pauses, field)
                await self._wake(transaction, kind, name)
            return bool(known)

        return await self._transact(attempt, when_full=True)

    async def _wake(self, transaction: Transaction, kind: PauseKind, name: str) -> None:
        """Wake workers for what a pause held back."""
        if kind is PauseKind.TENANT:
            transaction.call("resume_tenant", name)
            return
        ready = [("ZRANGE", self._keys.ready(name, rank.value), 0, _WAKES - 1) for rank in RANKS]
        longest = ("ZRANGE", self._keys.signatures, 0, _WAKES - 1, "REV")
        reads: list[Command] = [*ready] if kind is PauseKind.MODEL else [longest]
        for signatures in await transaction.read(*reads, fenced=False):
            for signature in signatures:
                transaction.call("wake", signature)

    async def all(self) -> Pauses:
        """Return all pauses, by kind and name."""
        with translated():
            rows = await self._redis.hgetall(self._keys.pauses)
        pauses = filter(None, map(_read, rows.values()))
        return Pauses({(one.kind, one.name): one for one in sorted(pauses, key=lambda pause: (pause.kind, pause.name))})


_PAUSE = TypeAdapter(Pause)


def _field(kind: PauseKind, name: str) -> str:
    return kind.value if kind is PauseKind.ALL else f"{kind.value}|{name}"


def _read(row: str) -> Pause | None:
    try:
        return _PAUSE.validate_json(row)
    except ValidationError:
        return None
