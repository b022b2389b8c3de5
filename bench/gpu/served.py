"""`python -m bench.gpu.served SHAPE`: the whole service over HTTP, as SGLang-Diffusion measured its own.

Their table (https://github.com/sgl-project/sglang/pull/18764: one H100, 512², 64 prompts, 12 clients) compares one
request at a time with batches of at most 8. Here one `fusequeue up` serves the same weights as two models, with
`max_batch` 8 and 1. Each of 12 clients submits a job, waits for it, fetches the image and submits the next. With fewer
steps than the models' own, the rates change and the gain hardly does.
"""

from __future__ import annotations

import asyncio
import json
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
from typing import Any

from bench.common import record
from bench.common.clients import LightClient, light_client
from bench.gpu.made_models import save_folder
from bench.gpu.stage import DEVICE, DRY, Figures, Stage
from bench.over_http import counters, up

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


async def client(http: LightClient, jobs: Iterator[dict[str, object]], latencies: list[float], until_s: float) -> None:
    """Submit jobs one after another until there are no more, or `time.monotonic()` is `until_s`."""
    for body in jobs:
        started = time.perf_counter()
        job: Any = await http.post("/v1/jobs", body, Prefer="wait=60")
        while job["status"] in ("queued", "running"):
            job = json.loads(await http.get(f"/v1/jobs/{job['id']}?wait=60"))
        if job["status"] != "succeeded":
            raise RuntimeError(f"{job['status']}: {job['error']}")
        await http.get(job["artifacts"][0]["url"])
        latencies.append(time.perf_counter() - started)
        if time.monotonic() > until_s:
            return


async def load(url: str, jobs: Iterator[dict[str, object]], until_s: float) -> Figures:
    """Run the clients, and return what they and the worker counted."""
    latencies: list[float] = []
    async with light_client(url) as http:
        before = await counters(http)
        started = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(client(http, jobs, latencies, until_s))
        seconds = time.perf_counter() - started
        after = await counters(http)
    delta = {name: after[name] - before[name] for name in ("forwards", "forward_rows", "busy_s", "idle_while_queued_s")}
    idle = delta["idle_while_queued_s"]
    return {
        "requests": len(latencies),
        "seconds": round(seconds, 1),
        "req_s": round(len(latencies) / seconds, 3),
        "mean_s": round(statistics.mean(latencies), 2),
        "p99_s": round(statistics.quantiles(latencies, n=100, method="inclusive")[98], 2),
        "rows_per_forward": round(delta["forward_rows"] / max(1, delta["forwards"]), 2),
        "busy_ms_per_forward": round(1000 * delta["busy_s"] / max(1, delta["forwards"]), 1),
        "idle_while_queued": round(idle / max(1e-9, idle + delta["busy_s"]), 4),
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
