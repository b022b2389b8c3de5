"""Dead letters: jobs that were given up, and entries that cannot be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.records import DeadLetter, page_after, record


@dataclass(frozen=True)
class LetterFilter:
    """Which dead letters are meant; times are in ms, the first is inclusive. An entry without a job has no tenant."""

    tenant: str | None = None
    model: str | None = None
    reason: str | None = None
    after_ms: int | None = None
    before_ms: int | None = None

    def matches(self, letter: DeadLetter) -> bool:
        job = None if letter.record is None else letter.record.job
        return (
            self.tenant in (None, job and job.tenant)
            and self.model in (None, job and job.model)
            and self.reason in (None, letter.reason)
            and (self.after_ms or 0) <= letter.at_ms < (self.before_ms or math.inf)
        )


EVERY = LetterFilter()


class DeadLetters(QueueComponent):
    async def page(
        self, after: str | None = None, limit: int = 100, *, newest_first: bool = True, matching: LetterFilter = EVERY
    ) -> tuple[list[DeadLetter], str | None]:
        """Return those of the next `limit` dead letters that match, and the cursor `after` of the next page, if any."""
        await self._scripts.count_dead_letters()  # forgets those that have expired
        with translated():
            page, cursor = await page_after(
                self._redis, self._keys.dead_letters, after, limit, newest_first=newest_first
            )
        letters = await self._read([letter_id for letter_id, _ in page])
        return list(filter(matching.matches, letters)), cursor

    async def count(self) -> int:
        return await self._scripts.count_dead_letters()

    async def added(self) -> int:
        """Return how many dead letters there have been in all."""
        with translated():
            return int(await self._redis.get(self._keys.dead_letters_added) or 0)

    async def get(self, letter_id: str) -> DeadLetter | None:
        return next(iter(await self._read([letter_id])), None)

    async def _read(self, ids: Sequence[str]) -> list[DeadLetter]:
        rows = await self._hashes(name(one) for one in ids for name in (self._keys.dead_letter, self._keys.job))
        return [
            DeadLetter(letter_id, int(row.get("at", 0)), row.get("reason", ""), row.get("detail", ""), record(job))
            for letter_id, row, job in zip(ids, rows[0::2], rows[1::2], strict=True)
            if row
        ]

    async def redrive(self, job_id: str) -> bool:
        """Requeue the job of a dead letter without its attempts, losses and deadline; False if there is none."""
        return await self._scripts.redrive_dead_letter(job_id)

    async def purge(self, job_id: str) -> bool:
        """Delete a dead letter and its job's record; False if there is none."""
        return await self._scripts.purge_dead_letter(job_id)
