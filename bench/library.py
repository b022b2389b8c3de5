"""`python -m bench.library`: the library's `generate` against the pipeline's own calls, on the CPU.

Equal steps: one call of the pipeline with all prompts. Mixed steps: one call of it per group of equal steps. Turns
alternate; ratios are medians over the turns, above 1 where the library is faster. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from bench.common import record
from bench.engine import shapes
from bench.engine.runner import prompt
from library import Engine

GUIDANCE = 4.0


def pipeline_calls(pipeline: Any, side: int, steps: Sequence[int]) -> None:
    """Call the pipeline once per group of equal steps."""
    for count, group in groupby(sorted(steps)):
        texts = [prompt(at) for at, _ in enumerate(group)]
        pipeline(texts, num_inference_steps=count, guidance_scale=GUIDANCE, width=side, height=side)


def speeds(calls: dict[str, Callable[[], Any]], turns: int) -> tuple[float, dict[str, float]]:
    """Return the median ratio of the second call's time to the first's, and the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, turns):  # the first warms up
        for name, call in sorted(calls.items(), reverse=bool(turn % 2)):
            started = time.perf_counter()
            call()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    fused, plain = seconds.values()
    ratios = [slow / fast for fast, slow in zip(fused, plain, strict=True)]
    return statistics.median(ratios), {name: round(statistics.median(found), 4) for name, found in seconds.items()}


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    rows, side = options.rows, options.side
    mixed = [options.steps - options.steps // 2 * at // rows for at in range(rows)]
    figures: dict[str, Any] = {"rows": rows, "side": side}
    with Engine(folder, device="cpu", max_batch=rows) as engine:
        for name, steps in (("equal", [options.steps] * rows), ("mixed", mixed)):
            items = [{"prompt": prompt(at), "steps": count, "seed": at} for at, count in enumerate(steps)]
            calls: dict[str, Callable[[], Any]] = {
                "library": partial(
                    engine.generate, items, progress=False, width=side, height=side, guidance_scale=GUIDANCE
                ),
                "pipeline": partial(pipeline_calls, pipeline, side, steps),
            }
            ratio, seconds = speeds(calls, options.turns)
            figures[name] = {"steps": steps, "speed_vs_pipeline": round(ratio, 3), "seconds": seconds}
    return figures


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*shapes.SHAPES], default="sd")
    parser.add_argument("--side", type=int, default=64, help="pixels")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="most steps; mixed ones have half of them to all")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes.disable_progress_bars()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shapes.save(options.shape, folder)
        record.report(options.json, measure(folder, options), threads=options.threads)


if __name__ == "__main__":
    main()
