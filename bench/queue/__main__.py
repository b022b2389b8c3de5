"""`python -m bench.queue`: what each operation costs Redis while a million jobs of ten thousand signatures are queued.

Fills a private redis-server in steps. At each step a worker's and a client's operations run in rounds that leave the
number of queued jobs as it was, and the server itself counts the microseconds of each script and the commands it runs:
the client's work and the network are not included, and the number of commands does not depend on what else runs on the
machine. The ratios are those of the last step to the first one. `--jobs 20000` ends earlier, `--json FILE` saves.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bench import record
from bench.queue.filling import JobSource, Level, fill
from bench.queue.private_redis import MeasuredClient, ScriptCost, private_redis
from bench.queue.rounds import Measurements, Rounds
from shared.config.settings import Settings
from shared.queue import Queue
from shared.queue.client import connect_blocking, connect_commands

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


async def measure(url: str, steps: list[Level], rounds: int, save: Callable[[Figures], None]) -> Figures:
    """Fill the queue step by step, and return the figures of each step; `save` gets those so far after each."""
    limit = 2 * steps[-1].jobs
    settings = Settings(
        redis_url=url, namespace="bench", max_queued_jobs=limit, max_queued_jobs_per_tenant=limit, lease_ms=600_000
    )
    redis, blocking = connect_commands(url), connect_blocking(url)
    client = MeasuredClient(redis, namespace=settings.namespace, settings=settings, blocking=blocking)
    queue, source = Queue(client), JobSource(seed=1)
    figures: Figures = []
    queued = 0
    try:
        empty = await client.used_bytes()
        for level in steps:
            started = time.monotonic()
            ids = await fill(queue, source, level, queued)
            filled_s, used = time.monotonic() - started, await client.used_bytes()
            print(f"{level}: filled in {filled_s:.0f} s, {used / 2**20:.0f} MiB", flush=True)
            measured = await Rounds(queue, client, source, level, ids).run(rounds)
            queued = level.jobs
            claims = spread(measured.costs["claim"])
            print(f"  a claim: {claims['p50_us']:,} us, p99 {claims['p99_us']:,}", flush=True)
            figures.append(
                {
                    "jobs": level.jobs,
                    "signatures": level.signatures,
                    "tenants": level.tenants,
                    "bytes_per_job": round((used - empty) / level.jobs),
                    **summary(measured),
                }
            )
            save(figures)
    finally:
        await queue.close()
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
    """Yield the rows of a table: an operation's median and p99 at each step, and the ratios of the p99s."""
    yield "| operation | " + " | ".join(f"{one['jobs']:,} / {one['signatures']:,}" for one in figures) + " | ratio |"
    yield "|---" * (len(figures) + 2) + "|"
    for name in figures[-1]["operations"]:
        rows = [one["operations"].get(name) for one in figures]
        yield f"| {name} | " + " | ".join(map(cell, rows)) + f" | {ratio(rows[0], rows[-1])} |"
    yield "| bytes per job | " + " | ".join(f"{one['bytes_per_job']:,}" for one in figures) + " | |"


def cell(row: Mapping[str, int] | None) -> str:
    if row is None:
        return ""
    return f"{row['p50_us']:,}, {row['p99_us']:,} ({row['max_commands']:,})"


def ratio(first: Mapping[str, int] | None, last: Mapping[str, int] | None) -> str:
    return "" if not first or not last else f"{last['p99_us'] / max(1, first['p99_us']):.1f}"


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

    with tempfile.TemporaryDirectory(prefix="fusequeue-queue-") as folder, private_redis(Path(folder)) as url:
        figures = asyncio.run(measure(url, steps, options.rounds, save))
    print("\nRedis microseconds of a script by queued jobs / signatures: median, p99 (most commands in a run)\n")
    for row in table(figures):
        print(row)
    return figures


if __name__ == "__main__":
    main()
