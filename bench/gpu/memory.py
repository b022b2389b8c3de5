"""`python -m bench.gpu.memory`: models that take turns in memory, offloading, running out of memory, adapters.

The model has the shape of Stable Diffusion 1.5 in bfloat16; its weights are written and read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.adapters import adapters_of, denoiser, load_pipeline, spec_with
from harness.engine import EngineHarness, a_job, a_spec
from parity.running import as_floats
from tiny import lora, registry

from bench.engine import real_shapes, shapes
from bench.gpu.stage import DEVICE, DRY, Figures, Stage, free_memory, peak_gib
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.runtime import log
from shared.tasks import Task
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.pipelines.loading import locate
from worker.engine.protocol import ForwardRetried, MemoryExhausted, ModelLoaded

SHAPE, SIDE = ("sd", 64) if DRY else ("sd15", 512)
ROWS = 8
STEPS = 6
GIB = 2**30


def spec_of(folder: Path, model: str = "one", **fields: Any) -> ModelSpec:
    defaults = Defaults(width=SIDE, height=SIDE, steps=STEPS)
    values = {"dtype": "bfloat16", "tasks": (Task.TEXT_TO_IMAGE,), "limits": Limits(multiple_of=8)}
    spec: ModelSpec = a_spec(folder, model=model, defaults=defaults, **(values | fields))
    return spec


def job(name: str, model: str = "one", seed: int = 7, **fields: Any) -> Any:
    return a_job(name, model=model, seed=seed, width=SIDE, height=SIDE, steps=STEPS, prompt="a boat", **fields)


def run(harness: EngineHarness, names: Sequence[str], **fields: Any) -> list[np.ndarray[Any, Any]]:
    """Run jobs together, with seeds in order, and return their images."""
    harness.submit(*(job(name, seed=at, **fields) for at, name in enumerate(names)))
    harness.recorder.wait_for(names)
    for name in names:
        if (error := harness.recorder.finished[name].error) is not None:
            raise RuntimeError(f"{name}: {error.message}")
    return [harness.recorder.images[name, 0] for name in names]


def difference(ones: Sequence[Any], others: Sequence[Any]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ones, others, strict=True))


def taking_turns(folder: Path, figures: Figures) -> None:
    """Two models where one fits: the first leaves for CPU memory, and comes back."""
    specs = [spec_of(folder, "one"), spec_of(folder, "two")]
    nbytes = locate(specs[0])[1]
    harness = EngineHarness(*specs, device=DEVICE, gpu_memory_bytes=int(1.2 * nbytes), cpu_memory_bytes=16 * GIB)
    with harness.started():
        images = [run(harness, [f"job{at}"], model=model)[0] for at, model in enumerate(("one", "two", "one"))]
    loads = [one for one in harness.recorder.model_events if isinstance(one, ModelLoaded)]
    figures["gib"] = round(nbytes / GIB, 2)
    figures["loads"] = [(one.model, "CPU memory" if one.from_cpu_memory else "files") for one in loads]
    figures["load_s"] = [round(one.seconds, 2) for one in loads]
    figures["back_gb_s"] = round(nbytes / loads[-1].seconds / 1e9, 1)
    figures["again"] = "bit-identical" if difference(images[:1], images[2:]) == 0 else "differs"


def offloaded(folder: Path, figures: Figures) -> None:
    """The blocks of the model in CPU memory, against all of it on the device."""
    images, seconds = {}, {}
    for offload in ("none", "group"):
        free_memory()
        harness = EngineHarness(spec_of(folder, offload=offload), device=DEVICE)
        with harness.started():
            peak_gib(reset=True)
            images[offload] = run(harness, ["first"]) + run(harness, [f"job{at}" for at in range(4)])
            figures[f"{offload}_peak_gib"] = peak_gib()
        seconds[offload] = sum(harness.recorder.finished[f"job{at}"].device_seconds for at in range(4))
        del harness  # and its model
    figures["difference"] = f"{difference(images['none'], images['group']):.1e}"
    figures["slower"] = round(seconds["group"] / seconds["none"], 2)


@contextmanager
def scarce_memory(limit_bytes: int) -> Iterator[None]:
    """Let forwards run out of memory above a limit; on a CPU, those of more than three images."""
    if not DRY:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)
        return
    real = SharedMethod.run

    def run(method: SharedMethod, *args: Any, **kwargs: Any) -> Any:
        if method.component == "unet" and method.bind(args, kwargs)["sample"].shape[0] > 6:
            raise torch.OutOfMemoryError("as the benchmark says")
        return real(method, *args, **kwargs)

    SharedMethod.run = run  # type: ignore[method-assign,assignment]
    yield
    SharedMethod.run = real  # type: ignore[method-assign]


def out_of_memory(folder: Path, figures: Figures) -> None:
    """Eight jobs where memory is short for their forward: all must succeed, in smaller ones."""
    harness = EngineHarness(spec_of(folder), device=DEVICE)
    names = [f"job{at}" for at in range(ROWS)]
    with harness.started():
        run(harness, ["first"])
        peak_gib(reset=True)
        run(harness, ["one"])
        alone = peak_gib(reset=True) or 0.0
        plenty = run(harness, names)
        together = peak_gib(reset=True) or 0.0
        figures["one_row_gib"], figures["eight_rows_gib"] = alone, together
        started = len(harness.recorder.rows)
        with scarce_memory(int((alone + 0.35 * (together - alone)) * GIB)):
            scarce = run(harness, [f"scarce-{name}" for name in names])
        figures["rows"] = harness.recorder.rows[started:]
    events = harness.recorder.model_events
    figures["exhausted"] = sum(isinstance(one, MemoryExhausted) for one in events)
    figures["retried"] = sum(one.retries for one in events if isinstance(one, ForwardRetried))
    figures["difference"] = f"{difference(plenty, scarce):.1e}"


def adapters_per_row(family: str, folder: Path, figures: Figures) -> None:
    """Jobs with different adapters in one forward, against each by itself, in float32."""
    source = registry.save_tiny(family, folder / family)
    pipeline = load_pipeline(source)
    names = ("ink", "oil", "neon")
    files = {
        name: lora.save(pipeline, folder / name / "a.safetensors", at, (denoiser(pipeline),))
        for at, name in enumerate(names)
    }
    harness = EngineHarness(spec_with(source, files, tasks=(Task.TEXT_TO_IMAGE,)), device=DEVICE)
    chosen = [(), *(((name, 1.0),) for name in names), (("ink", 0.5), ("oil", -0.7))]
    rounds = {
        name: [
            a_job(f"{name}-{at}", prompt=f"boat {at}", seed=at, adapters=adapters_of(*one), mixed_fields=("adapters",))
            for at, one in enumerate(chosen)
        ]
        for name in ("load", "fused", "solo")
    }
    with harness.started():
        for together in [rounds["load"], rounds["fused"], *([one] for one in rounds["solo"])]:
            harness.submit(*together)
            harness.recorder.wait_for([one.id for one in together])
    errors = [one.error.message for one in harness.recorder.finished.values() if one.error is not None]
    if errors:
        raise RuntimeError(errors[0])
    fused, solo = ([harness.recorder.images[one.id, 0] for one in rounds[name]] for name in ("fused", "solo"))
    figures["rows"] = max(harness.recorder.rows)
    figures["difference"] = f"{difference(fused, solo):.1e}"


def main() -> None:
    stage = Stage("memory")
    log.configure("WARNING")
    shapes.disable_progress_bars()
    stage.wait_for_turn()
    with tempfile.TemporaryDirectory() as scratch, as_floats():
        folder = Path(scratch)
        build = shapes.SHAPES[SHAPE] if DRY else real_shapes.REAL_SHAPES[SHAPE]
        shapes.save_pipeline(build, folder / "model", DEVICE, torch.bfloat16)
        stage.run(partial(taking_turns, folder / "model"), 15, what="two models, memory for one")
        stage.run(partial(out_of_memory, folder / "model"), 15, what="out of memory")
        stage.run(partial(offloaded, folder / "model"), 15, what='offload = "group"')
        for family in ("sd",) if DRY else ("sd", "flux"):
            stage.run(partial(adapters_per_row, family, folder), 8, what=f"adapters per row, {family}")


if __name__ == "__main__":
    main()
