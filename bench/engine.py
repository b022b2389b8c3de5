"""`python -m bench.engine`: fused jobs against the pipeline's own batched call, and against one call a picture.

All in one process, on the same weights, in turns whose order alternates. Ratios are medians over the turns, of wall
time and of the processor time that the process used, which minds other load less. `--json FILE` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import platform
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

from shared.catalog import Catalog, ModelSpec
from shared.job import Job
from shared.settings import Settings
from worker.engine import Engine, Finished, ForwardFacts, Pixels, Seat

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import factory  # noqa: E402  # the tests' tiny pipelines

ROWS = 8
SIDE = 64
GUIDANCE = 5.0
# About 30 ms a forward of 16 rows on one thread: small enough for overheads to show.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sd": ("sd", {"channels": (64, 128)}),
    "flux": ("flux", {"heads": 4, "layers": 1}),
}


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds for `ROWS` pictures; a ratio above 1 means that fused jobs are faster."""

    model: str
    steps: int
    repeats: int
    fused_ms: float
    own_batch_ms: float
    one_by_one_ms: float
    against_own_batch: float
    against_own_batch_cpu: float
    against_one_by_one: float


class Hall:
    """Seats jobs in an engine and waits until all have finished."""

    def __init__(self, spec: ModelSpec, threads: int) -> None:
        self._spec = spec
        self._left = 0
        self._done = threading.Event()
        self.rows: list[int] = []
        self._engine = Engine(Catalog((spec,)), self, Settings(torch_threads=threads))
        self._engine.start()
        self._engine.warm_up()

    def run(self, steps: int, turn: int) -> None:
        self._left = ROWS
        self._done.clear()
        for at in range(ROWS):
            job = Job(
                id=f"job-{turn}-{at}",
                tenant="bench",
                created_at_ms=0,
                model=self._spec.id,
                width=SIDE,
                height=SIDE,
                prompt=prompt(at),
                seed=at,
                steps=steps,
                guidance_scale=GUIDANCE,
            )
            self._engine.seat(Seat(job.id, job, self._spec))
        self._done.wait()

    def close(self) -> None:
        self._engine.stop(10)

    def loading(self, key: str) -> None: ...

    def progress(self, key: str, step: int, total: int) -> None: ...

    def decoding(self, key: str) -> None: ...

    def picture(self, key: str, index: int, pixels: Pixels, flagged: bool) -> None: ...

    def finished(self, key: str, finished: Finished) -> None:
        if finished.error is not None:
            print(finished.error.message, file=sys.stderr)
        self._left -= 1
        if not self._left:
            self._done.set()

    def forward(self, facts: ForwardFacts) -> None:
        self.rows.append(facts.rows)


def prompt(at: int) -> str:
    return f"a red circle on a blue ground, number {at}"


def call(pipeline: Any, rows: range, steps: int) -> None:
    """Call a pipeline as it is meant to be called, for `rows` pictures at once, and bring them to the host."""
    images = pipeline(
        [prompt(at) for at in rows],
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        width=SIDE,
        height=SIDE,
        generator=[torch.Generator().manual_seed(at) for at in rows],
        output_type="pt",
    ).images
    (images.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()


def one_by_one(pipeline: Any, steps: int) -> None:
    for at in range(ROWS):
        call(pipeline, range(at, at + 1), steps)


def ratio(times: dict[str, list[float]], other: str) -> float:
    """Return how many times faster fused jobs were than the other way: the median over turns."""
    return round(statistics.median(slow / fast for slow, fast in zip(times[other], times["fused"], strict=True)), 3)


def measure(model: str, folder: Path, steps: int, repeats: int, threads: int) -> Result:
    """Return the medians for one model and number of steps."""
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    hall = Hall(ModelSpec(id=model, source=str(folder), max_batch=ROWS), threads)
    ways: dict[str, Callable[[int], None]] = {
        "fused": lambda turn: hall.run(steps, turn),
        "own": lambda _turn: call(pipeline, range(ROWS), steps),
        "single": lambda _turn: one_by_one(pipeline, steps),
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, repeats):  # the first is to warm up
        for name, way in sorted(ways.items(), reverse=bool(turn % 2)):
            started, used_before = time.perf_counter(), time.process_time()
            way(turn)
            if turn >= 0:
                wall[name].append(1000 * (time.perf_counter() - started))
                used[name].append(1000 * (time.process_time() - used_before))
    hall.close()
    if statistics.mean(hall.rows) < 0.9 * ROWS:
        print(f"{model}: only {statistics.mean(hall.rows):.1f} rows a forward", file=sys.stderr)
    fused, own, single = (statistics.median(wall[name]) for name in ways)
    return Result(
        model=model,
        steps=steps,
        repeats=repeats,
        fused_ms=round(fused, 1),
        own_batch_ms=round(own, 1),
        one_by_one_ms=round(single, 1),
        against_own_batch=ratio(wall, "own"),
        against_own_batch_cpu=ratio(used, "own"),
        against_one_by_one=ratio(wall, "single"),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=9)
    arguments.add_argument("--steps", type=int, nargs="+", default=[8, 20])
    arguments.add_argument("--models", nargs="+", default=["sd", "flux", "demo"])
    arguments.add_argument("--json", type=Path)
    chosen = arguments.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.set_grad_enabled(False)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in chosen.models:
            folder = ROOT / "demo/model" if model == "demo" else Path(scratch, model)
            if model in SHAPES:
                family, sizes = SHAPES[model]
                factory.save(family, folder, **sizes)
            for steps in chosen.steps:
                result = measure(model, folder, steps, chosen.repeats, chosen.threads)
                results.append(result)
                print(
                    f"{model:5} {steps:3} steps x {ROWS}: fused {result.fused_ms:7.1f} ms, own batched call "
                    f"{result.own_batch_ms:7.1f} ms, one by one {result.one_by_one_ms:7.1f} ms; of that call's "
                    f"speed {result.against_own_batch:.3f} (by processor time {result.against_own_batch_cpu:.3f}), "
                    f"{result.against_one_by_one:.2f} x one by one",
                    flush=True,
                )
    if chosen.json:
        about = {"python": platform.python_version(), "torch": torch.__version__, "threads": chosen.threads}
        about |= {"machine": platform.processor() or platform.machine()}
        chosen.json.write_text(json.dumps({"about": about, "results": [asdict(one) for one in results]}, indent=1))


if __name__ == "__main__":
    main()
