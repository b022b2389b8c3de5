"""`python -m bench.queue`: what each operation costs Redis while a million jobs of ten thousand signatures are queued.

Fills a private redis-server in steps. At each step a worker's and a client's operations run in rounds that leave the
number of queued jobs as it was, and the server itself counts the microseconds of each script and the commands it runs:
the client's work and the network are not included. The rounds take turns with rounds of the first step on a server of
its own: what else runs on the machine hardly changes their ratios. `--jobs 20000` ends earlier, `--json FILE` saves.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from bench.common import record
from bench.queue.filling import JobSource, Level, fill
from bench.queue.private_redis import MeasuredClient, ScriptCost, private_redis
from bench.queue.rounds import Measurements, Rounds
from shared.config.settings import Settings
from shared.queue import Queue
from shared.queue.connections.pools import connect_blocking, connect_commands

TURNS = 20

Figures: TypeAlias = list[dict[str, Any]]
FIRST = Level(100, 10, 10)
LEVELS = (
    FIRST,
    Level(1_000, 100, 100),
    Level(10_000, 1_000, 1_000),
    Level(100_000, 10_000, 2_000),
    Level(1_000_000, 10_000, 2_000),
)


def levels(jobs: int, signatures: int, tenants: int) -> list[Level]:
    """Return the steps up to `jobs`."""
    last = Level(jobs, signatures, tenants)
    return [level for level in LEVELS if level.jobs < jobs] + [last]


class GrowingQueue:
    """The queue of one redis-server, its level, and the rounds at this level."""

    def __init__(self, url: str, jobs: int) -> None:
        limit = 2 * jobs
        settings = Settings(
            redis_url=url, namespace="bench", max_queued_jobs=limit, max_queued_jobs_per_tenant=limit, lease_ms=600_000
        )
        redis, blocking = connect_commands(url), connect_blocking(url)
        self._client = MeasuredClient(redis, namespace=settings.namespace, settings=settings, blocking=blocking)
        self._queue, self._source = Queue(self._client), JobSource(seed=1)
        self._queued, self._empty_bytes = 0, 0

    async def grow(self, level: Level) -> Rounds:
        """Fill the queue up to `level`, print how long it took, and return its rounds after those to warm up."""
        started = time.monotonic()
        if not self._queued:
            self._empty_bytes = await self._client.used_bytes()
        ids = await fill(self._queue, self._source, level, self._queued)
        self._queued = level.jobs
        print(f"{level}: filled in {time.monotonic() - started:.0f} s", flush=True)
        rounds = Rounds(self._queue, self._client, self._source, level, ids)
        await rounds.warm_up()
        return rounds

    async def bytes_per_job(self) -> int:
        return round((await self._client.used_bytes() - self._empty_bytes) / self._queued)

    async def server(self) -> str:
        return await self._client.server()

    async def close(self) -> None:
        await self._queue.close()


async def measure(urls: list[str], steps: list[Level], rounds: int, save: Callable[[Figures], None]) -> Figures:
    """Measure each step in turns with the first one, which has a server of its own; `save` gets the figures so far.

    What else runs on the machine slows both down alike: a ratio within a step holds where one between steps does not.
    """
    reference, growing = (GrowingQueue(url, steps[-1].jobs) for url in urls)
    figures: Figures = []
    try:
        first = await reference.grow(steps[0])
        server = await growing.server()
        print(f"Redis {server}", flush=True)
        for level in steps:
            full = await growing.grow(level)
            bytes_per_job = await growing.bytes_per_job()
            first.measured.clear()
            for _ in range(TURNS):
                await first.run(-(-rounds // TURNS))
                await full.run(-(-rounds // TURNS))
            await first.overviews()
            await full.overviews()
            level_figures = {"jobs": level.jobs, "signatures": level.signatures, "tenants": level.tenants}
            costs = {**summary(full.measured), "first_step": summary(first.measured)["operations"]}
            figures.append({**level_figures, "redis": server, "bytes_per_job": bytes_per_job, **costs})
            print(f"  a claim: {cell(figures[-1], 'claim')}", flush=True)
            save(figures)
    finally:
        await reference.close()
        await growing.close()
    return figures


def summary(measured: Measurements) -> dict[str, Any]:
    """Return median, p99 and maximum of the microseconds and commands of each operation."""
    return {
        "jobs_per_claim": round(statistics.mean(measured.claimed), 2),
        "operations": {name: spread(costs) for name, costs in measured.costs.items() if costs},
    }


def spread(costs: list[ScriptCost]) -> dict[str, int]:
    micros, commands = sorted(one.microseconds for one in costs), sorted(one.commands for one in costs)
    return {
        "runs": len(costs),
        "p50_us": micros[len(micros) // 2],
        "p99_us": micros[-1 - len(micros) // 100],
        "max_us": micros[-1],
        "p50_commands": commands[len(commands) // 2],
        "max_commands": commands[-1],
    }


def table(figures: Figures) -> Iterator[str]:
    """Yield the rows of a table with a column for each step."""
    yield "| operation | " + " | ".join(f"{one['jobs']:,} / {one['signatures']:,}" for one in figures) + " |"
    yield "|---" * (len(figures) + 1) + "|"
    for name in figures[-1]["operations"]:
        yield f"| {name} | " + " | ".join(cell(one, name) for one in figures) + " |"
    yield "| bytes per job | " + " | ".join(f"{one['bytes_per_job']:,}" for one in figures) + " |"


def cell(figures: Mapping[str, Any], name: str) -> str:
    """Return an operation's median and p99, their ratios to the first step in the same turns, and most commands."""
    full, first = figures["operations"].get(name), figures["first_step"].get(name)
    if full is None or first is None:
        return ""
    ratios = ", ".join(f"{full[key] / max(1, first[key]):.1f}" for key in ("p50_us", "p99_us"))
    return f"{full['p50_us']:,}, {full['p99_us']:,} x {ratios} ({full['max_commands']:,})"


def main(argv: list[str] | None = None) -> Figures:
    """Measure, print, save and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--signatures", type=int, default=10_000)
    parser.add_argument("--tenants", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=500, help="of all operations, at each step")
    parser.add_argument("--json", type=Path, help="save the figures and their environment")
    options = parser.parse_args(argv)
    steps = levels(options.jobs, options.signatures, options.tenants)

    def save(figures: Figures) -> None:
        if options.json is not None:  # also what was measured before a run ended early
            record.write(options.json, {"steps": figures}, rounds=options.rounds)

    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="fusequeue-queue-")) for _ in range(2)]
        urls = [stack.enter_context(private_redis(Path(folder))) for folder in folders]
        figures = asyncio.run(measure(urls, steps, options.rounds, save))
    print("\nRedis microseconds of a script by queued jobs / signatures: median, p99 x their ratios to the first step")
    print("(most commands in a run)\n")
    for row in table(figures):
        print(row)
    return figures


if __name__ == "__main__":
    main()
