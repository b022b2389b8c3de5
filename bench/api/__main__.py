"""`python -m bench.api`: requests per second of one API process, relative to FastAPI routes that do nothing.

Starts a redis-server without persistence, an API process (`python -m api`) and a process of plain routes, which
validate the same body. In turns the same requests go to both: submits and reads over 1, 8 and 32 connections. No worker
runs. Bulk submits are lines per second. CPU times are those of the processes per request. Figures are medians over the
turns; `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.api.http_load import ClosedLoop, LoopRate, Request, get, post, run
from bench.common import record
from bench.common.service import launched, until_answered
from bench.cost import Milliseconds, cpu_ms
from bench.queue.private_redis import private_redis
from cli.up.ports import reserved_port

HOST = "127.0.0.1"
CONNECTIONS = (1, 8, 32)
BULK_LINES = 1_000
BULK_CONNECTIONS = 2
LIMITS = {"max_queued_jobs": "10000000", "max_queued_jobs_per_tenant": "10000000"}


@dataclass
class Compared:
    """Rates and CPU times of one kind of request over so many connections: of the API and the plain route, by turn."""

    api: list[LoopRate]
    plain: list[LoopRate]
    cpu: list[Milliseconds]
    plain_cpu: list[Milliseconds]

    def figures(self) -> dict[str, Any]:
        """Return the medians; the ratio is that within each turn."""
        ratios = [api.per_second / plain.per_second for api, plain in zip(self.api, self.plain, strict=True)]
        return {
            "per_second": round(statistics.median(rate.per_second for rate in self.api)),
            "plain_per_second": round(statistics.median(rate.per_second for rate in self.plain)),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_of_turns": [round(ratio, 3) for ratio in ratios],
            "p50_ms": round(statistics.median(rate.p50_ms for rate in self.api), 2),
            "p99_ms": round(statistics.median(rate.p99_ms for rate in self.api), 2),
            "p99_of_p50": round(statistics.median(rate.p99_ms / rate.p50_ms for rate in self.api), 2),
            "cpu_ms": {
                "api": round(statistics.median(one["api"] for one in self.cpu), 3),
                "redis": round(statistics.median(one["redis"] for one in self.cpu), 3),
                "plain route": round(statistics.median(one["others"] for one in self.plain_cpu), 3),
            },
        }


def submits() -> Callable[[], Request]:
    """Return a source of submits, each of another job."""
    numbers = itertools.count()

    def request() -> Request:
        at = next(numbers)
        body = {"model": "demo", "prompt": f"a red circle on a blue ground, left, {at}", "seed": at, "steps": 8}
        return post("/v1/jobs", json.dumps(body).encode())

    return request


def bulk_submits() -> Callable[[], Request]:
    """Return a source of bulk submits."""
    numbers = itertools.count()

    def request() -> Request:
        lines = (
            json.dumps({"model": "demo", "prompt": f"a red circle, {at}", "seed": at, "steps": 8})
            for at in itertools.islice(numbers, BULK_LINES)
        )
        return post("/v1/jobs:bulk", "\n".join(lines).encode(), "application/x-ndjson")

    return request


def read(port: int) -> Callable[[], Request]:
    """Return a source of reads of one queued job."""
    body = {"model": "demo", "prompt": "a red circle on a blue ground, left"}
    job = httpx.post(f"http://{HOST}:{port}/v1/jobs", json=body, trust_env=False).raise_for_status().json()
    request = get(f"/v1/jobs/{job['id']}")
    return lambda: request


@contextmanager
def serving(folder: Path, module: str, *arguments: str, **settings: str) -> Iterator[int]:
    """Run a server module with its port as the last argument, and yield the port once it is ready."""
    command = [sys.executable, "-m", module, *arguments]
    log = folder / f"{module}.log"
    with reserved_port(HOST, 8750) as port, launched([*command, str(port)], log, None, **settings):
        until_answered(lambda: httpx.get(f"http://{HOST}:{port}/readyz", timeout=5, trust_env=False), log)
        yield port


def timed(port: int, load: ClosedLoop) -> tuple[LoopRate, Milliseconds]:
    """Run a loop, and return its rate and the CPU time of each part per request."""
    before = cpu_ms()
    rate = asyncio.run(run(port, load))
    return rate, {part: (total - before.get(part, 0.0)) / rate.requests for part, total in cpu_ms().items()}


def measure(api: int, plain: int, turns: int, seconds: float) -> dict[str, Any]:
    """Return the figures of all kinds of requests."""
    kinds = {"submit": submits(), "read": read(api)}
    compared = {(kind, count): Compared([], [], [], []) for kind in kinds for count in CONNECTIONS}
    bulk: list[float] = []
    for turn in range(turns + 1):  # the first one, in which connections and caches begin, does not count
        for (kind, count), rates in compared.items():
            load = ClosedLoop(count, seconds if turn else min(seconds, 1.0), kinds[kind])
            servers = ((api, rates.api, rates.cpu), (plain, rates.plain, rates.plain_cpu))
            for port, into, costs in sorted(servers, reverse=turn % 2 == 1):
                rate, cost = timed(port, load)
                if turn:
                    into.append(rate)
                    costs.append(cost)
        lines = asyncio.run(run(api, ClosedLoop(BULK_CONNECTIONS, seconds, bulk_submits()))).per_second * BULK_LINES
        if turn:
            bulk.append(lines)
            ratios = {
                f"{kind} {count}": rates.figures()["ratio_of_turns"][-1] for (kind, count), rates in compared.items()
            }
            print(f"turn {turn}: {ratios}, bulk {lines:,.0f} lines/s", flush=True)
    figures = {f"{kind}, {count} connections": rates.figures() for (kind, count), rates in compared.items()}
    return figures | {"bulk_lines_per_second": round(statistics.median(bulk))}


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as name, private_redis(Path(name)) as redis_url:
        folder = Path(name)
        settings = {"redis_url": redis_url, "namespace": "bench", "storage_dir": str(folder / "storage"), **LIMITS}
        models = str(record.ROOT / "models.toml")
        with (
            serving(folder, "api", "--port", models=models, **settings) as api,
            serving(folder, "bench.api.plain_routes") as plain,
        ):
            figures = measure(api, plain, options.turns, options.seconds)
    record.report(options.json, figures, turns=options.turns, seconds=options.seconds)


if __name__ == "__main__":
    main()
