"""`python -m bench.cost`: CPU milliseconds of each process per image, over the route that waits for its image.

Starts `fusequeue up` (Redis, API, chores, one worker with one torch thread, storage in a folder) with a small Stable
Diffusion 1.x. Clients repeat `POST /v1/images/generations`. What the model itself takes is measured in this process, on
the same weights: the pipeline's own call with full batches, in turns with the service. `engine, less model` is what is
left of the engine's time. Figures are medians over the turns; `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.common import record
from bench.common.clients import ClientLoad, light_client, together
from bench.common.service import MODEL, ROWS, SIDE, small_service
from bench.engine.comparison import call
from bench.engine.runner import prompt

STEPS = 8
PARTS = {
    "engine": "worker.engine.process",
    "worker": "-m worker ",
    "chores": "api.chores",
    "api": "-m api ",
    "redis": "redis-server",
    "supervisor": "cli.main up",
}
"""Processes of `fusequeue up`, by a part of their command line; the first that matches."""

Milliseconds = dict[str, float]


def part_of(command: str) -> str:
    """Return the part of a process by its command line."""
    return next((part for part, text in PARTS.items() if text in f"{command} "), "others")


def cpu_ms() -> Milliseconds:
    """Return the CPU time so far of each part: of all descendants of this process."""
    total: Milliseconds = {}
    for process in psutil.Process().children(recursive=True):
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        total[part_of(command)] = total.get(part_of(command), 0.0) + 1000 * (times.user + times.system)
    return total


def resident_mib() -> dict[str, int]:
    """Return the resident memory of each part."""
    total: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            part = part_of(" ".join(process.cmdline()))
            total[part] = total.get(part, 0) + process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return {part: round(count / 2**20) for part, count in total.items()}


def requests(turn: int) -> Iterator[dict[str, object]]:
    """Yield requests without end."""
    for at in itertools.count():
        text = f"{prompt(at)}, {turn}"  # new texts in each turn, so that none is cached
        yield {
            "model": MODEL,
            "prompt": text,
            "seed": at,
            "steps": STEPS,
            "size": f"{SIDE}x{SIDE}",
            "response_format": "b64_json",
        }


async def over_http(url: str, load: ClientLoad, turn: int) -> Milliseconds:
    """Run one turn and return the CPU time of each part, per image."""
    bodies = itertools.islice(requests(turn), load.images)
    async with light_client(url) as http:
        await http.get("/healthz")

        async def client() -> None:
            for body in bodies:
                await http.post("/v1/images/generations", body)

        before = cpu_ms()
        await together(load.clients, client)
        after = cpu_ms()
    return {part: (after[part] - before.get(part, 0.0)) / load.images for part in after}


def model_ms(pipeline: Any, images: int) -> float:
    """Return the CPU time of an image in the pipeline's own call with full batches."""
    batches = max(1, images // ROWS)
    started = time.process_time()
    for _ in range(batches):
        call(pipeline, range(ROWS), SIDE, STEPS)
    return 1000 * (time.process_time() - started) / (batches * ROWS)


def figures_of(turns: list[tuple[Milliseconds, float]]) -> dict[str, float]:
    """Return the medians of the parts, of the model, and of all but the model."""
    parts = sorted({part for costs, _ in turns for part in costs})
    figures = {part: statistics.median(costs.get(part, 0.0) for costs, _ in turns) for part in parts}
    figures["model"] = statistics.median(model for _, model in turns)
    figures["engine, less model"] = statistics.median(costs["engine"] - model for costs, model in turns)
    figures["service, less model"] = statistics.median(sum(costs.values()) - model for costs, model in turns)
    return {name: round(value, 2) for name, value in figures.items()}


def measure(url: str, pipeline: Any, load: ClientLoad, turns: int) -> dict[str, float]:
    """Return the figures of the turns, in which service and pipeline alternate."""
    warm = ClientLoad(load.clients, 2 * load.clients)
    asyncio.run(over_http(url, warm, 0))
    model_ms(pipeline, ROWS)
    seen: list[tuple[Milliseconds, float]] = []
    for turn in range(1, turns + 1):
        seen.append((asyncio.run(over_http(url, load, turn)), model_ms(pipeline, load.images)))
        print(f"turn {turn}: {figures_of(seen[-1:])}", flush=True)
    return figures_of(seen)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--images", type=int, default=96, help="measured in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with small_service() as (url, pipeline):
        figures = {
            f"{clients} clients": measure(url, pipeline, ClientLoad(clients, options.images), options.turns)
            for clients in options.clients
        }
        memory = resident_mib()
    more = {"images_per_turn": options.images, "turns": options.turns, "steps": STEPS, "threads": 1}
    record.report(options.json, {"cpu_ms_per_image": figures, "resident_mib": memory}, **more)


if __name__ == "__main__":
    main()
