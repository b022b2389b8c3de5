"""`python -m bench.gpu.extras`: what a model's keys gain: step caching, attention backends, compiled blocks, float8.

All but float8 with the shape of FLUX.1, float8 with that of SDXL. Seconds are those of the second of two runs of the
same jobs.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine import real_shapes, shapes
from bench.engine.runner import EngineRunner, bench_job, prompt
from bench.gpu.made_models import save_folder, use_made_models
from bench.gpu.speed import Shape, work_of
from bench.gpu.stage import DEVICE, DRY, Figures, Stage, free_memory, peak_gib, synchronize
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.config.step_schedules import Choice, StepCaching
from shared.config.weight_formats import Quantization
from shared.runtime import log

CACHED_STEPS = 14 if DRY else 28
LEVELS: tuple[Choice, ...] = ("off", "medium", "strong")
ROWS = (1, 8)
SMALL, LARGE = (64, 64) if DRY else (512, 1024)
STEPS = 8
BACKENDS = ("native", "_native_flash") if DRY else ("_native_cudnn", "_native_flash")


def second_run_s(shape: Shape, side: int, steps: int, rows: int, **fields: Any) -> float:
    """Return the seconds of the second of two runs."""
    for _ in range(2):
        started = time.perf_counter()
        shape.engine(side, side, [steps] * rows, **fields)
        synchronize()
    return round(time.perf_counter() - started, 2)


def step_caching(shape: Shape, figures: Figures, side: int, rows: int) -> None:
    for level in LEVELS:
        schedule = StepCaching().schedule_of(level)
        figures[f"{level}_s"] = second_run_s(shape, side, CACHED_STEPS, rows, step_cache=schedule)
    figures["medium_gain"] = round(figures["off_s"] / figures["medium_s"], 2)
    figures["strong_gain"] = round(figures["off_s"] / figures["strong_s"], 2)


def times(shape: Shape, figures: Figures) -> None:
    for side, rows in ((SMALL, 1), (SMALL, 8), (LARGE, 1)):
        figures[f"{side}_{rows}_rows_s"] = second_run_s(shape, side, STEPS, rows)


def with_key(folder: Path, figures: Figures, **fields: Any) -> None:
    """Load FLUX.1 with a key of the models file, and time it."""
    shape = Shape("flux", work_of("flux"), folder, **fields)
    try:
        (model,) = shape.runner.models
        figures["load_s"], figures["compiled"] = round(shape.loaded_s, 1), model.compiled
        times(shape, figures)
    finally:
        shape.close()


def float8(folder: Path, figures: Figures) -> None:
    """Time SDXL with its denoiser's weights in float8, against bfloat16, loaded from files by the engine."""
    if not folder.exists():
        shapes.save_pipeline(shapes.small_sd if DRY else real_shapes.real_sdxl, folder, DEVICE, torch.bfloat16)
    for label, quantization in (("bfloat16", None), ("float8", Quantization(denoiser="torchao-fp8"))):
        free_memory()
        spec = ModelSpec(
            id=label,
            source=str(folder),
            dtype="bfloat16",
            quantization=quantization,
            limits=Limits(max_images=1),
            defaults=Defaults(width=SMALL, height=SMALL),
        )
        peak_gib(reset=True)
        started = time.perf_counter()
        runner = EngineRunner(spec, DEVICE, 4)
        try:
            (model,) = runner.models
            figures[f"{label}_load_s"] = round(time.perf_counter() - started, 1)
            figures[f"{label}_gib"] = round(model.nbytes / 2**30, 2)
            figures[f"{label}_solo_reason"] = model.solo_reason
            del model
            for rows in ROWS:
                for turn in range(2):
                    started = time.perf_counter()
                    names = [f"{label}-{rows}-{turn}-{at}" for at in range(rows)]
                    runner.run([bench_job(name, spec, SMALL, prompt(1), seed=1, steps=STEPS) for name in names])
                figures[f"{label}_{rows}_rows_s"] = round(time.perf_counter() - started, 2)
        finally:
            runner.close()


@torch.no_grad()
def main() -> None:
    stage = Stage("extras")
    log.configure("ERROR")
    shapes.disable_progress_bars()
    use_made_models()
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_folder("flux", Path(scratch) / "model")
        stage.wait_for_turn()
        shape = Shape("flux", work_of("flux"), folder)
        stage.run(partial(times, shape), 8, what="FLUX.1 as it is")
        for side, rows in ((LARGE, 1), (SMALL, 8)):
            names = {"what": f"FLUX.1, {CACHED_STEPS} steps, step caching", "size": f"{side}x{side}", "rows": rows}
            stage.run(partial(step_caching, shape, side=side, rows=rows), 15, **names)
        shape.close()
        for backend in BACKENDS:
            stage.run(partial(with_key, folder, attention=backend), 8, what=f'FLUX.1, attention = "{backend}"')
        stage.run(partial(float8, Path(scratch) / "sdxl"), 20, what="SDXL, torchao-fp8")
        stage.run(partial(with_key, folder, compile="blocks"), 25, what="FLUX.1, compiled blocks")


if __name__ == "__main__":
    main()
