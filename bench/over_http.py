"""`python -m bench.over_http`: what is left of the model's own speed when many clients ask over HTTP.

Starts `fusequeue up` (Redis, API, one worker with one torch thread, storage in a folder) on a small Stable Diffusion
1.x. Clients submit a job, wait for it, fetch its picture and submit the next; the jobs have 6, 8 and 10 steps. In
turns with that, in this process and on the same weights: two batchers of requests, which call the pipeline for
requests of equal steps, and, before and after each of the three, the pipeline's own batched call over and over, always
full and at the mean steps. Figures are medians over the turns. `--json FILE` keeps them.
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

from bench import record, shapes
from bench.clients import Asking, Load, Meter, asking, client
from bench.engine import GUIDANCE, call, prompt

MODEL = "small-sd"
SIDE = 64
ROWS = 8
STEPS = (6, 8, 10)
STOP_PATIENCE_S = 60.0
WORDS = 5000  # of a log, at its end
BEATS_S = 1.2  # a worker tells its counters twice a second

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
class Served:
    """One turn over HTTP: pictures a second in the steady state, and what the worker's counters say of the turn."""

    rate: float
    rows_a_forward: float
    idle_share: float


@contextmanager
def served(model: Path, folder: Path, **settings: str) -> Iterator[str]:
    """Run `fusequeue up` with `model` on a data folder of its own, and yield its URL."""
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
            word, _, url = process.stdout.readline().decode().strip().partition(" ")  # `up` tells its own failures
            if word != "ready":
                raise RuntimeError("fusequeue did not start; see above why")
            yield url


