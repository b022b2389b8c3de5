"""Jobs for the queue's benchmark: which tenants use which signatures, and filling the queue with them."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from shared.errors import FusequeueError
from shared.job import Job
from shared.job_fields import Priority
from shared.queue import Queue, Submission
from shared.queue.jobs import MAX_SUBMISSIONS
from shared.runtime.clock import make_id, now_ms

MODEL = "demo"
PRIORITIES = (Priority.INTERACTIVE, *[Priority.STANDARD] * 8, Priority.BULK)
PROMPT = "a red circle on a blue ground, watercolour, soft light, wide angle, no text, " * 2
CONCURRENT_SUBMITS = 2
KEPT_IDS = 2000


@dataclass(frozen=True)
class Level:
    """A size of the queue: queued jobs, the signatures and tenants that they spread over."""

    jobs: int
    signatures: int
    tenants: int

    def __str__(self) -> str:
        return f"{self.jobs:,} jobs, {self.signatures:,} signatures, {self.tenants:,} tenants"


class JobSource:
    """Makes jobs: half of them of popular signatures, 1 in 100, which all tenants use; the others have four tenants."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._template = Job(
            id="job",
            tenant="tenant",
            created_at_ms=0,
            model=MODEL,
            width=1024,
            height=1024,
            prompt=PROMPT,
            seed=7,
            steps=28,
            guidance_scale=4.0,
        )

    def job(self, level: Level) -> Submission:
        """Return a new job of the level's signatures and tenants."""
        rng = self._random
        popular = max(1, level.signatures // 100)
        if rng.random() < 0.5:
            sig, tenant = rng.randrange(popular), rng.randrange(level.tenants)
        else:
            sig = rng.randrange(level.signatures)
            tenant = (7 * sig + rng.randrange(4)) % level.tenants
        at = now_ms()
        changes = {
            "id": make_id("job", at, rng.getrandbits(80)),
            "tenant": f"tenant-{tenant}",
            "created_at_ms": at,
            "priority": rng.choice(PRIORITIES),
        }
        return Submission(self._template.model_copy(update=changes), f"{MODEL}-{sig:032x}", window_ms=0, max_batch=8)


async def fill(queue: Queue, source: JobSource, level: Level, queued: int) -> list[str]:
    """Submit jobs until `level.jobs` are queued, showing the progress; return the ids of some of them."""
    missing = level.jobs - queued
    every, shown = max(1, missing // KEPT_IDS), 0
    ids: list[str] = []
    starts = iter(range(0, missing, MAX_SUBMISSIONS))

    async def submit_chunks() -> None:
        nonlocal shown
        for start in starts:
            jobs = [source.job(level) for _ in range(min(MAX_SUBMISSIONS, missing - start))]
            await submit(queue, jobs)
            ids.extend(one.job.id for at, one in enumerate(jobs, start) if at % every == 0)
            if start - shown >= 50_000:
                shown = start
                print(f"  {queued + start:,} of {level.jobs:,}", flush=True)

    await asyncio.gather(*(submit_chunks() for _ in range(CONCURRENT_SUBMITS)))
    return ids


async def submit(queue: Queue, jobs: list[Submission]) -> None:
    """Submit jobs, all of which must be accepted."""
    for result in await queue.jobs.submit(jobs):
        if isinstance(result, FusequeueError):
            raise RuntimeError(f"a job was refused: {result.message}")
