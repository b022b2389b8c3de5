"""`python -m bench.devices`: videos per second of one model over two devices, relative to one device, over HTTP.

The devices are ranks on CPU cores, with one torch thread each, so the machine needs two idle cores. In turns,
`fusequeue up` (Redis, API, one worker, storage in a folder) is started with `devices = 1` and with `devices = 2`, on
the same random weights: one layer of Wan 2.1 1.3B, with a tiny text encoder and VAE, as nearly all of the time is the
denoiser's in the whole model. Clients submit a job, wait for it, fetch its video and submit the next; their videos
run and end together, so a turn measures a multiple of their number. Figures are medians over the turns; `--json FILE`
saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import record
from bench.common.clients import ClientLoad, Meter, light_client, run_client
from bench.engine import shapes
from bench.over_http import up

DEVICES = (1, 2)
MODEL = "wan-1-layer"
FRAMES = 9
MODELS_FILE = """
[[model]]
id = "{model}"
source = "{source}"
tasks = ["text_to_video"]
devices = {devices}
max_batch = 2

[model.defaults]
width = {side}
height = {side}
guidance_scale = 1.0

[model.limits]
multiple_of = 16
max_images = 1
max_frames = {frames}
frames_multiple = 4
"""


@dataclass(frozen=True)
class VideoShape:
    """Side in pixels and steps of each job's video."""

    side: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of a row: latents have an eighth of the side and every fourth frame, and a token has four of them."""
        return (self.side // 16) ** 2 * ((FRAMES - 1) // 4 + 1)


def bodies(shape: VideoShape) -> Iterator[dict[str, object]]:
    for seed in itertools.count():
        yield {"model": MODEL, "prompt": f"a boat, {seed}", "seed": seed, "steps": shape.steps}


async def measure(url: str, load: ClientLoad, shape: VideoShape) -> float:
    """Return videos per second."""
    jobs, meter = bodies(shape), Meter(load)
    async with light_client(url) as http, asyncio.TaskGroup() as clients:
        for _ in range(load.clients):
            clients.create_task(run_client(http, jobs, meter))
    return meter.rate


def run_turn(weights: Path, devices: int, load: ClientLoad, shape: VideoShape) -> float:
    """Start the service with a model over `devices`, and return its videos per second."""
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        models = Path(scratch) / "models.toml"
        values = {"model": MODEL, "source": weights, "devices": devices, "side": shape.side, "frames": FRAMES}
        models.write_text(MODELS_FILE.format(**values), "utf-8")
        with up(Path(scratch), "--models", str(models)) as url:
            return asyncio.run(measure(url, load, shape))


def figures_of(rates: dict[int, list[float]]) -> dict[str, Any]:
    """Return the medians; the gain is that within each turn."""
    one, two = (rates[devices] for devices in DEVICES)
    gains = [fast / slow for fast, slow in zip(two, one, strict=True)]
    return {
        "videos_per_second": {str(devices): round(statistics.median(rates[devices]), 4) for devices in DEVICES},
        "gain": round(statistics.median(gains), 2),
        "gain_of_turns": [round(gain, 2) for gain in gains],
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--videos", type=int, default=2, help="measured in each turn: a multiple of --clients")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--side", type=int, default=384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.videos % options.clients:
        parser.error(f"--videos {options.videos} is not a multiple of --clients {options.clients}")
    load, shape = ClientLoad(options.clients, options.videos), VideoShape(options.side, options.steps)
    shapes.disable_progress_bars()
    rates: dict[int, list[float]] = {devices: [] for devices in DEVICES}
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as weights:
        shapes.save(MODEL, Path(weights))
        for turn in range(options.turns):
            for devices in sorted(DEVICES, reverse=turn % 2 == 1):
                rates[devices].append(run_turn(Path(weights), devices, load, shape))
                print(f"{devices} device(s): {rates[devices][-1]:.4f} videos/s", flush=True)
    figures = figures_of(rates)
    speeds = figures["videos_per_second"]
    print(
        f"{shape.tokens} tokens a row, {shape.steps} steps, {load.clients} clients: {speeds['1']} videos/s on one "
        f"device, {speeds['2']} on two, {figures['gain']:.2f} times as many"
    )
    if options.json:
        about = {"clients": load.clients, "videos_per_turn": load.images, "threads_per_device": 1}
        record.write(options.json, figures, **about, tokens=shape.tokens, steps=shape.steps)


if __name__ == "__main__":
    main()
