"""The round of a backfill: submit what has room, save what is finished, until nothing is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from cli.backfill.ledger import Entry, Ledger, Line
from cli.backfill.prompts import file_name
from fusequeue import AsyncClient, Job, NotFound

PIECE = 250  # lines of one request; that of a line is the same whatever is submitted with it
DOWNLOADS = 8  # at once
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 3.0


@dataclass(frozen=True)
class Options:
    """`in_flight` bounds the jobs that wait or run at one time; `tries` the jobs made for one line."""

    folder: Path
    in_flight: int = 1_000
    tries: int = 3


class Backfill:
    """One run over a ledger; calls `changed` whenever something is submitted or saved."""

    def __init__(self, client: AsyncClient, ledger: Ledger, options: Options, changed: Callable[[], None]) -> None:
        self._client = client
        self._ledger = ledger
        self._options = options
        self._changed = changed
        self._downloads = asyncio.Semaphore(DOWNLOADS)

    async def run(self) -> None:
        """Go on until every line is done or failed for good."""
        pause_s = SHORTEST_PAUSE_S
        while True:
            counts = self._ledger.counts()
            if not counts[Line.NEW] and not counts[Line.SUBMITTED]:
                return
            room = self._options.in_flight - counts[Line.SUBMITTED]
            if (
                counts[Line.NEW]
                and room >= min(PIECE, self._options.in_flight)
                and await self._submit(min(room, PIECE))
            ):
                continue
            began = time.monotonic()
            saved = await self._collect()
            # A look costs the service a page a hundred jobs: never more than a quarter of the time.
            pause_s = SHORTEST_PAUSE_S if saved else min(LONGEST_PAUSE_S, pause_s * 1.5)
            await asyncio.sleep(max(pause_s, 3 * (time.monotonic() - began)))

    async def _submit(self, most: int) -> int:
        """Submit the next lines under keys that are the same after a crash, and return how many were taken.

        Fresh lines go together. One that failed may come back at any time, and has a new key each: it goes by itself.
        """
        entries = self._ledger.entries(Line.NEW, most)
        fresh = [entry for entry in entries if not entry.tries]
        noted: list[tuple[int, str | None, str | None]] = []
        if fresh:
            noted += await self._submit_fresh(fresh)
        for entry in entries[len(fresh) :]:
            key = f"{self._ledger.run_id}-{entry.number}-{entry.tries}"
            job = await self._client.submit(**self._body(entry), idempotency_key=key)
            noted.append((entry.number, job.id, None))
        self._ledger.submitted(noted)
        self._changed()
        return len(noted)

    async def _submit_fresh(self, entries: Sequence[Entry]) -> list[tuple[int, str | None, str | None]]:
        """Submit lines, each at its own place under the key of its piece: what is in flight beside it may change."""
        noted: list[tuple[int, str | None, str | None]] = []
        for piece, lines in groupby(entries, lambda entry: entry.number // PIECE):
            bodies: list[dict[str, Any] | None] = [None] * PIECE
            for entry in lines:
                bodies[entry.number % PIECE] = self._body(entry)
            key = f"{self._ledger.run_id}-{piece}"
            async for result in self._client.submit_many(bodies, idempotency_key=key):
                error = result.error
                if error is None or not error.retryable:  # one that is refused for now stays as it is
                    told = None if error is None else f"{error.message} ({error.code})"
                    noted.append((piece * PIECE + result.line - 1, result.id, told))
        return noted

    def _body(self, entry: Entry) -> dict[str, Any]:
        return {"priority": "bulk", **entry.body, "batch_id": self._ledger.run_id}

    async def _collect(self) -> int:
        """Save the results of jobs that have ended; returns how many lines are settled by it."""
        waiting = {entry.job: entry for entry in self._ledger.entries(Line.SUBMITTED, self._options.in_flight)}
        if not waiting:
            return 0
        unseen = set(waiting)
        ended: list[Job] = []
        async with aclosing(self._client.jobs(batch_id=self._ledger.run_id)) as jobs:
            async for job in jobs:
                if job.id in unseen and job.ended:
                    ended.append(job)
                unseen.discard(job.id)
                if not unseen:
                    break
        await asyncio.gather(*(self._settle(waiting[job.id], job) for job in ended))
        for job_id in unseen:
            await self._settle_unlisted(waiting[job_id])
        return len(ended) + len(unseen)

    async def _settle(self, entry: Entry, job: Job) -> None:
        if job.status != "succeeded":
            failure = f"{job.error.message} ({job.error.code})" if job.error else job.status
            again = bool(job.error and job.error.retryable) and entry.tries + 1 < self._options.tries
            self._ledger.failed(entry.number, failure, again=again)
        else:
            async with self._downloads:
                name = file_name(entry.number, job.prompt)
                files = await self._client.download(job, self._options.folder, name=name)
            self._ledger.done(entry.number, [file.name for file in files])
        self._changed()

    async def _settle_unlisted(self, entry: Entry) -> None:
        """Settle a line whose job is in no list: it was deleted, or its retention is over."""
        try:
            job = await self._client.get(entry.job or "")
        except NotFound:
            self._ledger.failed(entry.number, "the job is gone: deleted, or kept no longer", again=False)
            self._changed()
            return
        if job.ended:
            await self._settle(entry, job)
