"""`python -m bench.engine`: fused jobs against the pipeline's own batched call, and against one call a picture.

All in one process, on the same weights, in turns whose order alternates. Ratios are medians over the turns, of wall
time and of the processor time that the process used, which minds other load less. `--gpu` measures models of real
size, with random weights, at 512² and 1024²; each of its settings can be given another value. `--json FILE` keeps
the figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from bench import record, shapes
from shared.config.models_file import Catalog, Limits, ModelSpec
from shared.config.settings import Settings
from shared.job import Job
from worker.engine import EngineEvent, EngineRequest, ForwardDone, JobFinished
from worker.engine.engine import Engine

GUIDANCE = 5.0
PATIENCE_S = 600.0
CPU_PRESET: dict[str, Any] = {
    "device": "cpu",
    "models": ["sd", "flux", "demo"],
    "sides": [64],
    "steps": [8, 20],
    "repeats": 9,
    "dtype": "float32",
}
GPU_PRESET: dict[str, Any] = {
    "device": "cuda",
    "models": ["sd15", "sdxl", "sd3"],
    "sides": [512, 1024],
    "steps": [20],
    "repeats": 3,
    "dtype": "bfloat16",
    "json": record.ROOT / "bench/results/engine-gpu.json",
}


@dataclass(frozen=True)
class Case:
    """What is measured: `rows` pictures of a model, `side` by `side` pixels."""

    model: str
    side: int
    steps: int
    rows: int


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds for all pictures of the case; a ratio above 1 means that fused jobs are faster."""

    model: str
    side: int
    steps: int
    rows: int
    repeats: int
    fused_ms: float
    own_batch_ms: float
    one_by_one_ms: float
    against_own_batch: float
    against_own_batch_cpu: float
    against_one_by_one: float
    rows_a_forward: float

    def __str__(self) -> str:
        return (
            f"{self.model:5} {self.side}² {self.steps:3} steps x {self.rows}: fused {self.fused_ms:7.1f} ms, own "
            f"batched call {self.own_batch_ms:7.1f} ms, one by one {self.one_by_one_ms:7.1f} ms; of that call's speed "
            f"{self.against_own_batch:.3f} (by processor time {self.against_own_batch_cpu:.3f}), "
            f"{self.against_one_by_one:.2f} x one by one; {self.rows_a_forward:.1f} rows a forward"
        )


class Hall:
    """Seats jobs in an engine and waits until all have finished; the engine's listener."""

    def __init__(self, spec: ModelSpec, device: str, threads: int) -> None:
        self._spec = spec
        self._left = 0
        self._done = threading.Event()
        self._errors: list[str] = []
        self.rows: list[int] = []
        self._engine = Engine(Catalog((spec,)), self, Settings(torch_threads=threads, device=device))
        self._engine.start()
        self._engine.warm_up()

    def run(self, case: Case, turn: int) -> None:
        """Run a case's jobs; raises `RuntimeError` when one fails, or none ends for long."""
        self._left = case.rows
        self._done.clear()
        jobs = [
            Job(
                id=f"job-{turn}-{at}",
                tenant="bench",
                created_at_ms=0,
                model=self._spec.id,
                width=case.side,
                height=case.side,
                prompt=f"{prompt(at)}, {turn}",  # no text is encoded already
                seed=at,
                steps=case.steps,
                guidance_scale=GUIDANCE,
            )
            for at in range(case.rows)
        ]
        self._engine.submit(*(EngineRequest(job.id, job, self._spec) for job in jobs))
        if not self._done.wait(PATIENCE_S):
            raise RuntimeError(f"{case} did not end in {PATIENCE_S:.0f} s")
        if self._errors:
            raise RuntimeError(f"{case}: {self._errors[0]}")

    def close(self) -> None:
        self._engine.stop(10)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case ForwardDone(rows=rows):
                self.rows.append(rows)
            case JobFinished(error=error):
                if error is not None:
                    self._errors.append(error.message)
                self._left -= 1
                if not self._left:
                    self._done.set()


def prompt(at: int) -> str:
    """Return the prompt of a picture, another for each."""
    return f"a red circle on a blue ground, number {at}"


