"""`python -m bench.step_cache`: images per second with step caching and without it, over HTTP, and how images differ.

Starts `fusequeue up` (Redis, API, one worker with one torch thread, storage in a folder) with the demo model. In turns,
clients submit jobs of the same held-out prompts and seeds with `step_cache` off and with a level: each submits a job,
waits for it, fetches its image and submits the next. Figures are medians over the turns; PSNR compares each image with
that of the same job without step caching. `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.common import record
from bench.common.clients import ClientLoad, Meter, closed_loop, counted, light_client
from bench.common.service import up
from demo.checker import matches
from demo.drawings import split_prompts
from worker.engine.step_calibration import psnr

OFF = "off"
GUIDANCE = 2.0


@dataclass
class CachedTurn:
    """One turn: images per second, images by job number, skipped steps of a job, rows of a forward."""

    rate: float = 0.0
    images: dict[int, Image.Image] = field(default_factory=dict)
    skipped: int = 0
    rows_per_forward: float = 0.0

    def keep(self, request: Mapping[str, Any], job: Mapping[str, Any], image: bytes) -> None:
        self.images[request["seed"]] = Image.open(io.BytesIO(image)).convert("RGB")
        self.skipped = job["batching"]["skipped_steps"]


def body(number: int, steps: int, choice: str) -> dict[str, object]:
    """Return job `number`: the held-out prompts in turns, with new seeds."""
    _, prompts = split_prompts()
    text = prompts[number % len(prompts)].caption()
    return {
        "model": "demo",
        "prompt": text,
        "seed": number,
        "steps": steps,
        "guidance_scale": GUIDANCE,
        "step_cache": choice,
    }


async def run_turn(url: str, load: ClientLoad, steps: int, choice: str, first: int) -> CachedTurn:
    """Run one turn of jobs numbered from `first`."""
    turn, meter = CachedTurn(), Meter(load)
    jobs = (body(number, steps, choice) for number in itertools.count(first))
    async with light_client(url) as http, counted(http) as work:
        await closed_loop(http, meter, jobs, turn.keep)
    turn.rate, turn.rows_per_forward = meter.rate, work.rows_per_forward
    return turn


def right(images: dict[int, Image.Image]) -> float:
    """Return the share of images that show their prompt."""
    return statistics.mean(matches(image, str(body(number, 1, OFF)["prompt"])) for number, image in images.items())


def figures_of(turns: dict[str, list[CachedTurn]], level: str) -> dict[str, Any]:
    """Return the medians, and the figures of the images of all turns."""
    off, cached = ({at: image for turn in turns[name] for at, image in turn.images.items()} for name in (OFF, level))
    ratios = [psnr(np.asarray(image), np.asarray(off[number])) for number, image in cached.items() if number in off]
    return {
        "level": level,
        "skipped_steps": turns[level][0].skipped,
        "images_per_second": {name: round(statistics.median(turn.rate for turn in turns[name]), 3) for name in turns},
        "gain": round(
            statistics.median(fast.rate / slow.rate for fast, slow in zip(turns[level], turns[OFF], strict=True)),
            2,
        ),
        "rows_per_forward": {
            name: round(statistics.median(turn.rows_per_forward for turn in turns[name]), 2) for name in turns
        },
        "psnr_db": {"median": round(statistics.median(ratios), 1), "least": round(min(ratios), 1)},
        "prompts_right": {OFF: round(right(off), 3), level: round(right(cached), 3)},
        "images": {OFF: len(off), level: len(cached)},
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--images", type=int, default=96, help="measured in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--level", choices=("light", "medium", "strong"), default="medium")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    load = ClientLoad(options.clients, options.images)
    turns: dict[str, list[CachedTurn]] = {OFF: [], options.level: []}
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch, up(Path(scratch)) as url:
        for at in range(options.turns):
            first = 1000 * at  # new seeds in each turn, the same for both
            for choice in sorted(turns, reverse=at % 2 == 1):
                turns[choice].append(asyncio.run(run_turn(url, load, options.steps, choice, first)))
                print(f"{choice}: {turns[choice][-1].rate:.2f} images/s", flush=True)
    figures = figures_of(turns, options.level)
    record.report(options.json, figures, clients=load.clients, images_per_turn=load.images, threads=1)


if __name__ == "__main__":
    main()
