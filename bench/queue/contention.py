"""`python -m bench.queue.contention`: many workers claim the jobs of one signature at the same moment.

All workers claim eight jobs until the queue is empty, from one process over one connection to a private redis-server,
so the time between their commands is as short as it can be. A claim that finds its jobs taken chooses again; `empty`
are claims that returned nothing while jobs were queued. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common import record
from bench.queue.filling import MODEL, JobSource, Level, fill
from bench.queue.private_redis import private_redis
from shared.config.settings import Settings
from shared.queue import Queue, QueueClient

SLOTS = 8
WORKERS = (1, 16, 100)


@dataclass(frozen=True)
class ContentionFigures:
    """What `workers` needed for all jobs: claims and jobs a second, scripts a claim, and claims without a job."""

    workers: int
    claims_s: float
    jobs_s: float
    scripts_per_claim: float
    empty: int


async def measure(url: str, workers: int, jobs: int) -> ContentionFigures:
    limit = 2 * jobs
    settings = Settings(
        redis_url=url, namespace=f"bench{workers}", max_queued_jobs=limit, max_queued_jobs_per_tenant=limit
    )
    client = QueueClient.connect(settings)
    queue, scripts, left, claims, empty = Queue(client), Counter[str](), jobs, 0, 0
    await fill(queue, JobSource(seed=1), Level(jobs, 1, 10), 0)
    run = client.run

    async def counted(name: str, *args: str | float) -> Any:
        scripts[name] += 1
        return await run(name, *args)

    client.run = counted  # type: ignore[method-assign]

    async def work(worker: str) -> None:
        nonlocal left, claims, empty
        while left > 0:
            found = await queue.claims.claim(worker, [MODEL], SLOTS)
            left, claims, empty = left - len(found), claims + bool(found), empty + (not found and left > 0)

    started = time.monotonic()
    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        for number in range(workers):
            group.create_task(work(f"worker-{number}"))
    seconds = time.monotonic() - started
    await queue.close()
    rates = (round(claims / seconds, 1), round(jobs / seconds, 1), round(scripts.total() / claims, 2))
    return ContentionFigures(workers, *rates, empty)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=4_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as folder, private_redis(Path(folder)) as url:
        figures = [asdict(asyncio.run(measure(url, workers, options.jobs))) for workers in WORKERS]
    record.report(options.json, {"results": figures}, jobs=options.jobs, slots=SLOTS)


if __name__ == "__main__":
    main()
