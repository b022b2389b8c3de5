"""`make soak`: many jobs through real processes; then memory, keys, connections and files are back where they were.

Runs redis-server, the API, two workers with a stub engine, and the chores. After a warm-up with the same load and its
retention, the start is measured; then come the jobs and their retention, and the end is measured until it is within 5%
of the start. Fails if it is not within `--settle-s`. `--jobs 5000 --signatures 200` is a short form.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from chaos.processes import MODELS, Cluster

from soak.load import Load, bodies
from soak.usage import usage

WORKERS = 2
RETENTION_S = 20
TOLERANCE = 0.05
SLACK = {"KB resident": 8192, "KB": 2048, "open files": 8, "connections": 8, "keys": 20, "streams": 4, "files": 4}
"""Differences that do not count: buffers and pools, which are small at any load."""
SETTINGS = {
    "retention_s": RETENTION_S,
    "input_retention_s": RETENTION_S,
    "idempotency_s": RETENTION_S,
    "lease_ms": 30_000,
    "max_queued_jobs_per_tenant": 100_000,
}
_MODEL = """[[model]]
id = "{model}"
source = "not-loaded/{model}"
max_batch = 8
window_ms = 200
[model.defaults]
width = 16
height = 16
steps = 2
[model.limits]
min_side = 16
max_side = 512
multiple_of = 4
"""


def within(name: str, start: float, end: float) -> bool:
    """Return whether a figure has returned to its start."""
    slack = next(size for unit, size in SLACK.items() if unit in name)
    return end <= start * (1 + TOLERANCE) or end - start <= slack


def table(start: dict[str, float], peak: dict[str, float], end: dict[str, float]) -> Iterator[str]:
    yield "| what | start | most seen | end | |"
    yield "|---|---|---|---|---|"
    for name, first in start.items():
        mark = "" if within(name, first, end[name]) else "not back"
        yield f"| {name} | {first:,.0f} | {peak[name]:,.0f} | {end[name]:,.0f} | {mark} |"


class Soak:
    """One stack and its load."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._random = random.Random(seed)
        self._load = Load(f"http://127.0.0.1:{cluster.api_port}", seed, lambda text: print(f"  {text}", flush=True))
        self.peak: dict[str, float] = {}

    async def run(self, options: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
        """Return the figures at the start and at the end."""
        load, rng = self._load, self._random
        await self._cluster.start(WORKERS, chores=True)
        try:
            await load.ready(WORKERS)
            print(f"warm-up: {options.warm_up:,} jobs", flush=True)
            await load.run(bodies(MODELS, options.warm_up, options.signatures, rng), options.stop_s)
            start = await self._settled(None, options.settle_s)
            print(f"{options.jobs:,} jobs of {options.signatures:,} signatures", flush=True)
            watching = asyncio.create_task(self._watch())
            began = time.monotonic()
            submitted = await load.run(bodies(MODELS, options.jobs, options.signatures, rng), options.stop_s)
            print(f"{submitted:,} jobs ended after {time.monotonic() - began:.0f} s; streams: {dict(load.ends)}")
            watching.cancel()
            return start, await self._settled(start, options.settle_s)
        finally:
            await load.close()

    async def _settled(self, start: dict[str, float] | None, most_s: float) -> dict[str, float]:
        """Return the figures when the jobs are deleted and, with `start`, all figures are back; else the last ones."""
        deadline = time.monotonic() + most_s
        while True:
            await asyncio.sleep(5)
            figures = await self._look()
            empty = figures["storage: files"] == 0
            if empty and start is None:
                await asyncio.sleep(RETENTION_S)  # for what ends without a sweep
                return await self._look()
            if start is not None and all(within(name, first, figures[name]) for name, first in start.items()):
                return figures
            if time.monotonic() > deadline:
                return figures

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(5)

    async def _look(self) -> dict[str, float]:
        figures = await asyncio.to_thread(usage, self._cluster)
        self.peak = {name: max(value, self.peak.get(name, 0.0)) for name, value in figures.items()}
        return figures


def main(argv: list[str] | None = None) -> int:
    """Run the soak, print its table, and return 1 if a figure has not returned."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=60_000,
        help="jobs before the start is measured; by then as many jobs and results are kept as later",
    )
    parser.add_argument("--signatures", type=int, default=2_000)
    parser.add_argument("--stop-s", type=float, default=1200.0, help="submit no more after this time")
    kept = "time for the figures to return; the chores keep their results for 300 s"
    parser.add_argument("--settle-s", type=float, default=450.0, help=kept)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="fusequeue-soak-"))
    cluster = Cluster(folder, step_s=0.001, **SETTINGS)
    cluster.journal = Path("/dev/null")
    (folder / "models.toml").write_text("\n".join(_MODEL.format(model=model) for model in MODELS), "utf-8")
    soak = Soak(cluster, options.seed)
    try:
        start, end = asyncio.run(soak.run(options))
    finally:
        cluster.close()
    print("\n".join(table(start, soak.peak, end)), flush=True)
    if all(within(name, first, end[name]) for name, first in start.items()):
        shutil.rmtree(folder)
        return 0
    print(f"logs: {folder}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
