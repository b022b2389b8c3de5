"""Dead letters: jobs that were given up, kept for an operator to inspect."""

from __future__ import annotations

from collections.abc import Sequence

from shared.job import JobRecord
from shared.queue.client import QueueComponent, translated
from shared.queue.records import DeadLetter, record


class DeadLetters(QueueComponent):
    async def page(self, after: str | None = None, limit: int = 100) -> tuple[list[DeadLetter], str | None]:
        """Return dead letters, newest first, and what to pass as `after` for more; None: no more."""
        with translated():
            rank = None if after is None else await self._redis.zrevrank(self._keys.dead_letters, after)
            start = 0 if rank is None else rank + 1
            ids = await self._redis.zrange(self._keys.dead_letters, start, start + limit, desc=True)
            more = len(ids) > limit
            ids = ids[:limit]
            letters = await self._read_letters(ids)
        return letters, ids[-1] if more else None

    async def count(self) -> int:
        """Return how many dead letters are kept."""
        with translated():
            return int(await self._redis.zcard(self._keys.dead_letters))

    async def get(self, letter: str) -> DeadLetter | None:
        """Return one dead letter, None where there is none."""
        with translated():
            return next(iter(await self._read_letters([letter])), None)

    async def _read_letters(self, ids: Sequence[str]) -> list[DeadLetter]:
        if not ids:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for letter in ids:
                pipe.hgetall(self._keys.dead_letter(letter))
                pipe.hgetall(self._keys.job(letter))
            rows = await pipe.execute()
        return [
            _letter(letter, note, record(job))
            for letter, note, job in zip(ids, rows[0::2], rows[1::2], strict=True)
            if note
        ]

    async def redrive(self, job_id: str) -> bool:
        """Put a dead letter's job back in line, its attempts and losses forgotten; False where there is none."""
        return await self._scripts.redrive_dead_letter(job_id)

    async def purge(self, job_id: str) -> bool:
        """Delete a dead letter, and the record of its job; False where there is none."""
        return await self._scripts.purge_dead_letter(job_id)


def _letter(letter: str, note: dict[str, str], job: JobRecord | None) -> DeadLetter:
    return DeadLetter(
        id=letter,
        at_ms=int(note.get("at", 0)),
        reason=note.get("reason", ""),
        detail=note.get("detail", ""),
        record=job,
    )
