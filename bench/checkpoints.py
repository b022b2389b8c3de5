"""`python -m bench.checkpoints`: denoising with a checkpoint of each running job every two seconds, relative to none.

Starts `fusequeue up` with the demo model under several names, at most eight rows, one torch thread. One stores
checkpoints: its `checkpoint_s` is an eighth of two seconds, as each of eight rows has an eighth of the device. Clients
submit long jobs, which are canceled at the end of a turn; that model and one without checkpoints alternate. Rates are
images in the worker's forwards by second of the clock, and by second of a CPU that all processes of the service use,
which counts the same where other work runs. Afterwards a model whose `checkpoint_s` is two seconds runs jobs that are
shorter. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

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
    """What the worker did: rows of forwards by second of the clock and of a CPU, checkpoints by second of the clock."""

    rows: float
    rows_by_cpu_s: float
    checkpoints: float
    rows_per_forward: float


def used_cpu_s() -> float:
    """Return the CPU time of all processes that this one has started, and theirs."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def body(model: str, steps: int, seed: int) -> dict[str, object]:
    return {"model": model, "prompt": "a red circle on a blue ground, left", "seed": seed, "steps": steps}


async def turn(http: LightClient, port: int, model: str, clients: int, seconds: float) -> Turn:
    """Measure long jobs of a model for so many seconds, and cancel them."""
    jobs = [await http.post("/v1/jobs", body(model, LONG_STEPS, seed)) for seed in range(clients)]
    await asyncio.sleep(FIRST_S)
    before, started, cpu_s = await scrape(port), time.perf_counter(), used_cpu_s()
    await asyncio.sleep(seconds)
    after, passed_s, cpu_s = await scrape(port), time.perf_counter() - started, used_cpu_s() - cpu_s
    for job in jobs:
        await http.post(f"/v1/jobs/{job['id']}/cancel", {})
    for job in jobs:
        while json.loads(await http.get(f"/v1/jobs/{job['id']}?wait=60"))["status"] in ("queued", "running"):
            pass
    delta = {name: number - before.get(name, 0.0) for name, number in after.items()}
    rows = delta["fusequeue_forward_rows_sum"]
    taken = delta.get(WRITTEN, 0.0)
    return Turn(rows / passed_s, rows / cpu_s, taken / passed_s, rows / delta["fusequeue_forward_rows_count"])


async def short_jobs(http: LightClient, port: int, clients: int) -> dict[str, float]:
    """Run jobs that are shorter than the threshold; return how many, and how many checkpoints were stored."""
    before = await scrape(port)
    jobs = (finished(http, body(FOR_LONG_ONLY, SHORT_STEPS, seed)) for seed in range(2 * clients))
    ended = [job for job, _ in await asyncio.gather(*jobs)]
    after = await scrape(port)
    return {
        "jobs": len(ended),
        "checkpoint_s": EVERY_S,
        "most_device_seconds": round(max(job["metrics"]["device_seconds"] for job in ended), 2),
        "checkpoints": int(after.get(WRITTEN, 0.0) - before.get(WRITTEN, 0.0)),
    }


async def measure(url: str, port: int, clients: int, turns: int, seconds: float) -> dict[str, Any]:
    """Return the medians over pairs of turns, in which the models alternate; the first pair is a warm-up."""
    pairs: list[dict[str, Turn]] = []
    async with light_client(url) as http:
        for number in range(turns + 1):
            order = (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT)
            pairs.append({model: await turn(http, port, model, clients, seconds) for model in order})
            print(pairs[-1], flush=True)
        short = await short_jobs(http, port, clients)
    return figures_of(pairs[1:]) | {"short_jobs": short}


def figures_of(pairs: list[dict[str, Turn]]) -> dict[str, Any]:
    ratios = [pair[WITH].rows / pair[WITHOUT].rows for pair in pairs]
    by_cpu = [pair[WITH].rows_by_cpu_s / pair[WITHOUT].rows_by_cpu_s for pair in pairs]
    return {
        "of_without": round(statistics.median(ratios), 3),
        "of_without_by_cpu_second": round(statistics.median(by_cpu), 3),
        "turns_of_without": [round(ratio, 3) for ratio in ratios],
        "turns_of_without_by_cpu_second": [round(ratio, 3) for ratio in by_cpu],
        "rows_per_second": {
            model: round(statistics.median(pair[model].rows for pair in pairs), 1) for model in (WITHOUT, WITH)
        },
        "rows_per_forward": round(statistics.median(pair[WITH].rows_per_forward for pair in pairs), 2),
        "seconds_between_checkpoints_of_a_job": round(
            statistics.median(pair[WITH].rows_per_forward / max(1e-9, pair[WITH].checkpoints) for pair in pairs), 2
        ),
        "checkpoints_of_the_model_without": sum(pair[WITHOUT].checkpoints for pair in pairs),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8, help="of each model")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured in each turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch, reserved_port("127.0.0.1", 9100) as port:
        models, source = Path(scratch) / "models.toml", record.ROOT / "demo" / "model"
        tables = (
            MODELS_FILE.format(model=model, source=source, rows=ROWS, checkpoint_s=checkpoint_s)
            for model, checkpoint_s in ((WITHOUT, 0), (WITH, EVERY_S / ROWS), (FOR_LONG_ONLY, EVERY_S))
        )
        models.write_text("\n".join(tables), "utf-8")
        with up(Path(scratch), "--models", str(models), worker_port=str(port)) as url:
            figures = asyncio.run(measure(url, port, options.clients, options.turns, options.seconds))
    record.report(options.json, figures, clients=options.clients, seconds=options.seconds, rows=ROWS, threads=1)


if __name__ == "__main__":
    main()