def call(pipeline: Any, rows: range, side: int, steps: int) -> None:
    """Call a pipeline as it is meant to be called, for `rows` pictures at once, and bring them to the host."""
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


def one_by_one(pipeline: Any, case: Case) -> None:
    for at in range(case.rows):
        call(pipeline, range(at, at + 1), case.side, case.steps)


def ratio(times: dict[str, list[float]], other: str) -> float:
    """Return how many times faster fused jobs were than the other way: the median over turns."""
    return round(statistics.median(slow / fast for slow, fast in zip(times[other], times["fused"], strict=True)), 3)


def measure(case: Case, pipeline: Any, hall: Hall, repeats: int) -> Result:
    """Return the medians for one case."""
    ways: dict[str, Callable[[int], None]] = {
        "fused": lambda turn: hall.run(case, turn),
        "own": lambda _turn: call(pipeline, range(case.rows), case.side, case.steps),
        "single": lambda _turn: one_by_one(pipeline, case),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, repeats):  # the first is to warm up
        if turn == 0:
            hall.rows.clear()
        for name, way in sorted(ways.items(), reverse=bool(turn % 2)):
            started, used_before = time.perf_counter(), time.process_time()
            way(turn)
            if turn >= 0:
                wall[name].append(1000 * (time.perf_counter() - started))
                used[name].append(1000 * (time.process_time() - used_before))
    fused, own, single = (statistics.median(wall[name]) for name in ways)
    return Result(
        **asdict(case),
        repeats=repeats,
        fused_ms=round(fused, 1),
        own_batch_ms=round(own, 1),
        one_by_one_ms=round(single, 1),
        against_own_batch=ratio(wall, "own"),
        against_own_batch_cpu=ratio(used, "own"),
        against_one_by_one=ratio(wall, "single"),
        rows_a_forward=round(statistics.mean(hall.rows), 2),
    )


def measure_model(model: str, folder: Path, chosen: argparse.Namespace) -> list[Result]:
    """Measure all cases of one model, telling each as it is known."""
    pipeline: Any = DiffusionPipeline.from_pretrained(
        folder, local_files_only=True, dtype=getattr(torch, chosen.dtype)
    ).to(chosen.device)
    pipeline.set_progress_bar_config(disable=True)
    limits = Limits(max_images=1)
    spec = ModelSpec(id=model, source=str(folder), max_batch=chosen.rows, dtype=chosen.dtype, limits=limits)
    hall = Hall(spec, chosen.device, chosen.threads)
    results = []
    try:
        for side in chosen.sides:
            for steps in chosen.steps:
                results.append(measure(Case(model, side, steps, chosen.rows), pipeline, hall, chosen.repeats))
                print(results[-1], flush=True)
    finally:
        hall.close()
    return results


def arguments(line: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what it does not say is as the preset has it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="models of real size on a GPU; keeps bench/results")
    parser.add_argument("--device")
    parser.add_argument("--models", nargs="+", choices=[*shapes.SHAPES, "demo"])
    parser.add_argument("--sides", type=int, nargs="+", help="pixels")
    parser.add_argument("--steps", type=int, nargs="+")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(line)
    for name, value in (GPU_PRESET if chosen.gpu else CPU_PRESET).items():
        if getattr(chosen, name, None) is None:
            setattr(chosen, name, value)
    return chosen


@torch.no_grad()
def main(line: list[str] | None = None) -> None:
    """Measure what the command line asks for."""
    chosen = arguments(line)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("bench.engine: torch sees no CUDA device here; --device cpu measures small shapes")
    torch.set_num_threads(chosen.threads)
    shapes.hush()
    results: list[Result] = []
    for model in chosen.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = record.ROOT / "demo/model" if model == "demo" else Path(scratch)
            if model != "demo":
                shapes.save(model, folder, chosen.device, getattr(torch, chosen.dtype))
            results += measure_model(model, folder, chosen)
        if chosen.device.startswith("cuda"):
            torch.cuda.empty_cache()
        if chosen.json:  # after each: a run that is cut off leaves what it has measured
            measured = [asdict(one) for one in results]
            record.write(chosen.json, {"results": measured}, threads=chosen.threads, dtype=chosen.dtype)


if __name__ == "__main__":
    main()
