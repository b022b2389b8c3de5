"""Retention: what has expired, and the deletion of records whose objects storage no longer holds."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from shared.batch import file_prefix
from shared.errors import Conflict
from shared.inputs import adapter_store
from shared.queue.checkpoints import checkpoint_prefix
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.maintenance.dependents import UNFINISHED, unfinished_dependents
from shared.queue.quotas import parts_size
from shared.queue.records import ExpiredItem
from shared.queue.redis_keys import RedisKeys
from shared.queue.transactions import Command, Transaction

NEEDED_AGAIN_MS = 600_000
"""After which a job that others start from is looked at again."""

_PAGES = 100
"""Scripts of one call, each of which can find only rows that are postponed."""


class EndedJob(NamedTuple):
    """What the deletion of a job that has ended needs; `size` as `footprint.lua` counts it, empty for nothing.

    `place` is its batch and, after a slash, its group; both can be empty.
    """

    id: str
    tenant: str
    place: str
    size: str

    @classmethod
    async def read(cls, transaction: Transaction, keys: RedisKeys, job_id: str) -> EndedJob | None:
        """Return a job, or None if it is unknown or has not ended."""
        (row,) = await transaction.read(("HMGET", keys.job(job_id), "state", "tenant", "batch", "size", "group"))
        state, tenant, batch, size, group = row
        if not state or not tenant or state in UNFINISHED:
            return None
        return cls(job_id, tenant, (batch or "") + (f"/{group}" if group else ""), size or "")

    def row(self, size: str | None = None) -> str:
        """Return its row in the retention, with its own size unless another one is given."""
        return f"job|{self.tenant}|{self.id}|{self.place}|{self.size if size is None else size}"

    def delete(self, transaction: Transaction, keys: RedisKeys) -> None:
        """Delete its record, its dead letter and the index of its children, and remove it from the other indexes."""
        transaction.write("DEL", keys.job(self.id), keys.dead_letter(self.id), keys.child_jobs(self.tenant, self.id))
        transaction.write("ZREM", keys.dead_letters, self.id)
        transaction.write("ZREM", keys.jobs(self.tenant), self.id)
        transaction.write("ZREM", keys.videos(self.tenant), self.id)
        batch, _, group = self.place.partition("/")
        if batch:
            transaction.write("ZREM", keys.batch_jobs(self.tenant, batch), self.id)
        if group:
            transaction.call("leave_group", self.tenant, group, self.id)

    def forget(self, transaction: Transaction, keys: RedisKeys, due_ms: int) -> None:
        """Delete the job; its objects are due for deletion at `due_ms`."""
        self.delete(transaction, keys)
        transaction.call("count_footprint", self.tenant, self.size, "")
        transaction.write("ZREM", keys.retention, self.row())
        transaction.write("ZADD", keys.retention, due_ms, self.row(""))


class Retention(QueueComponent):
    async def expired_items(self, limit: int = 100) -> list[ExpiredItem]:
        """Return items whose retention has ended; remove each from storage, then call `forget_item`.

        Inputs and adapters that a job uses, files that a batch reads and jobs from which others start are postponed; of
        an input that was stored again, only the old object is returned. A job that was deleted and submitted again is
        kept.
        """
        found: dict[str, ExpiredItem] = {}
        for _ in range(_PAGES):
            page = partial(self._expired, len(found), limit - 1)
            expired, more = await self._transact(page, when_full=True)
            found |= {item.row: item for item in expired}
            if not more or len(found) >= limit:
                break
        return list(found.values())

    async def _expired(self, first: int, last: int, transaction: Transaction) -> tuple[list[ExpiredItem], bool]:
        """Return what has expired of the rows with these ranks, and whether all of them were due: more can be."""
        ranks = ("ZRANGE", self._keys.retention, first, last, "WITHSCORES")
        (found,) = await transaction.read(ranks, fenced=False)
        due = zip(found[::2], found[1::2], strict=True)
        rows = [row for row, at in due if float(at) <= transaction.now_ms]
        places = await transaction.read(*(("ZSCORE", self._keys.retention, row) for row in rows))
        users = await transaction.read(*map(self._user_of, rows))
        jobs = [row.split("|")[2] for row in rows if row.startswith("job|")]
        needed = await unfinished_dependents(transaction, self._keys, jobs)
        again_ms = transaction.now_ms + 1000 * self._client.policy("input_retention_s")
        expired = []
        for row, place, user in zip(rows, places, users, strict=True):
            kind, tenant, item_id, stored, *size = row.split("|")
            if place is None or float(place) > transaction.now_ms:
                continue
            if kind in ("job", "checkpoint") and user[0] in UNFINISHED:
                transaction.write("ZREM", self._keys.retention, row)
                transaction.call("count_footprint", tenant, "".join(size), "")
                continue
            if kind == "job" and item_id in needed:
                transaction.write("ZADD", self._keys.retention, transaction.now_ms + NEEDED_AGAIN_MS, row)
                continue
            is_current = kind != "input" or not stored or (user[1] or stored) == stored
            if kind in ("input", "file", "adapter") and is_current and int(user[0] or 0) > 0:
                transaction.write("ZADD", self._keys.retention, again_ms, row)
                continue
            if kind == "input" and is_current:
                transaction.write("DEL", self._keys.input(tenant, item_id))
                transaction.write("ZREM", self._keys.inputs(tenant), item_id)
            if kind == "adapter":
                self._forget_adapter(transaction, tenant, item_id)
            expired.append(_expired_item(row))
        return expired, len(rows) > last - first

    def _user_of(self, row: str) -> Command:
        """Return the read of a job's state, or of how many jobs or batches use an item, and its present object."""
        kind, tenant, item_id, *_ = row.split("|")
        if kind in ("job", "checkpoint"):
            return "HMGET", self._keys.job(item_id), "state"
        name = {"input": self._keys.input, "file": self._keys.file, "adapter": self._keys.adapter}[kind]
        return "HMGET", name(tenant, item_id), "live", "object"

    async def forget_input(self, tenant: str, input_id: str) -> ExpiredItem | None:
        """Delete the record of an input; remove the item from storage, then call `forget_item`, or a sweep does both.

        Returns None for an unknown input; raises `Conflict` while a job that has not ended uses it.
        """
        name = self._keys.input(tenant, input_id)

        async def attempt(transaction: Transaction) -> ExpiredItem | None:
            ((ref, stored, size, live),) = await transaction.read(("HMGET", name, "ref", "object", "size", "live"))
            if ref is None:
                return None
            if int(live or 0) > 0:
                message = f"input {input_id} is used by a job that has not ended; cancel the job first"
                raise Conflict(message, param="id")
            row = f"input|{tenant}|{input_id}|{stored or ''}|{size or ''}"
            transaction.write("DEL", name)
            transaction.write("ZREM", self._keys.inputs(tenant), input_id)
            transaction.write("ZADD", self._keys.retention, transaction.now_ms, row)
            return _expired_item(row)

        return await self._transact(attempt, when_full=True)

    async def forget_item(self, item: ExpiredItem) -> None:
        """Delete the record and indexes of an item that storage no longer holds."""
        await self._transact(partial(self._forget_item, item.row), when_full=True)

    async def _forget_item(self, row: str, transaction: Transaction) -> None:
        kind, tenant, item_id, place, *sizes = row.split("|")
        size = "".join(sizes)
        (due,) = await transaction.read(("ZSCORE", self._keys.retention, row))
        if due is None or float(due) > transaction.now_ms:  # stored again in the meantime: a new row has its own time
            return
        transaction.write("ZREM", self._keys.retention, row)
        if kind == "job":
            (state,) = await transaction.read(("HGET", self._keys.job(item_id), "state"))
            if state not in UNFINISHED:  # otherwise it was submitted again in the meantime
                EndedJob(item_id, tenant, place, size).delete(transaction, self._keys)
        elif kind == "file":
            parts = self._keys.file_parts(tenant, item_id)
            size = parts_size((await transaction.read(("LRANGE", parts, 0, -1)))[0])
            transaction.write("DEL", self._keys.file(tenant, item_id), parts)
            transaction.write("ZREM", self._keys.files(tenant), item_id)
        elif kind == "adapter":
            self._forget_adapter(transaction, tenant, item_id)
        transaction.call("count_footprint", tenant, size, "")

    def _forget_adapter(self, transaction: Transaction, tenant: str, adapter_id: str) -> None:
        transaction.write("DEL", self._keys.adapter(tenant, adapter_id))
        transaction.write("ZREM", self._keys.adapters(tenant), adapter_id)
        transaction.write("ZREM", self._keys.all_adapters, f"{tenant}|{adapter_id}")

    async def postpone_item(self, item: ExpiredItem, again_ms: int) -> None:
        """Postpone an item that storage cannot delete: `expired_items` returns it again after `again_ms`."""
        at_ms = await self._client.now_ms() + again_ms
        with translated():
            await self._redis.zadd(self._keys.retention, {item.row: at_ms}, xx=True, gt=True)  # if it is still due


def _expired_item(row: str) -> ExpiredItem:
    kind, tenant, item_id, rest, *_ = row.split("|")
    if kind == "input":
        return ExpiredItem("input", tenant, item_id, f"inputs/{tenant}/{item_id}/{rest}", row)
    if kind == "file":
        return ExpiredItem("file", tenant, item_id, file_prefix(tenant, item_id), row)
    if kind == "checkpoint":
        return ExpiredItem("checkpoint", tenant, item_id, checkpoint_prefix(item_id), row)
    if kind == "adapter":
        return ExpiredItem("adapter", tenant, item_id, adapter_store.prefix(tenant, item_id), row)
    return ExpiredItem("job", tenant, item_id, f"jobs/{item_id}/", row)
