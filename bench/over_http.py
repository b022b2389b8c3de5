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
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from bench.common import record
from bench.common.clients import ClientLoad, LightClient, Meter, light_client, run_client
from bench.engine import shapes
from bench.engine.comparison import call
from bench.engine.runner import GUIDANCE, prompt

MODEL = "small-sd"
SIDE = 64
ROWS = 8
STEPS = (6, 8, 10)
STOP_TIMEOUT_S = 60.0
LOG_TAIL_CHARS = 5000
HEARTBEATS_S = 1.2  # a worker sends its counters twice per second

MODELS_FILE = """
[[model]]
id = "{model}"
source = "{source}"
max_batch = {rows}

[model.defaults]
width = {side}
height = {side}
"""


@dataclass(frozen=True)
class HttpTurn:
    """One turn over HTTP: images per second in the steady state, and figures of the worker's counters."""

    rate: float
    rows_per_forward: float
    idle_share: float


@contextmanager
def served(model: Path, folder: Path, **settings: str) -> Iterator[str]:
    """Run `fusequeue up` with `model` and a new data folder, and yield its URL."""
    models = folder / "models.toml"
    models.write_text(MODELS_FILE.format(model=MODEL, source=model, rows=ROWS, side=SIDE), "utf-8")
    with up(folder, "--models", str(models), **settings) as url:
        yield url


@contextmanager
def up(folder: Path, *options: str, **settings: str) -> Iterator[str]:
    """Run `fusequeue up` with its data in `folder`, and yield its URL."""
    command = [sys.executable, "-m", "cli.main", "up", "--data-dir", str(folder / "data"), *options]
    log = folder / "up.log"
    with launched(command, log, subprocess.PIPE, **settings) as process:
        assert process.stdout is not None
        with process.stdout:
            word, _, url = process.stdout.readline().decode().strip().partition(" ")
            if word != "ready":
                raise RuntimeError("fusequeue did not start; its messages are above")
            yield url


@contextmanager
def launched(command: list[str], log: Path, stdout: int | None, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of this checkout on the CPU with one torch thread, stderr to `log`; terminate it at the end.

    `stdout` is that of `subprocess`; None: to `log` too.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    env |= {"FUSEQUEUE_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1", "FUSEQUEUE_DEVICE": "cpu"}
    # The checkout first: not an installed fusequeue.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(record.ROOT), env.get("PYTHONPATH"))))
    parent_watch = [sys.executable, "-m", "shared.runtime.parent_process", str(os.getpid()), str(int(signal.SIGTERM))]
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [*parent_watch, *command],
            cwd=record.ROOT,
            env=env | {f"FUSEQUEUE_{name.upper()}": value for name, value in settings.items()},
            stdout=log_file if stdout is None else stdout,
            stderr=log_file,
            start_new_session=True,
        )
    try:
        yield process
    except Exception:
        print(log.read_text()[-LOG_TAIL_CHARS:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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


async def counters(http: LightClient) -> dict[str, Any]:
    """Return the worker's counters after its next heartbeat."""
    await asyncio.sleep(HEARTBEATS_S)
    (worker,) = json.loads(await http.get("/v1/workers"))["data"]
    return dict(worker)


async def over_http(url: str, load: ClientLoad, seed: int) -> HttpTurn:
    """Run one turn over HTTP."""
    async with light_client(url) as http:
        before = await counters(http)
        meter, jobs = Meter(load), bodies(seed)
        async with asyncio.TaskGroup() as clients:
            for _ in range(load.clients):
                clients.create_task(run_client(http, jobs, meter))
        after = await counters(http)
    if before["id"] != after["id"]:
        raise RuntimeError("the worker was restarted during a turn; its messages are above")
    delta = {name: after[name] - before[name] for name in ("forwards", "forward_rows", "busy_s", "idle_while_queued_s")}
    idle = delta["idle_while_queued_s"]
    return HttpTurn(meter.rate, delta["forward_rows"] / delta["forwards"], idle / (idle + delta["busy_s"]))


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
        "rows_per_forward": round(statistics.median(turn.rows_per_forward for turn in http_turns), 2),
        "gpu_thread_idle_while_queued": round(statistics.median(turn.idle_share for turn in http_turns), 4),
    }


def summary(figures: dict[str, Any], load: ClientLoad) -> str:
    """Return the figures as text."""
    rates, ratios = figures["images_per_second"], figures["of_full_batches"]
    lines = [
        f"{load.clients} clients, steps {', '.join(map(str, STEPS))} mixed, {SIDE}², at most {ROWS} rows:",
        f"  full batches, in process     {rates['full_batches']:6.2f} images/s",
        f"  fusequeue over HTTP          {rates['http']:6.2f} images/s, {ratios['http']:.3f} of full batches "
        f"({figures['rows_per_forward']:.2f} rows per forward, the GPU thread idle for "
        f"{figures['gpu_thread_idle_while_queued']:.2%} of the time while jobs were queued)",
        f"  equal requests, whole queue  {rates['by_request_queue']:6.2f} images/s, {ratios['by_request_queue']:.3f}",
        f"  equal requests, queue head   {rates['by_request_head']:6.2f} images/s, {ratios['by_request_head']:.3f}",
    ]
    return "\n".join(lines)


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
    torch.set_num_threads(1)
    shapes.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        folder = Path(scratch)
        shapes.save("sd", folder / "model")
        pipeline: Any = DiffusionPipeline.from_pretrained(folder / "model", local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        with served(folder / "model", folder) as url:
            figures = measure(url, pipeline, load, options.turns)
    print(summary(figures, load), flush=True)
    if options.json:
        record.write(options.json, figures, clients=load.clients, images_per_turn=load.images, threads=1)


if __name__ == "__main__":
    main()
