"""`python -m bench.beside`: how much slower interactive jobs get when bulk jobs fill the seats that they leave.

Starts `fusequeue up` (Redis, API, one worker with one torch thread, storage in a folder) on a small Stable Diffusion
1.x, at most eight rows. Interactive clients ask for a picture, wait for it, think, and ask for the next; in turns with
nobody beside them and with more bulk jobs in line than are made in that time. Latencies are from the request to the
answer; a step is a full forward of bulk jobs alone, as the worker's own `/metrics` tell it, right after the interactive
clients have gone. Figures are medians over the turns. `--json FILE` keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from bench import record, shapes
from bench.clients import REQUEST_TIMEOUT_S
from bench.engine import GUIDANCE, prompt
from bench.idle import scrape
from bench.over_http import MODEL, ROWS, SIDE, bodies, served
from cli.up.environment import first_free_port

STEPS = 8  # of an interactive job; bulk jobs have 6, 8 and 10
LOOK_S = 0.05
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Load:
    """Interactive `clients`, each thinking for `think_s` on average; `jobs` a turn, all of them together."""

    clients: int
    jobs: int
    think_s: float
    bulk: int


@dataclass(frozen=True)
class Seen:
    """What was seen in one turn: the seconds of each interactive job and of a step, bulk pictures a second."""

    alone_s: list[float]
    beside_s: list[float]
    step_s: float
    bulk_beside: float
    bulk_alone: float

    @property
    def raised_s(self) -> float:
        """By how much bulk jobs raised the p95."""
        return percentile(self.beside_s, 0.95) - percentile(self.alone_s, 0.95)


def percentile(values: list[float], share: float) -> float:
    """Return the value that a `share` of `values` is at most, interpolated."""
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


class Turn:
    """One turn: a server to ask, its worker's metrics, and how much."""

    def __init__(self, http: httpx.AsyncClient, port: int, load: Load) -> None:
        self._http = http
        self._port = port
        self._load = load

    async def interactive(self, seed: int) -> list[float]:
        """Run the interactive clients, and return the seconds that each of their jobs took."""
        numbers, latencies = iter(range(self._load.jobs)), list[float]()
        async with asyncio.TaskGroup() as clients:
            for number in range(self._load.clients):
                clients.create_task(self._client(random.Random(f"{seed}-{number}"), numbers, latencies))
        return latencies

    async def _client(self, chance: random.Random, numbers: Iterator[int], latencies: list[float]) -> None:
        for number in numbers:
            await asyncio.sleep(chance.expovariate(1 / self._load.think_s))
            body = {"model": MODEL, "prompt": prompt(number), "seed": number, "guidance_scale": GUIDANCE}
            body |= {"steps": STEPS, "priority": "interactive"}
            began = time.perf_counter()
            answer = await self._http.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
            latencies.append(time.perf_counter() - began)
            if answer.raise_for_status().json()["status"] != "succeeded":
                raise RuntimeError(answer.text)

    @asynccontextmanager
    async def bulk(self, seed: int) -> AsyncIterator[None]:
        """Keep bulk jobs in line for as long as this lasts, and cancel what is left."""
        lines = [json.dumps({**body, "priority": "bulk"}) for body in islice(bodies(seed), self._load.bulk)]
        head = {"Content-Type": "application/x-ndjson"}
        answer = await self._http.post("/v1/jobs:bulk", content="\n".join(lines), headers=head)
        ids = [json.loads(line)["id"] for line in answer.raise_for_status().text.splitlines()]
        await self._until_ended(ROWS)
        yield
        made = 0
        for one in reversed(ids):
            answer = await self._http.post(f"/v1/jobs/{one}/cancel")
            made += answer.raise_for_status().json()["status"] == "succeeded"
            if made > 2 * ROWS:
                break  # none before them is left

    async def _until_ended(self, count: int) -> None:
        """Wait until so many jobs more have ended."""
        until = await self._ended() + count
        give_up = time.monotonic() + PATIENCE_S
        while await self._ended() < until:
            if time.monotonic() > give_up:
                raise RuntimeError(f"{self._load.bulk} bulk jobs were too few: give more with --bulk")
            await asyncio.sleep(LOOK_S)

    async def _ended(self) -> float:
        return (await scrape(self._port)).get("fusequeue_jobs_ended_total", 0.0)

    async def take(self, number: int) -> Seen:
        """Measure both ways, and then bulk jobs alone."""
        alone_s = await self.interactive(number) if number % 2 else []
        async with self.bulk(number):
            before, began = await self._ended(), time.perf_counter()
            beside_s = await self.interactive(number)
            seconds = time.perf_counter() - began
            bulk_beside = (await self._ended() - before - len(beside_s)) / seconds
            step_s, bulk_alone = await self._bulk_alone()
        alone_s = alone_s or await self.interactive(number)
        return Seen(alone_s, beside_s, step_s, bulk_beside, bulk_alone)

    async def _bulk_alone(self) -> tuple[float, float]:
        """Return the seconds of a step, and pictures a second, of bulk jobs that have the worker to themselves."""
        first, began = await scrape(self._port), time.perf_counter()
        await self._until_ended(2 * ROWS)
        last, seconds = await scrape(self._port), time.perf_counter() - began
        grown = {name: last[name] - value for name, value in first.items()}
        step_s = grown["fusequeue_forward_seconds_sum"] / grown["fusequeue_forward_seconds_count"]
        return step_s, grown["fusequeue_jobs_ended_total"] / seconds


