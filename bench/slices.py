"""`python -m bench.slices`: how long an interactive job waits behind a long job of another model, with time slices.

Starts `fusequeue up` (Redis, API, one worker with one torch thread and memory for one of two small models) without
slices and with `slice_s`. In each turn a long job runs for a while, then an interactive job of the other model is
submitted; its latency is from request to response, its wait from there to its claim. Figures are in seconds.
`--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.common import record
from bench.common.clients import LightClient, finished, light_client
from bench.common.service import small_pipeline, up

LONG, QUICK, QUICK_STEPS = "long", "quick", 8
POLL_S = 0.05
MODEL = """
[[model]]
id = "{model}"
source = "{source}"
max_batch = 8
slice_s = {slice_s}

[model.defaults]
width = {side}
height = {side}

[model.limits]
max_steps = {steps}
"""


@dataclass(frozen=True)
class Turn:
    """Latency of the interactive job and its wait, total time of the long one, and whether that was put aside."""

    interactive_s: float
    waited_s: float
    long_s: float
    resumed: bool


async def turn(http: LightClient, number: int, steps: int, before_s: float) -> Turn:
    started = time.perf_counter()
    body = {"prompt": f"a circle {number}", "seed": number}
    long = await http.post("/v1/jobs", body | {"model": LONG, "steps": steps})
    await _first_step(http, long["id"])
    await asyncio.sleep(before_s)
    submitted = time.perf_counter()
    quick, _ = await finished(http, body | {"model": QUICK, "steps": QUICK_STEPS, "priority": "interactive"})
    interactive_s = time.perf_counter() - submitted
    while not (job := json.loads(await http.get(f"/v1/jobs/{long['id']}?wait=60")))["finished_at"]:
        pass
    if job["status"] != "succeeded":
        raise RuntimeError(str(job))
    return Turn(interactive_s, _waited_s(quick), time.perf_counter() - started, job["resumed_at_step"] is not None)


def _waited_s(job: dict[str, Any]) -> float:
    """Return the time from the submit of a job to its claim."""
    created, started = (datetime.fromisoformat(job[name]) for name in ("created_at", "started_at"))
    return (started - created).total_seconds()


async def _first_step(http: LightClient, job_id: str) -> None:
    while True:
        job = json.loads(await http.get(f"/v1/jobs/{job_id}"))
        if job["finished_at"]:
            raise RuntimeError(str(job))
        if job["progress"]["step"]:
            return
        await asyncio.sleep(POLL_S)


async def measure(url: str, turns: int, steps: int, before_s: float) -> list[Turn]:
    async with light_client(url) as http:
        for model in (LONG, QUICK):
            await finished(http, {"model": model, "prompt": "a circle", "steps": 2})
        return [await turn(http, number, steps, before_s) for number in range(turns)]


def run(source: Path, slice_s: float, options: argparse.Namespace) -> list[Turn]:
    """Measure a service of its own."""
    weights = sum(file.stat().st_size for file in source.rglob("*.safetensors"))
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        folder, values = Path(scratch), {"source": source, "side": options.side, "steps": options.steps}
        models = folder / "models.toml"
        texts = (MODEL.format(model=model, slice_s=slice_s, **values) for model in (LONG, QUICK))
        models.write_text("".join(texts), "utf-8")
        settings = {"gpu_memory_bytes": str(weights * 3 // 2)}
        with up(folder, "--models", str(models), **settings) as url:
            return asyncio.run(measure(url, options.turns, options.steps, options.before_s))


def figures(turns: list[Turn]) -> dict[str, Any]:
    return {
        "interactive_s": _median_and_longest([one.interactive_s for one in turns]),
        "waited_s": _median_and_longest([one.waited_s for one in turns]),
        "long_s": round(statistics.median(one.long_s for one in turns), 2),
        "put_aside": sum(one.resumed for one in turns),
    }


def _median_and_longest(values: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 2), "longest": round(max(values), 2)}


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=900, help="of the long job")
    parser.add_argument("--side", type=int, default=64, help="of the images, in pixels")
    parser.add_argument("--slice-s", type=float, default=2.0)
    parser.add_argument("--before-s", type=float, default=1.0, help="from the first step to the interactive job")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        source = Path(scratch) / "model"
        small_pipeline(source)
        measured = {name: figures(run(source, slice_s, options)) for name, slice_s in _variants(options.slice_s)}
    counts = {name: vars(options)[name] for name in ("turns", "steps", "side", "slice_s")} | {"threads": 1}
    record.report(options.json, measured, before_s=options.before_s, **counts)


def _variants(slice_s: float) -> tuple[tuple[str, float], ...]:
    return ("without_slices", 0.0), ("with_slices", slice_s)


if __name__ == "__main__":
    main()
