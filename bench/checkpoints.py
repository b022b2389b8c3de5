"""`python -m bench.checkpoints`: denoising with a checkpoint of each running job every two seconds, relative to none.

Two services run at once, each on a CPU core of its own (Linux): `fusequeue up` with the demo model under several names,
at most eight rows, one torch thread. One model stores checkpoints: its `checkpoint_s` is an eighth of two seconds, as
each of eight rows has an eighth of the device. Clients submit long jobs, which are canceled at the end of a turn. In a
turn one service runs the model with checkpoints and the other the one without, in the next they change over: what slows
the whole machine slows both models, and what slows one core slows each model in one of the two turns. A ratio is of two
such turns, from the images in forwards by second. All work of a service is done on its core, that of storing included.
Afterwards a model whose `checkpoint_s` is two seconds runs jobs that are shorter. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import record
from bench.common.clients import LightClient, finished, light_client, scrape
from bench.common.service import ROWS, up
from cli.up.ports import reserved_port

EVERY_S = 2.0
WITHOUT, WITH, FOR_LONG_ONLY = "without", "with", "for-long-jobs"
LONG_STEPS, SHORT_STEPS = 1000, 12
FIRST_S = 3.0
"""Of a turn, before it is measured: until all rows are in use and the first checkpoints are being stored."""

WRITTEN = "fusequeue_checkpoints_written_total"
MODELS_FILE = """
[[model]]
id = "{model}"
source = "{source}"
tasks = ["text_to_image"]
max_batch = {rows}
checkpoint_s = {checkpoint_s}

[model.defaults]
width = 64
height = 64
guidance_scale = 2.0

[model.limits]
min_side = 64
max_side = 64
multiple_of = 8
max_steps = 1000
"""


class Turn(NamedTuple):
    """What a worker did by second: rows of forwards, and checkpoints; and the mean rows of a forward."""

    rows: float
    checkpoints: float
    rows_per_forward: float


@dataclass(frozen=True)
class Service:
    """A running service: its client, and the port of its worker's metrics."""

    http: LightClient
    metrics_port: int


def body(model: str, steps: int, seed: int) -> dict[str, object]:
    return {"model": model, "prompt": "a red circle on a blue ground, left", "seed": seed, "steps": steps}


async def turn(service: Service, model: str, clients: int, seconds: float) -> Turn:
    """Measure long jobs of a model for so many seconds, and cancel them."""
    http = service.http
    jobs = [await http.post("/v1/jobs", body(model, LONG_STEPS, seed)) for seed in range(clients)]
    await asyncio.sleep(FIRST_S)
    before, started = await scrape(service.metrics_port), time.perf_counter()
    await asyncio.sleep(seconds)
    after, passed_s = await scrape(service.metrics_port), time.perf_counter() - started
    for job in jobs:
        await http.post(f"/v1/jobs/{job['id']}/cancel", {})
    for job in jobs:
        while json.loads(await http.get(f"/v1/jobs/{job['id']}?wait=60"))["status"] in ("queued", "running"):
            pass
    delta = {name: number - before.get(name, 0.0) for name, number in after.items()}
    rows = delta["fusequeue_forward_rows_sum"]
    return Turn(rows / passed_s, delta.get(WRITTEN, 0.0) / passed_s, rows / delta["fusequeue_forward_rows_count"])


async def short_jobs(service: Service, clients: int) -> dict[str, float]:
    """Run jobs that are shorter than the threshold; return how many, and how many checkpoints were stored."""
    before = await scrape(service.metrics_port)
    jobs = (finished(service.http, body(FOR_LONG_ONLY, SHORT_STEPS, seed)) for seed in range(2 * clients))
    ended = [job for job, _ in await asyncio.gather(*jobs)]
    after = await scrape(service.metrics_port)
    return {
        "jobs": len(ended),
        "checkpoint_s": EVERY_S,
        "most_device_seconds": round(max(job["metrics"]["device_seconds"] for job in ended), 2),
        "checkpoints": int(after.get(WRITTEN, 0.0) - before.get(WRITTEN, 0.0)),
    }


async def measure(urls: list[str], ports: list[int], clients: int, turns: int, seconds: float) -> dict[str, Any]:
    """Run `turns` turns of each model on each service, after a turn of each that warms up."""
    pairs: list[dict[str, Turn]] = []
    async with light_client(urls[0]) as first, light_client(urls[1]) as second:
        services = [Service(http, port) for http, port in zip((first, second), ports, strict=True)]
        for number in range(2 * turns + 2):
            models = (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT)
            done = await asyncio.gather(*(turn(services[i], models[i], clients, seconds) for i in range(2)))
            pairs.append(dict(zip(models, done, strict=True)))
            print(pairs[-1], flush=True)
        short = await short_jobs(services[0], clients)
    return figures_of(pairs[2:]) | {"short_jobs": short}


def figures_of(pairs: list[dict[str, Turn]]) -> dict[str, Any]:
    """Return the figures of pairs of turns; each two pairs make one ratio, as the services changed over."""
    by_pair = [pair[WITH].rows / pair[WITHOUT].rows for pair in pairs]
    ratios = [math.sqrt(one * other) for one, other in zip(by_pair[::2], by_pair[1::2], strict=True)]
    return {
        "of_without": round(statistics.geometric_mean(ratios), 3),
        "standard_error": round(statistics.stdev(ratios) / math.sqrt(len(ratios)), 3) if len(ratios) > 1 else None,
        "turns_of_without": [round(ratio, 3) for ratio in ratios],
        "rows_per_second": {
            model: round(statistics.median(pair[model].rows for pair in pairs), 1) for model in (WITHOUT, WITH)
        },
        "rows_per_forward": round(statistics.median(pair[WITH].rows_per_forward for pair in pairs), 2),
        "seconds_between_checkpoints_of_a_job": round(
            statistics.median(pair[WITH].rows_per_forward / max(1e-9, pair[WITH].checkpoints) for pair in pairs), 2
        ),
        "checkpoints_of_the_model_without": sum(pair[WITHOUT].checkpoints for pair in pairs),
    }


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Have processes that start meanwhile run on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def service_on(core: int, scratch: Path, running: ExitStack) -> tuple[str, int]:
    """Start a service on a core until `running` ends; return its URL, and the port of its worker's metrics."""
    port = running.enter_context(reserved_port("127.0.0.1", 9100 + core))
    source = record.ROOT / "demo" / "model"
    tables = (
        MODELS_FILE.format(model=model, source=source, rows=ROWS, checkpoint_s=checkpoint_s)
        for model, checkpoint_s in ((WITHOUT, 0), (WITH, EVERY_S / ROWS), (FOR_LONG_ONLY, EVERY_S))
    )
    scratch.mkdir()
    models = scratch / "models.toml"
    models.write_text("\n".join(tables), "utf-8")
    with on_core(core):
        return running.enter_context(up(scratch, "--models", str(models), worker_port=str(port))), port


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--turns", type=int, default=12, help="of each model on each service")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured in each turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch, ExitStack() as running:
        services = [service_on(core, Path(scratch) / str(core), running) for core in range(2)]
        urls, ports = zip(*services, strict=True)
        figures = asyncio.run(measure([*urls], [*ports], options.clients, options.turns, options.seconds))
    record.report(options.json, figures, clients=options.clients, seconds=options.seconds, rows=ROWS, threads=1)


if __name__ == "__main__":
    main()