def figures(turns: list[Seen]) -> dict[str, Any]:
    """Return what is told and kept, milliseconds and pictures a second."""

    def median_ms(seconds: Iterable[float]) -> float:
        return round(1000 * statistics.median(seconds), 1)

    shares = {"p50": 0.5, "p95": 0.95}
    return {
        "interactive_alone_ms": {
            name: median_ms(percentile(turn.alone_s, share) for turn in turns) for name, share in shares.items()
        },
        "interactive_beside_bulk_ms": {
            name: median_ms(percentile(turn.beside_s, share) for turn in turns) for name, share in shares.items()
        },
        "p95_raised_by_ms": median_ms(turn.raised_s for turn in turns),
        "one_step_ms": median_ms(turn.step_s for turn in turns),
        "raised_by_steps": round(statistics.median(turn.raised_s / turn.step_s for turn in turns), 2),
        "bulk_pictures_a_second": {
            "beside": round(statistics.median(turn.bulk_beside for turn in turns), 2),
            "alone": round(statistics.median(turn.bulk_alone for turn in turns), 2),
        },
        "turns": [
            {"p95_raised_by_ms": round(1000 * turn.raised_s, 1), "one_step_ms": round(1000 * turn.step_s, 1)}
            for turn in turns
        ],
    }


async def measure(url: str, port: int, load: Load, turns: int) -> dict[str, Any]:
    """Return the figures after a few jobs that warm up."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as http:
        warming = Turn(http, port, Load(load.clients, 2 * load.clients, load.think_s, 4 * ROWS))
        async with warming.bulk(0):
            await warming.interactive(0)
        seen, turn = list[Seen](), Turn(http, port, load)
        for number in range(turns):
            seen.append(await turn.take(number + 1))
            print(figures(seen), flush=True)
    return figures(seen)


def main(line: list[str] | None = None) -> None:
    """Measure, tell, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2, help="interactive ones")
    parser.add_argument("--jobs", type=int, default=100, help="interactive ones in each turn, both ways")
    parser.add_argument("--think-ms", type=float, default=250.0, help="mean pause of a client")
    parser.add_argument("--bulk", type=int, default=900, help="bulk jobs in line in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(line)
    load = Load(chosen.clients, chosen.jobs, chosen.think_ms / 1000, chosen.bulk)
    shapes.hush()
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        folder = Path(scratch)
        shapes.save("sd", folder / "model")
        port = first_free_port("127.0.0.1", 9100, lambda _: None, "metrics")
        with served(folder / "model", folder, worker_port=str(port)) as url:
            told = asyncio.run(measure(url, port, load, chosen.turns))
    if chosen.json:
        more = {"think_ms": chosen.think_ms, "bulk_jobs": load.bulk, "side": SIDE, "rows": ROWS, "steps": STEPS}
        record.write(
            chosen.json, told, clients=load.clients, jobs_a_turn=load.jobs, turns=chosen.turns, threads=1, **more
        )


if __name__ == "__main__":
    main()
