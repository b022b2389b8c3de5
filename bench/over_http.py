"""`python -m bench.over_http`: images per second over HTTP with many clients, relative to full batches in one process.

Starts `fusequeue up` (Redis, API, one worker with one torch thread, storage in a folder) with a small Stable Diffusion
1.x. Clients submit a job, wait for it, fetch its image and submit the next; the jobs have 6, 8 and 10 steps. In turns
with that, in this process and on the same weights: two request batchers, which call the pipeline for requests of equal
steps. Before and after each of the three the pipeline runs full batches at the mean steps. Figures are medians over
the turns. `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import record
from bench.common.clients import ClientLoad, Meter, WorkerWork, closed_loop, counted, light_client
from bench.common.service import MODEL, ROWS, SIDE, small_service
from bench.engine.comparison import call
from bench.engine.runner import GUIDANCE, prompt

STEPS = (6, 8, 10)


@dataclass(frozen=True)
class HttpTurn:
    """One turn over HTTP: images per second in the steady state, and what the worker did."""

    rate: float
    work: WorkerWork


@dataclass(frozen=True)
class ComparedRate:
    """Images per second of one turn, and of full batches just before and after it: a machine's speed drifts."""

    rate: float
    before: float
    after: float

    @property
    def full(self) -> float:
        """Images per second of full batches, over both, which have the same number of images."""
        return 2 / (1 / self.before + 1 / self.after)

    @property
    def of_full(self) -> float:
        return self.rate / self.full


def bodies(seed: int) -> Iterator[dict[str, object]]:
    """Yield jobs without end: each three of them have all step counts, in random order."""
    rng = random.Random(seed)
    at = 0
    while True:
        for steps in rng.sample(STEPS, len(STEPS)):
            at += 1
            text = f"{prompt(at)}, {seed}"  # new texts in each turn, so that none is cached
            yield {"model": MODEL, "prompt": text, "seed": at, "steps": steps, "guidance_scale": GUIDANCE}


async def over_http(url: str, load: ClientLoad, seed: int) -> HttpTurn:
    """Run one turn over HTTP."""
    meter = Meter(load)
    async with light_client(url) as http, counted(http) as work:
        await closed_loop(http, meter, bodies(seed))
    return HttpTurn(meter.rate, work)


def full_batches(pipeline: Any, load: ClientLoad, _seed: int) -> float:
    """Return images per second of the pipeline's batched call with full batches at the mean steps."""
    steps = round(statistics.mean(STEPS))
    batches = max(1, load.images // ROWS)
    started = time.perf_counter()
    for _ in range(batches):
        call(pipeline, range(ROWS), SIDE, steps)
    return batches * ROWS / (time.perf_counter() - started)


def match_head(queue: list[int]) -> list[int]:
    """Return the positions of the requests at the head of the queue that match the first one."""
    end = next((at for at, steps in enumerate(queue) if steps != queue[0]), len(queue))
    return list(range(min(end, ROWS)))


def match_all(queue: list[int]) -> list[int]:
    """Return the positions of all requests that match the first one."""
    return [at for at, steps in enumerate(queue) if steps == queue[0]][:ROWS]


def by_request(select: Callable[[list[int]], list[int]], pipeline: Any, load: ClientLoad, seed: int) -> float:
    """Return images per second of a batcher that calls the pipeline for requests of equal steps.

    An upper bound for such a server: one request per client is always queued.
    """
    jobs = bodies(seed)
    queue = [int(str(next(jobs)["steps"])) for _ in range(load.clients)]
    done = 0
    started = time.perf_counter()
    while done < load.images:
        selected = select(queue)
        call(pipeline, range(len(selected)), SIDE, queue[selected[0]])
        done += len(selected)
        queue = [steps for at, steps in enumerate(queue) if at not in selected]
        queue += [int(str(next(jobs)["steps"])) for _ in selected]
    return done / (time.perf_counter() - started)


def measure(url: str, pipeline: Any, load: ClientLoad, turns: int) -> dict[str, Any]:
    """Return the medians over the turns, in which the methods alternate."""
    http_turns: list[HttpTurn] = []
    half = ClientLoad(load.clients, load.images // 2)

    def full(turn: int) -> float:
        return full_batches(pipeline, half, turn)

    def http(_pipeline: Any, load: ClientLoad, seed: int) -> float:
        http_turns.append(asyncio.run(over_http(url, load, seed)))
        return http_turns[-1].rate

    methods: dict[str, Callable[[Any, ClientLoad, int], float]] = {
        "http": http,
        "by_request_head": lambda *args: by_request(match_head, *args),
        "by_request_queue": lambda *args: by_request(match_all, *args),
    }
    rates: dict[str, list[ComparedRate]] = {name: [] for name in methods}
    short = ClientLoad(load.clients, min(load.clients, load.images))
    for method in methods.values():
        method(pipeline, short, 0)
    http_turns.clear()
    after = full(0)
    for turn in range(1, turns + 1):
        for name, method in sorted(methods.items(), reverse=turn % 2 == 0):
            before, rate, after = after, method(pipeline, load, turn), full(turn)
            rates[name].append(ComparedRate(rate, before, after))
        print({name: round(compared[-1].of_full, 3) for name, compared in rates.items()}, http_turns[-1], flush=True)
    return figures_of(rates, http_turns)


def figures_of(rates: dict[str, list[ComparedRate]], http_turns: list[HttpTurn]) -> dict[str, Any]:
    """Return the medians."""
    references = [one.full for compared in rates.values() for one in compared]
    return {
        "images_per_second": {"full_batches": round(statistics.median(references), 2)}
        | {name: round(statistics.median(one.rate for one in compared), 2) for name, compared in rates.items()},
        "of_full_batches": {
            name: round(statistics.median(one.of_full for one in compared), 3) for name, compared in rates.items()
        },
        "turns_of_full_batches": {
            name: [round(one.of_full, 3) for one in compared] for name, compared in rates.items()
        },
        "rows_per_forward": round(statistics.median(turn.work.rows_per_forward for turn in http_turns), 2),
        "gpu_thread_idle_while_queued": round(statistics.median(turn.work.idle_share for turn in http_turns), 4),
    }


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--images", type=int, default=128, help="measured in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    load = ClientLoad(options.clients, options.images)
    with small_service() as (url, pipeline):
        figures = measure(url, pipeline, load, options.turns)
    record.report(options.json, figures, clients=load.clients, images_per_turn=load.images, threads=1)


if __name__ == "__main__":
    main()
