"""Previews of running jobs: small images that workers publish, for a minute."""

from __future__ import annotations

import base64
from collections.abc import Collection
from dataclasses import dataclass

from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.transactions import Transaction

MAX_PREVIEW_BYTES = 64 * 1000
PREVIEWS_KEPT_S = 60


@dataclass(frozen=True)
class Preview:
    """Preview `number` of image `index`, both from 0; `b64` is a file of the format `OutputFormat.preview_format`."""

    index: int
    number: int
    b64: str

    @property
    def name(self) -> str:
        return _name(self.index, self.number)


class Previews(QueueComponent):
    async def put(self, job_id: str, epoch: int, index: int, number: int, data: bytes) -> bool:
        """Store a preview of a current claim for `PREVIEWS_KEPT_S`; False if the claim is no longer current.

        Raises `ValueError` above `MAX_PREVIEW_BYTES`.
        """
        if len(data) > MAX_PREVIEW_BYTES:
            raise ValueError(f"preview too large: {len(data)} bytes; at most {MAX_PREVIEW_BYTES}")
        file = base64.b64encode(data).decode("ascii")
        name = self._keys.previews(job_id)

        async def attempt(transaction: Transaction) -> bool:
            ((state, current),) = await transaction.read(("HMGET", self._keys.job(job_id), "state", "epoch"))
            if state != "running" or int(current) != epoch:
                return False
            transaction.write("HSET", name, _name(index, number), file)
            transaction.write("EXPIRE", name, PREVIEWS_KEPT_S)
            return True

        return await self._transact(attempt)

    async def get(self, job_id: str, known: Collection[str] = ()) -> list[Preview]:
        """Return the job's previews except those named in `known`, ordered by number."""
        name = self._keys.previews(job_id)
        with translated():
            new = [field for field in await self._redis.hkeys(name) if field not in known]
            files = await self._redis.hmget(name, new) if new else []
        previews = [
            Preview(int(field.partition("|")[0]), int(field.partition("|")[2]), file)
            for field, file in zip(new, files, strict=True)
            if file is not None
        ]
        return sorted(previews, key=lambda preview: (preview.number, preview.index))


def _name(index: int, number: int) -> str:
    return f"{index}|{number}"
