"""`python -m bench.library`: the library's `generate` against the pipeline's own calls, on the CPU.

Equal steps: one call of the pipeline with all prompts. Mixed steps: one call of it per group of equal steps. Turns
alternate; ratios are medians over the turns, above 1 where the library is faster: of the time, and of the CPU time,
which other programs on the machine change less. `--json FILE` saves the figures.
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


CLOCKS = {"speed_vs_pipeline": time.perf_counter, "cpu_vs_pipeline": time.process_time}


def speeds(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, Any]:
    """Return by each clock the median ratio of the second call's time to the first's, and the seconds of both."""
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
    for turn in range(-1, turns):  # the first warms up
        for name, call in sorted(calls.items(), reverse=bool(turn % 2)):
            started = [clock() for clock in CLOCKS.values()]
            call()
            if turn >= 0:
                times[name].append([clock() - at for clock, at in zip(CLOCKS.values(), started, strict=True)])
    fused, plain = times.values()
    ratios = [[slow / fast for fast, slow in zip(*pair, strict=True)] for pair in zip(fused, plain, strict=True)]
    medians = [round(statistics.median(found), 3) for found in zip(*ratios, strict=True)]
    seconds = {name: round(statistics.median(one[0] for one in found), 4) for name, found in times.items()}
    return {**dict(zip(CLOCKS, medians, strict=True)), "seconds": seconds}


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
            figures[name] = {"steps": steps, **speeds(calls, options.turns)}
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
