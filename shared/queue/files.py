"""What Redis knows of files: their names, parts and ends. Their bytes are in storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.errors import Conflict, NotFound
from shared.protocols.openai.files import File, Part
from shared.queue.client import QueueComponent, translated

MAX_FILES = 1000
"""Files of one tenant that are kept at once."""

_UPLOAD_MS = 3_600_000  # an upload that was begun and never finished is swept after this


class Files(QueueComponent):
    async def begin(self, tenant: str, file_id: str, within_ms: int | None = None) -> None:
        """Have what is stored under the file's prefix removed, unless `put_file` follows: within an hour of an upload.

        `within_ms` is for what we write ourselves, however many files there are.
        """
        most, life_ms = (MAX_FILES, _UPLOAD_MS) if within_ms is None else (10**9, within_ms)
        if await self._client.run("file_begin", tenant, file_id, most, life_ms) == "full":
            raise Conflict(f"a tenant has at most {MAX_FILES} files; delete some first")

    async def put(self, file: File, parts: Sequence[Part] | None = None) -> None:
        """Make a file known; `parts` of None are those that were put there one by one."""
        names = [] if parts is None else [f"{part.bytes} {part.name}" for part in parts]
        fields: list[str | int] = [file.filename, file.purpose, file.bytes, file.created_at_ms, file.expires_at_ms]
        await self._client.run("file_put", file.tenant, file.id, *fields, *names)

    async def get(self, tenant: str, file_id: str) -> File:
        """Return what is known of a file, or raise `NotFound`."""
        with translated():
            fields = await self._redis.hgetall(self._keys.file(tenant, file_id))
        if not fields:
            raise no_file(file_id)
        return _file(tenant, file_id, fields)

    async def parts(self, tenant: str, file_id: str) -> list[Part]:
        """Return the parts of a file, in order."""
        with translated():
            rows = await self._redis.lrange(self._keys.parts(tenant, file_id), 0, -1)
        pairs = [row.partition(" ") for row in rows]
        return [Part(name, int(size)) for size, _, name in pairs]

    async def page(self, tenant: str, after: str | None, limit: int, newest_first: bool) -> tuple[list[File], bool]:
        """Return up to `limit` of a tenant's files, and whether there are more; `after` is the last one seen."""
        index = self._keys.files(tenant)
        with translated():
            start = 0
            if after is not None:
                rank = await (self._redis.zrevrank if newest_first else self._redis.zrank)(index, after)
                if rank is None:
                    raise no_file(after)
                start = rank + 1
            ids = await self._redis.zrange(index, start, start + limit, desc=newest_first)
            async with self._redis.pipeline(transaction=False) as pipe:
                for file_id in ids[:limit]:
                    pipe.hgetall(self._keys.file(tenant, file_id))
                rows = await pipe.execute() if ids else []
        found = [_file(tenant, one, row) for one, row in zip(ids[:limit], rows, strict=True) if row]
        return found, len(ids) > limit

    async def forget(self, tenant: str, file_id: str) -> None:
        """Forget a file, and have its parts removed at the next sweep; raises `NotFound`, or `Conflict` in use."""
        answer = await self._client.run("file_forget", tenant, file_id)
        if answer == "none":
            raise no_file(file_id)
        if answer == "live":
            raise Conflict(f"file {file_id} is the input of a batch that has not ended; cancel that first", param="id")


def no_file(file_id: str) -> NotFound:
    return NotFound(f"there is no file {file_id[:64]}, or no longer", param="id")


def _file(tenant: str, file_id: str, fields: Mapping[str, str]) -> File:
    return File(
        id=file_id,
        tenant=tenant,
        filename=fields["filename"],
        purpose="batch_output" if fields["purpose"] == "batch_output" else "batch",
        bytes=int(fields["bytes"]),
        created_at_ms=int(fields["created"]),
        expires_at_ms=int(fields["expires"]),
        live=int(fields.get("live", 0)),
    )