@contextmanager
def launched(command: list[str], log: Path, stdout: int | None, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of this checkout on one torch thread of the CPU, stderr into `log`; it drains at the end.

    `stdout` is as for `subprocess`; None: into `log` too.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("FUSEQUEUE_")}
    own |= {"FUSEQUEUE_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1", "FUSEQUEUE_DEVICE": "cpu"}
    own["PYTHONPATH"] = str(record.ROOT)  # this checkout, whichever is installed
    leash = [sys.executable, "-m", "cli.up.process", str(os.getpid()), str(int(signal.SIGTERM))]
    with log.open("wb") as words:
        process = subprocess.Popen(
            [*leash, *command],
            cwd=record.ROOT,
            env=own | {f"FUSEQUEUE_{name.upper()}": value for name, value in settings.items()},
            stdout=words if stdout is None else stdout,
            stderr=words,
            start_new_session=True,
        )
    try:
        yield process
    except Exception:
        print(log.read_text()[-WORDS:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Beside:
    """Pictures a second of one turn, and of full batches just before and after it: a machine's speed drifts."""

    rate: float
    before: float
    after: float

    @property
    def full(self) -> float:
        """Of full batches, over both, which make as many pictures each."""
        return 2 / (1 / self.before + 1 / self.after)

    @property
    def of_full(self) -> float:
        return self.rate / self.full


def bodies(seed: int) -> Iterator[dict[str, object]]:
    """Yield jobs without end: each three of them have all numbers of steps, in random order."""
    chance = random.Random(seed)
    at = 0
    while True:
        for steps in chance.sample(STEPS, len(STEPS)):
            at += 1
            words = f"{prompt(at)}, {seed}"  # no turn's texts are encoded already
            yield {"model": MODEL, "prompt": words, "seed": at, "steps": steps, "guidance_scale": GUIDANCE}


async def counters(http: Asking) -> dict[str, Any]:
    """Return what the worker tells of itself, after its next beat."""
    await asyncio.sleep(BEATS_S)
    (worker,) = json.loads(await http.get("/v1/workers"))["data"]
    told: dict[str, Any] = worker
    return told


async def over_http(url: str, load: Load, seed: int) -> Served:
    """Run one turn over HTTP."""
    async with asking(url) as http:
        before = await counters(http)
        meter, jobs = Meter(load), bodies(seed)
        async with asyncio.TaskGroup() as clients:
            for _ in range(load.clients):
                clients.create_task(client(http, jobs, meter))
        after = await counters(http)
    if before["id"] != after["id"]:
        raise RuntimeError("the worker ended in a turn and was started anew; see above why")
    grown = {name: after[name] - before[name] for name in ("forwards", "forward_rows", "busy_s", "idle_while_queued_s")}
    idle = grown["idle_while_queued_s"]
    return Served(meter.rate, grown["forward_rows"] / grown["forwards"], idle / (idle + grown["busy_s"]))


def full_batches(pipeline: Any, load: Load, _seed: int) -> float:
    """Return pictures a second of the pipeline's own batched call, always full, at the mean steps."""
    steps = round(statistics.mean(STEPS))
    batches = max(1, load.pictures // ROWS)
    began = time.perf_counter()
    for _ in range(batches):
        call(pipeline, range(ROWS), SIDE, steps)
    return batches * ROWS / (time.perf_counter() - began)


def from_the_head(line: list[int]) -> list[int]:
    """Return the places of the requests that a batcher takes which stops at the first that does not match."""
    ends = next((at for at, steps in enumerate(line) if steps != line[0]), len(line))
    return list(range(min(ends, ROWS)))


def from_the_whole_line(line: list[int]) -> list[int]:
    """Return the places of the requests that match the first one, wherever they stand."""
    return [at for at, steps in enumerate(line) if steps == line[0]][:ROWS]


def by_request(take: Callable[[list[int]], list[int]], pipeline: Any, load: Load, seed: int) -> float:
    """Return pictures a second of a batcher that calls the pipeline for requests of equal steps.

    As many requests wait as there are clients, and the line is never waited for: more than such a server can have.
    """
    jobs = bodies(seed)
    line = [int(str(next(jobs)["steps"])) for _ in range(load.clients)]
    made = 0
    began = time.perf_counter()
    while made < load.pictures:
        taken = take(line)
        call(pipeline, range(len(taken)), SIDE, line[taken[0]])
        made += len(taken)
        line = [steps for at, steps in enumerate(line) if at not in taken]
        line += [int(str(next(jobs)["steps"])) for _ in taken]
    return made / (time.perf_counter() - began)


def measure(url: str, pipeline: Any, load: Load, turns: int) -> dict[str, Any]:
    """Return the medians over the turns, in which the ways alternate."""
    told: list[Served] = []
    half = Load(load.clients, load.pictures // 2)

    def full(turn: int) -> float:
        return full_batches(pipeline, half, turn)

    def http(_pipeline: Any, load: Load, seed: int) -> float:
        told.append(asyncio.run(over_http(url, load, seed)))
        return told[-1].rate

    ways: dict[str, Callable[[Any, Load, int], float]] = {
        "http": http,
        "by_request_head": lambda *args: by_request(from_the_head, *args),
        "by_request_line": lambda *args: by_request(from_the_whole_line, *args),
    }
    beside: dict[str, list[Beside]] = {name: [] for name in ways}
    short = Load(load.clients, min(load.clients, load.pictures))
    for way in ways.values():
        way(pipeline, short, 0)
    told.clear()
    after = full(0)
    for turn in range(1, turns + 1):
        for name, way in sorted(ways.items(), reverse=turn % 2 == 0):
            before, rate, after = after, way(pipeline, load, turn), full(turn)
            beside[name].append(Beside(rate, before, after))
        print({name: round(seen[-1].of_full, 3) for name, seen in beside.items()}, told[-1], flush=True)
    references = [one.full for seen in beside.values() for one in seen]
    return {
        "pictures_a_second": {"full_batches": round(statistics.median(references), 2)}
        | {name: round(statistics.median(one.rate for one in seen), 2) for name, seen in beside.items()},
        "of_full_batches": {
            name: round(statistics.median(one.of_full for one in seen), 3) for name, seen in beside.items()
        },
        "turns_of_full_batches": {name: [round(one.of_full, 3) for one in seen] for name, seen in beside.items()},
        "rows_a_forward": round(statistics.median(one.rows_a_forward for one in told), 2),
        "gpu_thread_idle_while_work_waits": round(statistics.median(one.idle_share for one in told), 4),
    }


def summary(figures: dict[str, Any], load: Load) -> str:
    """Return the figures in words."""
    rates, ratios = figures["pictures_a_second"], figures["of_full_batches"]
    lines = [
        f"{load.clients} clients, steps {', '.join(map(str, STEPS))} mixed, {SIDE}², at most {ROWS} rows:",
        f"  full batches, in process     {rates['full_batches']:6.2f} pictures/s",
        f"  fusequeue over HTTP          {rates['http']:6.2f} pictures/s, {ratios['http']:.3f} of it "
        f"({figures['rows_a_forward']:.2f} rows a forward, the GPU thread idle for "
        f"{figures['gpu_thread_idle_while_work_waits']:.2%} of the time while jobs waited)",
        f"  equal requests, whole line   {rates['by_request_line']:6.2f} pictures/s, {ratios['by_request_line']:.3f}",
        f"  equal requests, head of line {rates['by_request_head']:6.2f} pictures/s, {ratios['by_request_head']:.3f}",
    ]
    return "\n".join(lines)


@torch.no_grad()
def main(line: list[str] | None = None) -> None:
    """Measure, tell, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--pictures", type=int, default=128, help="measured in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(line)
    load = Load(chosen.clients, chosen.pictures)
    torch.set_num_threads(1)
    shapes.hush()
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        folder = Path(scratch)
        shapes.save("sd", folder / "model")
        pipeline: Any = DiffusionPipeline.from_pretrained(folder / "model", local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        with served(folder / "model", folder) as url:
            figures = measure(url, pipeline, load, chosen.turns)
    print(summary(figures, load), flush=True)
    if chosen.json:
        record.write(chosen.json, figures, clients=load.clients, pictures_a_turn=load.pictures, threads=1)


if __name__ == "__main__":
    main()
