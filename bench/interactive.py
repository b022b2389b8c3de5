"""`python -m bench.interactive`: latency of interactive jobs with and without bulk jobs in the remaining slots.

Starts `fusequeue up` (Redis, API, one worker with one torch thread, storage in a folder) with a small Stable Diffusion
1.x, at most eight rows. Interactive clients request an image, wait for it, think, and request the next; in turns
without other jobs and with more queued bulk jobs than can finish. Latencies are from request to response; a step is a
full forward of bulk jobs only, from the worker's `/metrics` right after the interactive clients have stopped. Figures
are medians over the turns. `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bench.common import record
from bench.common.clients import LightClient, light_client, scrape
from bench.common.service import MODEL, ROWS, SIDE, small_service
from bench.engine.runner import GUIDANCE, prompt
from bench.over_http import bodies
from cli.up.ports import reserved_port

STEPS = 8  # of an interactive job; bulk jobs have 6, 8 and 10
POLL_S = 0.05
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class InteractiveLoad:
    """Interactive clients with a mean pause of `think_s`; `jobs` per turn of all clients together."""

    clients: int
    jobs: int
    think_s: float
    bulk: int


@dataclass(frozen=True)
class TurnFigures:
    """One turn: seconds of each interactive job and of a step; bulk images per second."""

    solo_s: list[float]
    with_bulk_s: list[float]
    step_s: float
    bulk_with_interactive: float
    bulk_only: float

    @property
    def increase_s(self) -> float:
        """Increase of the p95 by bulk jobs."""
        return percentile(self.with_bulk_s, 0.95) - percentile(self.solo_s, 0.95)


def percentile(values: list[float], share: float) -> float:
    """Return the interpolated percentile of `values`; `share` is 0 to 1."""
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


class InteractiveTurn:
    """Measures turns against a server and its worker's metrics."""

    def __init__(self, http: LightClient, port: int, load: InteractiveLoad) -> None:
        self._http = http
        self._port = port
        self._load = load

    async def interactive(self, seed: int) -> list[float]:
        """Run the interactive clients and return the seconds of each job."""
        numbers, latencies = iter(range(self._load.jobs)), list[float]()
        async with asyncio.TaskGroup() as clients:
            for number in range(self._load.clients):
                clients.create_task(self._client(random.Random(f"{seed}-{number}"), numbers, latencies))
        return latencies

    async def _client(self, rng: random.Random, numbers: Iterator[int], latencies: list[float]) -> None:
        for number in numbers:
            await asyncio.sleep(rng.expovariate(1 / self._load.think_s))
            body = {"model": MODEL, "prompt": prompt(number), "seed": number, "guidance_scale": GUIDANCE}
            body |= {"steps": STEPS, "priority": "interactive"}
            started = time.perf_counter()
            job = await self._http.post("/v1/jobs", body, Prefer="wait=60")
            latencies.append(time.perf_counter() - started)
            if job["status"] != "succeeded":
                raise RuntimeError(str(job))

    @asynccontextmanager
    async def bulk(self, seed: int) -> AsyncIterator[None]:
        """Submit bulk jobs, and cancel the rest at the end."""
        lines = [json.dumps({**body, "priority": "bulk"}) for body in islice(bodies(seed), self._load.bulk)]
        headers = {"Content-Type": "application/x-ndjson"}
        accepted = await self._http.request("POST", "/v1/jobs:bulk", data="\n".join(lines), headers=headers)
        ids = [json.loads(line)["id"] for line in accepted.splitlines()]
        await self._until_ended(ROWS)
        yield
        succeeded = 0
        for job_id in reversed(ids):
            succeeded += (await self._http.post(f"/v1/jobs/{job_id}/cancel", {}))["status"] == "succeeded"
            if succeeded > 2 * ROWS:
                break  # all earlier ones have ended

    async def _until_ended(self, count: int) -> None:
        """Wait until `count` more jobs have ended."""
        target = await self._ended() + count
        deadline = time.monotonic() + TIMEOUT_S
        while await self._ended() < target:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._load.bulk} bulk jobs were too few; raise --bulk")
            await asyncio.sleep(POLL_S)

    async def _ended(self) -> float:
        return (await scrape(self._port)).get("fusequeue_jobs_ended_total", 0.0)

    async def run(self, number: int) -> TurnFigures:
        """Measure with and without bulk jobs, and bulk jobs only."""
        solo_s = await self.interactive(number) if number % 2 else []
        async with self.bulk(number):
            before, started = await self._ended(), time.perf_counter()
            with_bulk_s = await self.interactive(number)
            seconds = time.perf_counter() - started
            bulk_with_interactive = (await self._ended() - before - len(with_bulk_s)) / seconds
            step_s, bulk_only = await self._bulk_only()
        solo_s = solo_s or await self.interactive(number)
        return TurnFigures(solo_s, with_bulk_s, step_s, bulk_with_interactive, bulk_only)

    async def _bulk_only(self) -> tuple[float, float]:
        """Return the seconds per step and the images per second of bulk jobs only."""
        first, started = await scrape(self._port), time.perf_counter()
        await self._until_ended(2 * ROWS)
        last, seconds = await scrape(self._port), time.perf_counter() - started
        delta = {name: last[name] - value for name, value in first.items()}
        step_s = delta["fusequeue_forward_seconds_sum"] / delta["fusequeue_forward_seconds_count"]
        return step_s, delta["fusequeue_jobs_ended_total"] / seconds


