"""`python -m bench.engine`: fused jobs compared with the pipeline's batched call and with one call per image.

All run in one process on the same weights, in turns of alternating order. Ratios are medians over the turns, of wall
time and of CPU time, which depends less on other load. `--json FILE` saves the figures. Runs on the CPU; `bench.gpu`
measures models of real size on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from bench.common import record
from bench.engine import shapes
from bench.engine.runner import GUIDANCE, EngineRunner, bench_job, prompt
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.job import Job


@dataclass(frozen=True)
class EngineCase:
    """What is measured: `rows` images of a model, `side` by `side` pixels."""

    model: str
    side: int
    steps: int
    rows: int


@dataclass(frozen=True)
class EngineResult:
    """Medians in milliseconds for all images of the case; a ratio above 1 means that fused jobs are faster."""

    model: str
    side: int
    steps: int
    rows: int
    repeats: int
    fused_ms: float
    pipeline_batch_ms: float
    one_by_one_ms: float
    speed_vs_pipeline_batch: float
    speed_vs_pipeline_batch_cpu: float
    speed_vs_one_by_one: float
    rows_per_forward: float

    def __str__(self) -> str:
        return (
            f"{self.model:5} {self.side}² {self.steps:3} steps x {self.rows}: fused {self.fused_ms:7.1f} ms, "
            f"pipeline's batched call {self.pipeline_batch_ms:7.1f} ms, one by one {self.one_by_one_ms:7.1f} ms; "
            f"{self.speed_vs_pipeline_batch:.3f} x that call (CPU time: {self.speed_vs_pipeline_batch_cpu:.3f}), "
            f"{self.speed_vs_one_by_one:.2f} x one by one; {self.rows_per_forward:.1f} rows per forward"
        )


def jobs_of(case: EngineCase, spec: ModelSpec, turn: int) -> list[Job]:
    """Return the jobs of a case, with new texts in each turn, so that none is cached."""
    return [
        bench_job(f"job-{turn}-{at}", spec, case.side, f"{prompt(at)}, {turn}", seed=at, steps=case.steps)
        for at in range(case.rows)
    ]


def call(pipeline: Any, rows: range, side: int, steps: int) -> None:
    """Call a pipeline for a batch of `rows` images and copy them to the host."""
    images = pipeline(
        [prompt(at) for at in rows],
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        width=side,
        height=side,
        generator=[torch.Generator().manual_seed(at) for at in rows],
        output_type="pt",
    ).images
    (images.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()


def one_by_one(pipeline: Any, case: EngineCase) -> None:
    for at in range(case.rows):
        call(pipeline, range(at, at + 1), case.side, case.steps)


def ratio(times: dict[str, list[float]], other: str) -> float:
    """Return the speedup of fused jobs over another method: the median over turns."""
    return round(statistics.median(slow / fast for slow, fast in zip(times[other], times["fused"], strict=True)), 3)


def measure(case: EngineCase, pipeline: Any, runner: EngineRunner, repeats: int) -> EngineResult:
    """Return the medians for one case."""
    methods: dict[str, Callable[[int], None]] = {
        "fused": lambda turn: runner.run(jobs_of(case, runner.spec, turn)),
        "batch": lambda _turn: call(pipeline, range(case.rows), case.side, case.steps),
        "single": lambda _turn: one_by_one(pipeline, case),
    }
    wall: dict[str, list[float]] = {name: [] for name in methods}
    cpu: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(-1, repeats):  # the first warms up
        if turn == 0:
            runner.rows.clear()
        for name, method in sorted(methods.items(), reverse=bool(turn % 2)):
            started, cpu_started = time.perf_counter(), time.process_time()
            method(turn)
            if turn >= 0:
                wall[name].append(1000 * (time.perf_counter() - started))
                cpu[name].append(1000 * (time.process_time() - cpu_started))
    fused, batch, single = (statistics.median(wall[name]) for name in methods)
    return EngineResult(
        **asdict(case),
        repeats=repeats,
        fused_ms=round(fused, 1),
        pipeline_batch_ms=round(batch, 1),
        one_by_one_ms=round(single, 1),
        speed_vs_pipeline_batch=ratio(wall, "batch"),
        speed_vs_pipeline_batch_cpu=ratio(cpu, "batch"),
        speed_vs_one_by_one=ratio(wall, "single"),
        rows_per_forward=round(statistics.mean(runner.rows), 2),
    )


def measure_model(model: str, folder: Path, options: argparse.Namespace) -> list[EngineResult]:
    """Measure all cases of one model and print each result."""
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    limits = Limits(max_images=1)
    spec = ModelSpec(id=model, source=str(folder), max_batch=options.rows, dtype="float32", limits=limits)
    runner = EngineRunner(spec, "cpu", options.threads)
    results = []
    try:
        for side in options.sides:
            for steps in options.steps:
                results.append(measure(EngineCase(model, side, steps, options.rows), pipeline, runner, options.repeats))
                print(results[-1], flush=True)
    finally:
        runner.close()
    return results


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=[*shapes.SHAPES, "demo"], default=["sd", "flux", "demo"])
    parser.add_argument("--sides", type=int, nargs="+", default=[64], help="pixels")
    parser.add_argument("--steps", type=int, nargs="+", default=[8, 20])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Measure all chosen models."""
    options = parse_options(argv)
    torch.set_num_threads(options.threads)
    shapes.disable_progress_bars()
    results: list[EngineResult] = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = record.ROOT / "demo/model" if model == "demo" else Path(scratch)
            if model != "demo":
                shapes.save(model, folder)
            results += measure_model(model, folder, options)
        if options.json:  # after each model: an interrupted run keeps its results
            figures = [asdict(result) for result in results]
            record.write(options.json, {"results": figures}, threads=options.threads)


if __name__ == "__main__":
    main()
