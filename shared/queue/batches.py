"""State of OpenAI batches and metadata of their files in Redis; the content of files is in storage."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

from shared.batch import Batch, File, Part
from shared.errors import Conflict, NotFound
from shared.queue.api_keys import quota_exceeded
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.script_arguments import RunningBatches
from shared.runtime.clock import id_time_ms

MAX_BATCHES = 1000
"""Batches of one tenant, including ended ones until they expire."""

MAX_FILES = 1000
"""Files of one tenant."""

_FILES_READ = 500  # at once, to find those of one purpose
_UPLOAD_MS = 3_600_000  # an unfinished upload is deleted after this time


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
        result = await self._scripts.create_batch(
            batch.tenant, batch.id, batch.input_file_id, MAX_BATCHES, batch.created_at_ms, *pairs
        )
        if result == "no_file":
            raise NotFound(f"no such file of purpose batch: {batch.input_file_id[:64]}", param="input_file_id")
        if result == "full":
            raise Conflict(f"too many batches: a tenant has at most {MAX_BATCHES}; ended ones expire")

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
        if not await self._scripts.cancel_batch(tenant, batch_id):
            raise _no_batch(batch_id)

    async def due(self, places: int, running: Mapping[str, int], again_ms: int) -> list[tuple[str, str]]:
        """Claim due batches for a process with `places`, of which tenants use `running`; return tenants and ids.

        At most one of a tenant, in turns of tenants: one takes a place while it holds fewer than are free. Each batch
        is due again after `again_ms`.
        """
        rows = await self._scripts.due_batches(places, again_ms, *starmap(RunningBatches, running.items()))
        return [(tenant, batch_id) for tenant, _, batch_id in (row.partition("|") for row in rows)]

    async def postpone(self, tenant: str, batch_id: str, again_ms: int) -> None:
        """Make a claimed batch due after `again_ms`, unless it has become due since its claim."""
        await self._scripts.postpone_batch(tenant, batch_id, again_ms)

    async def commit(self, batch: Batch, update: BatchUpdate, again_ms: int | None) -> bool:
        """Commit one step, due again after `again_ms` (None: the batch has ended); False if `batch` is outdated.

        The count of its failures begins again, unless the update sets it.
        """
        fields = {"step_failures": 0, **update.set} if batch.step_failures else update.set
        wire = {
            "set": [str(item) for pair in fields.items() for item in pair],
            "add": [str(item) for pair in (update.add or {}).items() for item in pair],
            "accepted": list(update.accepted),
            "parts": [[file_id, f"{part.bytes} {part.name}"] for file_id, part in update.parts],
        }
        keep_ms = self._settings.file_retention_s * 1000
        return await self._scripts.commit_batch(
            batch.tenant, batch.id, batch.rev, again_ms, keep_ms=keep_ms, update=json.dumps(wire)
        )

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


class Files(QueueComponent):
    async def begin(self, tenant: str, file_id: str, size: int) -> None:
        """Count the `size` bytes of an upload, and schedule the deletion of its parts unless `put` follows in an hour.

        Raises `Conflict` at `MAX_FILES`, `QuotaExceeded`.
        """
        result = await self._scripts.begin_file(tenant, file_id, MAX_FILES, _UPLOAD_MS, size)
        if result == "full":
            raise Conflict(f"too many files: a tenant has at most {MAX_FILES}; delete some first")
        if result != "ok":
            raise quota_exceeded(tenant, result)

    async def begin_output(self, tenant: str, file_id: str, within_ms: int) -> None:
        """Schedule the deletion of a batch's output file unless `put` follows within `within_ms`; no limit applies."""
        await self._scripts.begin_file(tenant, file_id, 10**9, within_ms, 0)

    async def put(self, file: File, parts: Sequence[Part] | None = None) -> None:
        """Publish a file; `parts` is None when they were committed one by one.

        Raises `Conflict` if its upload took too long.
        """
        names = [] if parts is None else [f"{part.bytes} {part.name}" for part in parts]
        id_ms = id_time_ms(file.id) or file.created_at_ms
        values = (file.filename, file.purpose, file.bytes, file.created_at_ms, id_ms, file.expires_at_ms)
        if not await self._scripts.put_file(file.tenant, file.id, *values, *names):
            raise Conflict("the upload took too long and was given up; upload the file again")

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
        await self._scripts.forget_file(tenant, file_id, unfinished=True)

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
        result = await self._scripts.forget_file(tenant, file_id, unfinished=False)
        if result == "none":
            raise _no_file(file_id)
        if result == "live":
            raise Conflict(f"file is the input of a running batch: {file_id}; cancel the batch first", param="id")


def _no_batch(batch_id: str) -> NotFound:
    return NotFound(f"no such batch: {batch_id[:64]}", param="id")


def _no_file(file_id: str) -> NotFound:
    return NotFound(f"no such file: {file_id[:64]}", param="id")


def _batch(tenant: str, batch_id: str, row: Mapping[str, str]) -> Batch:
    decoded = {name: json.loads(row[name]) for name in ("metadata", "errors") if name in row}
    return Batch.model_validate({**row, **decoded, "id": batch_id, "tenant": tenant})


def _file(tenant: str, file_id: str, row: Mapping[str, str]) -> File:
    return File.model_validate({**row, "id": file_id, "tenant": tenant})
