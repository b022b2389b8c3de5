"""Batches as the queue's Redis holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from shared.errors import Conflict, NotFound
from shared.protocols.openai.batches import Batch, BatchError, BatchStatus
from shared.protocols.openai.files import Part
from shared.queue.client import QueueComponent, translated
from shared.runtime.clock import now_ms

MAX_BATCHES = 1000
"""Batches of one tenant that are kept at once."""

_NUMBERS = {field.name for field in fields(Batch) if str(field.type).startswith("int")}
_FLAGS = {"has_output", "has_errors"}


@dataclass(frozen=True)
class BatchUpdate:
    """What a piece of work on a batch has come to: fields to set and counters to add to, lines that became jobs, and
    parts of the batch's files that were stored."""

    set: Mapping[str, str | int]
    add: Mapping[str, int] | None = None
    taken: Sequence[int] = ()
    parts: Sequence[tuple[str, Part]] = ()


class Batches(QueueComponent):
    async def create(self, batch: Batch) -> None:
        """Begin a batch; raises `NotFound` where its file is none, and `Conflict` at 1,000 batches of a tenant."""
        told: list[str | int] = []
        for name, value in _wire(batch, self._settings.retention_s * 1000).items():
            told += [name, value]
        answer = await self._client.run(
            "backfill_create", batch.tenant, batch.id, batch.input_file_id, MAX_BATCHES, batch.created_at_ms, *told
        )
        if answer == "no_file":
            raise NotFound(f"there is no file {batch.input_file_id[:64]} of purpose batch", param="input_file_id")
        if answer == "full":
            raise Conflict(f"a tenant has at most {MAX_BATCHES} batches; those that ended are forgotten after a while")

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch as it stands, or raise `NotFound`."""
        with translated():
            found = await self._redis.hgetall(self._keys.backfill(tenant, batch_id))
        if "status" not in found:
            raise _no_batch(batch_id)
        return _batch(tenant, batch_id, found)

    async def page(self, tenant: str, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Return up to `limit` of a tenant's batches, newest first, and whether there are more."""
        index = self._keys.batches(tenant)
        with translated():
            rank = -1 if after is None else await self._redis.zrevrank(index, after)
            if rank is None:
                raise _no_batch(str(after))
            ids = await self._redis.zrange(index, rank + 1, rank + 1 + limit, desc=True)
            async with self._redis.pipeline(transaction=False) as pipe:
                for one in ids[:limit]:
                    pipe.hgetall(self._keys.backfill(tenant, one))
                rows = await pipe.execute() if ids else []
        found = [_batch(tenant, one, row) for one, row in zip(ids[:limit], rows, strict=True) if "status" in row]
        return found, len(ids) > limit

    async def cancel(self, tenant: str, batch_id: str) -> None:
        """Ask for a batch to be canceled; raises `NotFound`."""
        if not await self._client.run("backfill_cancel", tenant, batch_id):
            raise _no_batch(batch_id)

    async def due(self, limit: int, again_ms: int) -> list[tuple[str, str]]:
        """Return tenant and id of the batches to look at; each is due again after `again_ms`."""
        rows = await self._client.run("backfill_due", limit, again_ms)
        return [(tenant, batch_id) for tenant, _, batch_id in (row.partition("|") for row in rows)]

    async def postpone(self, batch: Batch, again_ms: int) -> None:
        """Look at a batch again after `again_ms`."""
        with translated():
            row = f"{batch.tenant}|{batch.id}"
            await self._redis.zadd(self._keys.backfills, {row: now_ms() + again_ms}, xx=True)

    async def commit(self, batch: Batch, piece: BatchUpdate, again_ms: int | None) -> bool:
        """Write a piece of work on `batch` and look again after `again_ms`; None: it has ended.

        False where another piece was written since `batch` was read: then this one counts for nothing.
        """
        told = {
            "set": [str(part) for pair in piece.set.items() for part in pair],
            "add": [str(part) for pair in (piece.add or {}).items() for part in pair],
            "taken": list(piece.taken),
            "parts": [[file_id, f"{part.bytes} {part.name}"] for file_id, part in piece.parts],
        }
        again, keep_ms = "" if again_ms is None else again_ms, self._settings.file_retention_s * 1000
        return bool(
            await self._client.run(
                "backfill_commit", batch.tenant, batch.id, batch.rev, again, keep_ms, json.dumps(told)
            )
        )

    async def accepted_lines(self, batch: Batch, first: int, count: int) -> list[bool]:
        """Return for lines `first` to `first + count - 1` whether each became a job."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for line in range(first, first + count):
                    pipe.getbit(self._keys.taken(batch.tenant, batch.id), line)
                return [bool(bit) for bit in await pipe.execute()]

    async def known_jobs(self, job_ids: Sequence[str]) -> list[bool]:
        """Return which of the jobs there are."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for one in job_ids:
                    pipe.exists(self._keys.job(one))
                return [bool(there) for there in await pipe.execute()]


def _no_batch(batch_id: str) -> NotFound:
    return NotFound(f"there is no batch {batch_id[:64]}, or no longer", param="id")


def _wire(batch: Batch, retention_ms: int) -> dict[str, str | int]:
    """Return a new batch as a hash; `keep_until` is until when the jobs of its lines are kept at least."""
    told: dict[str, str | int] = {
        name: getattr(batch, name)
        for name in ("endpoint", "input_file_id", "output_file_id", "error_file_id", "base_url")
    }
    numbers = {"created_at_ms": batch.created_at_ms, "expires_at_ms": batch.expires_at_ms, "rev": 0, "accepted": 0}
    keep = {"keep_until": batch.expires_at_ms + retention_ms}
    return {**told, **numbers, **keep, "status": batch.status.value, "metadata": json.dumps(batch.metadata)}


def _batch(tenant: str, batch_id: str, found: Mapping[str, str]) -> Batch:
    values: dict[str, Any] = {name: found[name] for name in Batch.__dataclass_fields__ if name in found}
    for name in values.keys() & _NUMBERS:
        values[name] = int(values[name])
    for name in values.keys() & _FLAGS:
        values[name] = values[name] == "1"
    values["metadata"] = json.loads(found.get("metadata", "{}"))
    values["status"] = BatchStatus(found["status"])
    values["final_status"] = BatchStatus(found.get("final_status", BatchStatus.COMPLETED))
    values["errors"] = tuple(BatchError.model_validate(one) for one in json.loads(found.get("errors", "[]")))
    return Batch(**{**values, "id": batch_id, "tenant": tenant})