def figures(turns: list[TurnFigures]) -> dict[str, Any]:
    """Return the medians in milliseconds and images per second."""

    def median_ms(seconds: Iterable[float]) -> float:
        return round(1000 * statistics.median(seconds), 1)

    shares = {"p50": 0.5, "p95": 0.95}
    return {
        "interactive_solo_ms": {
            name: median_ms(percentile(turn.solo_s, share) for turn in turns) for name, share in shares.items()
        },
        "interactive_with_bulk_ms": {
            name: median_ms(percentile(turn.with_bulk_s, share) for turn in turns) for name, share in shares.items()
        },
        "p95_increase_ms": median_ms(turn.increase_s for turn in turns),
        "one_step_ms": median_ms(turn.step_s for turn in turns),
        "p95_increase_steps": round(statistics.median(turn.increase_s / turn.step_s for turn in turns), 2),
        "bulk_images_per_second": {
            "with_interactive": round(statistics.median(turn.bulk_with_interactive for turn in turns), 2),
            "bulk_only": round(statistics.median(turn.bulk_only for turn in turns), 2),
        },
        "turns": [
            {"p95_increase_ms": round(1000 * turn.increase_s, 1), "one_step_ms": round(1000 * turn.step_s, 1)}
            for turn in turns
        ],
    }


async def measure(url: str, port: int, load: InteractiveLoad, turns: int) -> dict[str, Any]:
    """Warm up with a few jobs and measure all turns."""
    async with light_client(url) as http:
        warm_up = InteractiveTurn(http, port, InteractiveLoad(load.clients, 2 * load.clients, load.think_s, 4 * ROWS))
        async with warm_up.bulk(0):
            await warm_up.interactive(0)
        measured, turn = list[TurnFigures](), InteractiveTurn(http, port, load)
        for number in range(turns):
            measured.append(await turn.run(number + 1))
            print(figures(measured), flush=True)
    return figures(measured)


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2, help="interactive clients")
    parser.add_argument("--jobs", type=int, default=100, help="interactive jobs in each turn, with and without bulk")
    parser.add_argument("--think-ms", type=float, default=250.0, help="mean pause of a client")
    parser.add_argument("--bulk", type=int, default=900, help="bulk jobs queued in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    load = InteractiveLoad(options.clients, options.jobs, options.think_ms / 1000, options.bulk)
    with reserved_port("127.0.0.1", 9100) as port, small_service(worker_port=str(port)) as (url, _):
        measured = asyncio.run(measure(url, port, load, options.turns))
    counts = {"clients": load.clients, "jobs_per_turn": load.jobs, "turns": options.turns, "threads": 1}
    more = {"think_ms": options.think_ms, "bulk_jobs": load.bulk, "side": SIDE, "rows": ROWS, "steps": STEPS}
    record.report(options.json, measured, **counts, **more)


if __name__ == "__main__":
    main()
