"""`python -m bench.queue.later`: jobs for later, queued by the heartbeats of idle workers when they are due.

Half of the jobs are due at one moment, the others spread over the ten seconds from then on, of 100 signatures and 20
tenants. How late each is queued follows from the times of Redis: when it was due, and the id of its event. Meanwhile a
client pings Redis all the time: how long a ping takes is how long the scripts block it. `--json FILE` saves the
figures.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.common import record
from bench.queue.filling import MODEL, JobSource, Level, submit
from bench.queue.private_redis import private_redis
from shared.config.settings import Settings
from shared.queue import Queue, QueueClient
from shared.queue.jobs import MAX_SUBMISSIONS
from shared.queue.records import WorkerInfo

WORKERS = (1, 10)
HEARTBEAT_S = 0.5
FIRST_DUE_S = 5.0
SPREAD_MS = 10_000


@dataclass(frozen=True)
class LaterFigures:
    """Milliseconds by which jobs were late, those due at one moment (`burst`) and the others; `early` ones; the longest
    ping before the first was due, and afterwards."""

    workers: int
    jobs: int
    early: int
    burst_latest_ms: int
    spread_median_ms: int
    spread_latest_ms: int
    idle_ping_ms: float
    longest_ping_ms: float


async def measure(url: str, workers: int, jobs: int) -> LaterFigures:
    limit = 2 * jobs
    settings = Settings(
        redis_url=url, namespace=f"bench{workers}", max_queued_jobs=limit, max_queued_jobs_per_tenant=limit
    )
    queue = Queue(QueueClient.connect(settings))
    due_ms = await _submit(queue, jobs)
    running = [asyncio.create_task(_beat(queue, f"worker-{number}", number / workers)) for number in range(workers)]
    first_ms = min(due_ms.values())
    idle_ping_ms = await _ping_until(queue, first_ms - 100)
    longest_ping_ms = await _ping_until(queue, first_ms + SPREAD_MS + 3000)
    for one in running:
        one.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    late = await _lateness(queue, due_ms)
    await queue.close()
    burst = [late[job_id] for job_id, at in due_ms.items() if at == first_ms]
    spread = sorted(late[job_id] for job_id, at in due_ms.items() if at != first_ms)
    early = sum(ms < 0 for ms in late.values())
    middle = spread[len(spread) // 2]
    pings = (round(idle_ping_ms, 1), round(longest_ping_ms, 1))
    return LaterFigures(workers, len(late), early, max(burst), middle, spread[-1], *pings)


async def _submit(queue: Queue, jobs: int) -> dict[str, int]:
    """Submit jobs for later; return when each is due."""
    source, level, due_ms = JobSource(seed=1), Level(jobs, 100, 20), dict[str, int]()
    first_ms = await queue.client.now_ms() + round(1000 * FIRST_DUE_S) + jobs // 2
    for start in range(0, jobs, MAX_SUBMISSIONS):
        made = []
        for number in range(start, min(jobs, start + MAX_SUBMISSIONS)):
            one = source.job(level)
            at_ms = first_ms + (number * SPREAD_MS // jobs + 1 if number % 2 else 0)
            made.append(replace(one, job=one.job.model_copy(update={"not_before_ms": at_ms})))
            due_ms[one.job.id] = at_ms
        await submit(queue, made)
    return due_ms


async def _beat(queue: Queue, worker: str, offset: float) -> None:
    """Send the heartbeats of an idle worker."""
    await asyncio.sleep(HEARTBEAT_S * offset)
    while True:
        if await queue.workers.heartbeat(WorkerInfo(id=worker, models=(MODEL,))):
            await queue.maintenance.queue_due(HEARTBEAT_S)
        await asyncio.sleep(HEARTBEAT_S)


async def _ping_until(queue: Queue, until_ms: int) -> float:
    """Ping Redis until its time is `until_ms`; return the milliseconds of the longest ping."""
    longest_s = 0.0
    while await queue.client.now_ms() < until_ms:
        started = time.monotonic()
        await queue.client.redis.ping()
        longest_s = max(longest_s, time.monotonic() - started)
        await asyncio.sleep(0.001)
    return 1000 * longest_s


async def _lateness(queue: Queue, due_ms: dict[str, int]) -> dict[str, int]:
    """Return how many milliseconds after it was due each job was queued."""
    events = await queue.client.redis.xrange(queue.client.redis_keys.events)
    queued = {fields["job"]: int(entry.partition("-")[0]) for entry, fields in events}
    submitted = len(events) - len(due_ms)
    if submitted != len(due_ms):
        raise RuntimeError(f"{len(due_ms) - submitted} jobs are not queued, or twice")
    return {job_id: queued[job_id] - at for job_id, at in due_ms.items()}


def main(argv: list[str] | None = None) -> list[LaterFigures]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as folder, private_redis(Path(folder)) as url:
        figures = [asyncio.run(measure(url, workers, options.jobs)) for workers in options.workers]
    record.report(options.json, {"results": [asdict(one) for one in figures]}, jobs=options.jobs)
    return figures


if __name__ == "__main__":
    main()
