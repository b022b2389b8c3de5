"""Metadata of files in Redis; their content is in storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.batch import File, Part
from shared.errors import Conflict, NotFound
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.quotas import parts_size
from shared.queue.transactions import Transaction
from shared.runtime.clock import id_time_ms

MAX_FILES = 1000
"""Files of one tenant."""

_FILES_READ = 500  # at once, to find those of one purpose
_UPLOAD_MS = 3_600_000  # an unfinished upload is deleted after this time


class Files(QueueComponent):
    async def begin(self, tenant: str, file_id: str, size: int) -> None:
        """Count the `size` bytes of an upload, and schedule the deletion of its parts unless `put` follows in an hour.

        Raises `Conflict` at `MAX_FILES`, `QuotaExceeded`.
        """
        await self._begin(tenant, file_id, size, _UPLOAD_MS, MAX_FILES)

    async def begin_output(self, tenant: str, file_id: str, within_ms: int) -> None:
        """Schedule the deletion of a batch's output file unless `put` follows within `within_ms`; no limit applies.

        Its parts are counted when they are committed.
        """
        await self._begin(tenant, file_id, 0, within_ms, None)

    async def _begin(self, tenant: str, file_id: str, size: int, within_ms: int, most: int | None) -> None:
        parts = self._keys.file_parts(tenant, file_id)

        async def attempt(transaction: Transaction) -> None:
            count, known = await transaction.read(("ZCARD", self._keys.files(tenant)), ("EXISTS", parts))
            if most is not None and count >= most:
                raise Conflict(f"too many files: a tenant has at most {MAX_FILES}; delete some first")
            if size and not known:
                reserved = f"{size} reserved"
                transaction.write("RPUSH", parts, reserved)
                transaction.add_size(tenant, parts_size([reserved]))
            transaction.write("ZADD", self._keys.retention, transaction.now_ms + within_ms, _row(tenant, file_id))

        await self._transact(attempt)

    async def put(self, file: File, parts: Sequence[Part] | None = None) -> None:
        """Publish a file; `parts` is None when they were committed one by one.

        Raises `Conflict` if its upload took too long.
        """
        rows = [part_row(part) for part in parts or ()]
        id_ms = id_time_ms(file.id) or file.created_at_ms  # that of a batch's output is earlier than `created_at_ms`
        fields = file.model_dump(include={"filename", "purpose", "bytes", "created_at_ms", "expires_at_ms"})
        name, retained = self._keys.file_parts(file.tenant, file.id), _row(file.tenant, file.id)

        async def attempt(transaction: Transaction) -> None:
            due, before = await transaction.read(("ZSCORE", self._keys.retention, retained), ("LRANGE", name, 0, -1))
            if rows and float(due or 0) <= transaction.now_ms:  # the parts can be in deletion already
                raise Conflict("the upload took too long and was given up; upload the file again")
            pairs = (item for pair in fields.items() for item in pair)
            transaction.write("HSET", self._keys.file(file.tenant, file.id), *pairs)
            if rows:
                transaction.write("DEL", name)
                transaction.write("RPUSH", name, *rows)
                transaction.call("count_footprint", file.tenant, parts_size(before), parts_size(rows))
            transaction.write("ZADD", self._keys.files(file.tenant), id_ms, file.id)
            transaction.write("ZADD", self._keys.retention, file.expires_at_ms, retained)

        await self._transact(attempt, when_full=True)

    async def get(self, tenant: str, file_id: str) -> File:
        """Return a file, or raise `NotFound`."""
        with translated():
            row = await self._redis.hgetall(self._keys.file(tenant, file_id))
        if not row:
            raise _no_file(file_id)
        return _file(tenant, file_id, row)

    async def is_being_stored(self, tenant: str, file_id: str) -> bool:
        """Return whether a file's upload has begun and not ended; also of a killed process, for an hour."""
        with translated():
            names = (self._keys.file(tenant, file_id), self._keys.file_parts(tenant, file_id))
            published, stored = [bool(await self._redis.exists(name)) for name in names]
        return stored and not published

    async def abandon(self, tenant: str, file_id: str) -> None:
        """End an upload that has failed: its bytes no longer count, and the next sweep deletes its parts."""
        await self._forget(tenant, file_id, unfinished=True)

    async def parts(self, tenant: str, file_id: str) -> list[Part]:
        """Return the parts of a file, in order."""
        with translated():
            rows = await self._redis.lrange(self._keys.file_parts(tenant, file_id), 0, -1)
        return [Part(name, int(size)) for size, _, name in (row.partition(" ") for row in rows)]

    async def page(
        self, tenant: str, after: str | None, limit: int, newest_first: bool, purpose: str | None = None
    ) -> tuple[list[File], bool]:
        """Return up to `limit` files of a tenant, of one `purpose` if given, and whether there are more."""
        matching: list[File] = []
        cursor, rows = after, limit + 1 if purpose is None else _FILES_READ
        while len(matching) <= limit:  # one more than the page holds: there are more
            files, cursor = await self._read_page(tenant, cursor, rows, newest_first)
            matching += [file for file in files if purpose in (None, file.purpose)]
            rows = _FILES_READ
            if cursor is None:
                break
        return matching[:limit], len(matching) > limit

    async def _read_page(
        self, tenant: str, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[File], str | None]:
        """Return up to `limit` files, and the id after which the next ones come; None: there are no more."""
        ids, more = await self._ids_after(self._keys.files(tenant), after, limit, newest_first=newest_first)
        rows = await self._hashes(self._keys.file(tenant, file_id) for file_id in ids)
        files = [_file(tenant, file_id, row) for file_id, row in zip(ids, rows, strict=True) if row]
        return files, ids[-1] if more else None

    async def forget(self, tenant: str, file_id: str) -> None:
        """Delete a file; the next sweep deletes its parts. Raises `NotFound`, or `Conflict` while a batch reads it."""
        if not await self._forget(tenant, file_id, unfinished=False):
            raise _no_file(file_id)

    async def _forget(self, tenant: str, file_id: str, *, unfinished: bool) -> bool:
        """Delete a published file, or an `unfinished` one; False if there is none."""
        name, parts = self._keys.file(tenant, file_id), self._keys.file_parts(tenant, file_id)

        async def attempt(transaction: Transaction) -> bool:
            published, live, rows = await transaction.read(
                ("EXISTS", name), ("HGET", name, "live"), ("LRANGE", parts, 0, -1)
            )
            if bool(published) is unfinished:
                return False
            if int(live or 0) > 0:
                raise Conflict(f"file is the input of a running batch: {file_id}; cancel the batch first", param="id")
            transaction.call("count_footprint", tenant, parts_size(rows), "")
            transaction.write("DEL", name, parts)
            transaction.write("ZREM", self._keys.files(tenant), file_id)
            transaction.write("ZADD", self._keys.retention, transaction.now_ms, _row(tenant, file_id))
            return True

        return await self._transact(attempt, when_full=True)


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"no such file: {file_id[:64]}", param="id")


def _row(tenant: str, file_id: str) -> str:
    """Return a file's row in the retention."""
    return f"file|{tenant}|{file_id}|"


def part_row(part: Part) -> str:
    """Return a part of a file as Redis has it."""
    return f"{part.bytes} {part.name}"


def _file(tenant: str, file_id: str, row: Mapping[str, str]) -> File:
    return File.model_validate({**row, "id": file_id, "tenant": tenant})
