"""State of OpenAI batches in Redis."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.batch import Batch, Part
from shared.errors import Conflict, NotFound
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.files import part_row
from shared.queue.quotas import parts_size
from shared.queue.transactions import Transaction

MAX_BATCHES = 1000
"""Batches of one tenant, including ended ones until they expire."""

MAX_TENANTS = 16
"""Tenants whose turns are read at once: more than can have batches in progress, so that these hide no others."""

LONGEST_MS = 60_000
"""Longer than any delay of a batch."""

_EXPIRED_READ = 100


@dataclass(frozen=True)
class BatchUpdate:
    """Result of one step: fields to set, counters to add to, accepted lines, stored parts of the batch's files."""

    set: Mapping[str, str | int]
    add: Mapping[str, int] | None = None
    accepted: Sequence[int] = ()
    parts: Sequence[tuple[str, Part]] = ()


class Batches(QueueComponent):
    async def create(self, batch: Batch) -> None:
        """Store a new batch; raises `NotFound` for its input file, `Conflict` at `MAX_BATCHES`."""
        stored = {"endpoint", "base_url", "input_file_id", "output_file_id", "error_file_id", "created_at_ms"}
        stored |= {"expires_at_ms", "output_expires_after_s"}
        fields = {
            **batch.model_dump(include=stored, exclude_none=True),
            "signs_urls": int(batch.signs_urls),
            "rev": 0,
            "accepted": 0,
            "keep_until": batch.expires_at_ms + self._client.policy("retention_s") * 1000,  # at least for its jobs
            "status": batch.status.value,
            "metadata": json.dumps(batch.metadata),
        }
        pairs = [item for pair in fields.items() for item in pair]
        tenant, name, index = batch.tenant, self._keys.batch(batch.tenant, batch.id), self._keys.batches(batch.tenant)
        file = self._keys.file(tenant, batch.input_file_id)

        async def attempt(transaction: Transaction) -> None:
            known, (purpose, expires), count, oldest = await transaction.read(
                ("EXISTS", name),
                ("HMGET", file, "purpose", "expires_at_ms"),
                ("ZCARD", index),
                ("ZRANGE", index, 0, _EXPIRED_READ - 1),
            )
            if known:
                return
            if purpose != "batch" or int(expires) <= transaction.now_ms:
                raise NotFound(f"no such file of purpose batch: {batch.input_file_id[:64]}", param="input_file_id")
            exist = await transaction.read(*(("EXISTS", self._keys.batch(tenant, one)) for one in oldest))
            expired = [one for one, exists in zip(oldest, exist, strict=True) if not exists]
            if count - len(expired) >= MAX_BATCHES:
                raise Conflict(f"too many batches: a tenant has at most {MAX_BATCHES}; ended ones expire")
            transaction.write("HSET", name, *pairs)
            transaction.write("ZADD", index, batch.created_at_ms, batch.id)
            transaction.call("set_batch_due", tenant, batch.id, transaction.now_ms, transaction.now_ms, True)
            transaction.write("HINCRBY", file, "live", 1)
            if expired:
                transaction.write("ZREM", index, *expired)

        await self._transact(attempt)

    async def get(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch, or raise `NotFound`."""
        with translated():
            row = await self._redis.hgetall(self._keys.batch(tenant, batch_id))
        if "status" not in row:
            raise _no_batch(batch_id)
        return _batch(tenant, batch_id, row)

    async def page(
        self, tenant: str, after: str | None, limit: int, newest_first: bool = True
    ) -> tuple[list[Batch], bool]:
        """Return up to `limit` batches of a tenant, and whether there are more."""

        async def read(ids: list[str]) -> list[Batch]:
            rows = await self._hashes(self._keys.batch(tenant, batch_id) for batch_id in ids)
            return [_batch(tenant, batch_id, row) for batch_id, row in zip(ids, rows, strict=True) if "status" in row]

        return await self._page_of(self._keys.batches(tenant), read, after, limit, newest_first=newest_first)

    async def cancel(self, tenant: str, batch_id: str) -> None:
        """Request the cancellation of a batch; raises `NotFound`."""
        name = self._keys.batch(tenant, batch_id)

        async def attempt(transaction: Transaction) -> None:
            (status,) = await transaction.read(("HGET", name, "status"))
            if status is None:
                raise _no_batch(batch_id)
            if status in ("validating", "in_progress"):
                now = transaction.now_ms
                transaction.write("HSET", name, "status", "cancelling", "cancelling_at", now, "canceled", 0)
                transaction.write("HINCRBY", name, "rev", 1)
                transaction.call("set_batch_due", tenant, batch_id, now, now, True)

        await self._transact(attempt, when_full=True)

    async def due(self, places: int, running: Mapping[str, int], again_ms: int) -> list[tuple[str, str]]:
        """Claim due batches for a process with `places`, of which tenants use `running`; return tenants and ids.

        At most one of a tenant, in turns of tenants: one takes a place while it holds fewer than are free. Each batch
        is due again after `again_ms`, in case its process is killed.
        """
        await self._transact(self._bring_forward, when_full=True)

        async def attempt(transaction: Transaction) -> list[tuple[str, str]]:
            return await self._claim_due(transaction, places, running, again_ms)

        return await self._transact(attempt, when_full=True)

    async def _bring_forward(self, transaction: Transaction) -> None:
        """Make batches due whose time was written before the clock was set back."""
        latest = ("ZRANGE", self._keys.batch_tenants, 0, MAX_TENANTS - 1, "REV", "WITHSCORES")
        for tenant in _later(await transaction.read(latest, fenced=False), transaction.now_ms):
            name = self._keys.active_batches(tenant)
            rows = await transaction.read(("ZRANGE", name, 0, MAX_TENANTS - 1, "REV", "WITHSCORES"))
            for batch_id in _later(rows, transaction.now_ms):
                transaction.write("ZADD", name, transaction.now_ms, batch_id)
            transaction.call("refresh_batches", tenant, transaction.now_ms)

    async def _claim_due(
        self, transaction: Transaction, places: int, running: Mapping[str, int], again_ms: int
    ) -> list[tuple[str, str]]:
        first = ("ZRANGE", self._keys.batch_tenants, 0, MAX_TENANTS - 1, "WITHSCORES")
        (rows,) = await transaction.read(first, fenced=False)
        now = transaction.now_ms
        tenants = [tenant for tenant, at in zip(rows[::2], rows[1::2], strict=True) if float(at) <= now]
        first_of = (("ZRANGE", self._keys.active_batches(one), 0, 0, "WITHSCORES") for one in tenants)
        firsts = await transaction.read(*first_of)
        # Another process can have claimed it: the index of tenants was read before.
        ids = {one: found[0] for one, found in zip(tenants, firsts, strict=True) if found and float(found[1]) <= now}
        exist = await transaction.read(*(("EXISTS", self._keys.batch(*one)) for one in ids.items()))
        known = dict(zip(ids, exist, strict=True))
        claimed, free = [], places - sum(running.values())
        for tenant in tenants:
            if running.get(tenant, 0) >= free:
                continue
            if known.get(tenant):
                transaction.write("ZADD", self._keys.active_batches(tenant), now + again_ms, ids[tenant])
                claimed.append((tenant, ids[tenant]))
                free -= 1
            elif tenant in ids:
                transaction.write("ZREM", self._keys.active_batches(tenant), ids[tenant])
            transaction.call("refresh_batches", tenant, now, True)
        return claimed

    async def postpone(self, tenant: str, batch_id: str, again_ms: int) -> None:
        """Make a claimed batch due after `again_ms`, unless it has become due since its claim."""

        async def attempt(transaction: Transaction) -> None:
            (due,) = await transaction.read(("ZSCORE", self._keys.active_batches(tenant), batch_id))
            now = transaction.now_ms
            if float(due or 0) > now:
                transaction.call("set_batch_due", tenant, batch_id, now + again_ms, now)

        await self._transact(attempt, when_full=True)

    async def commit(self, batch: Batch, update: BatchUpdate, again_ms: int | None) -> bool:
        """Commit one step, due again after `again_ms` (None: the batch has ended); False if `batch` is outdated.

        The count of its failures begins again, unless the update sets it.
        """
        name = self._keys.batch(batch.tenant, batch.id)

        async def attempt(transaction: Transaction) -> bool:
            ((revision, status),) = await transaction.read(("HMGET", name, "rev", "status"))
            if revision is None or int(revision) != batch.rev:
                return False
            self._write_update(transaction, batch, update)
            if again_ms is None:
                await self._end(transaction, batch, str(update.set.get("status", status)))
            else:
                now = transaction.now_ms
                transaction.call("set_batch_due", batch.tenant, batch.id, now + again_ms, now)
            return True

        return await self._transact(attempt, when_full=True)

    def _write_update(self, transaction: Transaction, batch: Batch, update: BatchUpdate) -> None:
        tenant, name = batch.tenant, self._keys.batch(batch.tenant, batch.id)
        fields = {"step_failures": 0, **update.set} if batch.step_failures else update.set
        transaction.write("HINCRBY", name, "rev", 1)
        if fields:
            transaction.write("HSET", name, *(item for pair in fields.items() for item in pair))
        for counter, number in (update.add or {}).items():
            transaction.write("HINCRBY", name, counter, number)
        for line in update.accepted:
            transaction.write("SETBIT", self._keys.batch_accepted(tenant, batch.id), line, 1)
        rows = [(file_id, part_row(part)) for file_id, part in update.parts]
        for file_id, row in rows:
            transaction.write("RPUSH", self._keys.file_parts(tenant, file_id), row)
        transaction.call("count_footprint", tenant, "", parts_size([row for _, row in rows]))

    async def _end(self, transaction: Transaction, batch: Batch, status: str) -> None:
        tenant, now, keep_ms = batch.tenant, transaction.now_ms, self._settings.file_retention_s * 1000
        transaction.write("ZREM", self._keys.active_batches(tenant), batch.id)
        transaction.call("refresh_batches", tenant, now)
        transaction.call("add_to_outbox", f"{now}-{batch.id}", batch.id, tenant, f"batch.{status}")
        transaction.write("PEXPIRE", self._keys.batch(tenant, batch.id), keep_ms)
        transaction.write("PEXPIRE", self._keys.batch_accepted(tenant, batch.id), keep_ms)
        file = self._keys.file(tenant, batch.input_file_id)
        if (await transaction.read(("EXISTS", file)))[0]:
            transaction.write("HINCRBY", file, "live", -1)

    async def accepted_lines(self, batch: Batch, first: int, count: int) -> list[bool]:
        """Return for the lines `first` to `first + count - 1` whether each became a job."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for line in range(first, first + count):
                    pipe.getbit(self._keys.batch_accepted(batch.tenant, batch.id), line)
                return [bool(bit) for bit in await pipe.execute()]

    async def known_jobs(self, job_ids: Sequence[str]) -> list[bool]:
        """Return for each job whether it exists."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.exists(self._keys.job(job_id))
                return [bool(exists) for exists in await pipe.execute()]


def _no_batch(batch_id: str) -> NotFound:
    return NotFound(f"no such batch: {batch_id[:64]}", param="id")


def _later(replies: Sequence[Sequence[str]], now_ms: int) -> list[str]:
    """Return the members with a time after any delay, from members and times."""
    (rows,) = replies
    return [one for one, at in zip(rows[::2], rows[1::2], strict=True) if float(at) > now_ms + LONGEST_MS]


def _batch(tenant: str, batch_id: str, row: Mapping[str, str]) -> Batch:
    decoded = {name: json.loads(row[name]) for name in ("metadata", "errors") if name in row}
    return Batch.model_validate({**row, **decoded, "id": batch_id, "tenant": tenant})
