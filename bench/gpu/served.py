"""`python -m bench.gpu.served SHAPE`: the whole service over HTTP, as SGLang-Diffusion measured its own.

Their table (https://github.com/sgl-project/sglang/pull/18764: one H100, 512², 64 prompts, 12 clients) compares one
request at a time with batches of at most 8. Here one `fusequeue up` serves the same weights as two models, with
`max_batch` 8 and 1. Each of 12 clients submits a job, waits for it, fetches the image and submits the next. With fewer
steps than the models' own, the rates change and the gain hardly does.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.common import record
from bench.common.clients import counted, finished, light_client, together
from bench.common.service import up
from bench.gpu.made_models import save_folder
from bench.gpu.stage import DEVICE, DRY, Figures, Stage

CLIENTS, PROMPTS, ROWS = 12, 12 if DRY else 48, 8
SIDE = 64 if DRY else 512
WARM_STEPS = 2


@dataclass(frozen=True)
class Published:
    """A model in SGLang's table: requests per second, and mean and p99 seconds, one at a time and batched."""

    guidance: float
    own_steps: int
    requests_s: tuple[float, float]

    @property
    def gain(self) -> float:
        return round(self.requests_s[1] / self.requests_s[0], 3)


PUBLISHED = {
    "z-image": Published(0.0, 9, (0.372, 0.422)),
    "flux": Published(3.5, 50, (0.497, 0.554)),
    "qwen-image": Published(1.0, 50, (0.483, 0.725)),
}
MOST_STEPS = 2 if DRY else int(os.environ.get("BENCH_GPU_STEPS", "10"))  # FLUX.1's own take minutes
MODELS_FILE = """
[[model]]
id = "{model}"
source = "{source}"
dtype = "bfloat16"
max_batch = {rows}

[model.defaults]
width = {side}
height = {side}
steps = {steps}
guidance_scale = {guidance}

[model.limits]
multiple_of = 16
max_images = 1
"""


def bodies(model: str, count: int, steps: list[int]) -> Iterator[dict[str, object]]:
    """Yield `count` jobs with different prompts, and steps in turns."""
    for at in range(count):
        text = f"a photo of {at + 1} red boats on a lake in the morning, {model}, {steps[0]}"
        yield {"model": model, "prompt": text, "seed": at, "steps": steps[at % len(steps)]}


async def load(url: str, jobs: Iterator[dict[str, object]], until_s: float) -> Figures:
    """Run clients until there are no more jobs, or `until_s`, and return what they and the worker counted."""
    latencies: list[float] = []
    async with light_client(url) as http, counted(http) as work:

        async def client() -> None:
            for body in jobs:
                began = time.perf_counter()
                await finished(http, body)
                latencies.append(time.perf_counter() - began)
                if time.monotonic() > until_s:
                    return

        started = time.perf_counter()
        await together(CLIENTS, client)
        seconds = time.perf_counter() - started
    return {
        "requests": len(latencies),
        "seconds": round(seconds, 1),
        "req_s": round(len(latencies) / seconds, 3),
        "mean_s": round(statistics.mean(latencies), 2),
        "p99_s": round(statistics.quantiles(latencies, n=100, method="inclusive")[98], 2),
        "rows_per_forward": round(work.rows_per_forward, 2),
        "busy_ms_per_forward": round(1000 * work.busy_s / max(1, work.forwards), 1),
        "idle_while_queued": round(work.idle_share, 4),
    }


def memory_used() -> str:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def measure(stage: Stage, shape: str, url: str) -> None:
    """Load the service with both models, and with jobs of mixed steps."""
    published = PUBLISHED[shape]
    steps = min(MOST_STEPS, published.own_steps)
    common = {"shape": shape, "size": f"{SIDE}x{SIDE}"}
    seen: dict[str, Figures] = {}

    def run(figures: Figures, model: str, chosen: list[int], share: float) -> None:
        asyncio.run(load(url, bodies(model, CLIENTS, [WARM_STEPS]), time.monotonic() + 60))
        until_s = time.monotonic() + share * stage.left_s
        figures |= asyncio.run(load(url, bodies(model, PROMPTS, chosen), until_s))
        figures["memory_used"] = memory_used()
        seen.setdefault(model, figures)

    stage.run(partial(run, model="fused", chosen=[steps], share=0.45), 15, **common, mode="max_batch 8", steps=steps)
    stage.run(partial(run, model="base", chosen=[steps], share=0.8), 12, **common, mode="max_batch 1", steps=steps)
    if len(seen) == 2 and all("req_s" in one for one in seen.values()):
        gain = {name: round(seen["fused"][name] / seen["base"][name], 3) for name in ("req_s", "mean_s", "p99_s")}
        stage.emit(**common, mode="max_batch 8 relative to 1", **gain, sglang_req_s=published.gain)
    mixed = [max(1, steps - steps // 3), steps, steps + steps // 3]
    stage.run(partial(run, model="fused", chosen=mixed, share=0.9), 30, **common, mode="max_batch 8", steps=mixed)


def main(shape: str) -> None:
    stage = Stage(f"served-{shape}")
    with tempfile.TemporaryDirectory(prefix="fusequeue-") as scratch:
        folder = Path(scratch)
        source = save_folder(shape, folder / "model")
        steps, guidance = min(MOST_STEPS, PUBLISHED[shape].own_steps), PUBLISHED[shape].guidance
        fields = {"source": source, "side": SIDE, "steps": steps, "guidance": guidance}
        specs = (MODELS_FILE.format(model=name, rows=rows, **fields) for name, rows in (("base", 1), ("fused", ROWS)))
        (folder / "models.toml").write_text("".join(specs), "utf-8")
        stage.wait_for_turn()
        # Both models have the same weights, which the engine counts twice.
        settings = {"device": DEVICE, "gpu_memory_bytes": str(10**12), "torch_threads": "1" if DRY else "4"}
        # What its processes import at their start lets the worker make the model.
        os.environ["PYTHONPATH"] = os.pathsep.join(str(record.ROOT / name) for name in ("bench/gpu/at_start", "tests"))
        started = time.monotonic()
        with up(folder, "--models", str(folder / "models.toml"), **settings) as url:
            stage.emit(shape=shape, mode="start", seconds=round(time.monotonic() - started, 1))
            measure(stage, shape, url)


if __name__ == "__main__":
    main(sys.argv[1])
