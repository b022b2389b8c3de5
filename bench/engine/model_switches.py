"""`python -m bench.engine.model_switches`: a switch to a model with its weights in CPU memory, and from disk.

An engine has memory for one of two models. Jobs of one step alternate between them, so that each waits for a switch:
in turns with weights kept in CPU memory, and with none kept, where the files are in the page cache and where they are
not. The switch is the wait of such a job less that of a job whose model is on the device. On a CPU nothing is copied
for a switch, as CPU and device memory are one; so the copy of all weights to another block of memory, and back, is
measured too: what a device with its own memory needs in addition, at the speed of its bus. `--json FILE` saves the
figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import record
from bench.engine import shapes
from shared.config.models_file import Catalog, Defaults, Limits, ModelSpec
from shared.config.settings import Settings
from shared.job import Job
from worker.engine.engine import Engine
from worker.engine.models.cpu_memory import KeptModel
from worker.engine.pipelines.loading import load, locate
from worker.engine.protocol import EngineEvent, EngineRequest, JobFinished, ModelLoaded

TIMEOUT_S = 300.0
SIDE = 64
MIB = 2**20


class SwitchEvents:
    """The engine's events: ends of jobs, and how often weights came from CPU memory or from disk."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.sources: list[bool] = []

    def on_event(self, event: EngineEvent) -> None:
        if isinstance(event, ModelLoaded):
            self.sources.append(event.from_cpu_memory)
        elif isinstance(event, JobFinished):
            if event.error is not None:
                raise event.error
            self.finished.set()


class SwitchingEngine:
    """An engine with memory for one of `specs`."""

    def __init__(self, specs: Sequence[ModelSpec], device: str, *, kept: bool) -> None:
        self.events = SwitchEvents()
        self._specs = specs
        largest = max(locate(spec)[1] for spec in specs)
        cpu_memory_bytes = 4 * largest if kept else 0
        settings = Settings(device=device, gpu_memory_bytes=int(1.2 * largest), cpu_memory_bytes=cpu_memory_bytes)
        self.engine = Engine(Catalog(tuple(specs)), self.events, settings)
        self._jobs = 0

    def wait_s(self, at: int) -> float:
        """Return the seconds of a job of model `at`."""
        self._jobs += 1
        job = _job(f"job{self._jobs}", self._specs[at].id)
        self.events.finished.clear()
        started = time.monotonic()
        self.engine.submit(EngineRequest(job.id, job, self._specs[at]))
        assert self.events.finished.wait(TIMEOUT_S), "the job has not ended"
        return time.monotonic() - started


def _job(name: str, model: str) -> Job:
    fields = {"id": name, "tenant": "bench", "created_at_ms": 0, "model": model, "prompt": "a boat", "seed": 1}
    return Job.model_validate({**fields, "width": SIDE, "height": SIDE, "steps": 1, "guidance_scale": 1.0})


def forget_files(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure_switches(specs: Sequence[ModelSpec], device: str, repeats: int, *, kept: bool, cached: bool) -> list[float]:
    """Return the seconds of each switch."""
    switching = SwitchingEngine(specs, device, kept=kept)
    switching.engine.start()
    try:
        for at in (0, 1):  # loads that are not measured
            switching.wait_s(at)
        loaded = len(switching.events.sources)
        seconds = []
        for turn in range(repeats):
            if not cached:
                forget_files(Path(specs[0].source))
                forget_files(Path(specs[1].source))
            at = turn % 2
            seconds.append(switching.wait_s(at) - switching.wait_s(at))  # the second one has its model
        assert switching.events.sources[loaded:] == [kept] * repeats, "not the switches that were meant"
        return seconds
    finally:
        switching.engine.stop(TIMEOUT_S)


def measure_copies(spec: ModelSpec, device: str, repeats: int) -> tuple[list[float], list[float], int]:
    """Return the seconds of copies of all weights out of the device's memory and back, and their bytes."""
    model = load(spec, Path(spec.source), torch.device(device))
    out, back = [], []
    for _ in range(repeats):
        kept = KeptModel(model, copies=True)
        kept.move_out()
        out.append(kept.moved_s)
        started = time.monotonic()
        kept.move_back()
        back.append(time.monotonic() - started)
    return out, back, model.nbytes


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    return {"median_s": round(statistics.median(seconds), 4), "all_s": [round(one, 4) for one in seconds]}


def figures_of(specs: Sequence[ModelSpec], device: str, repeats: int) -> dict[str, Any]:
    """Measure, print and return all figures."""
    rows: dict[str, list[float]] = {"CPU memory": [], "disk, page cache": [], "disk": []}
    for _ in range(2):  # in turns, as the machine's speed changes
        rows["CPU memory"] += measure_switches(specs, device, repeats, kept=True, cached=True)
        rows["disk, page cache"] += measure_switches(specs, device, repeats, kept=False, cached=True)
        rows["disk"] += measure_switches(specs, device, repeats, kept=False, cached=False)
    out, back, nbytes = measure_copies(specs[0], device, repeats)
    print(f"{nbytes / MIB:.0f} MiB of weights, {device}\n\n| weights from | switch, s | relative |\n|---|---|---|")
    slowest = statistics.median(rows["disk"])
    for name, seconds in rows.items():
        print(f"| {name} | {statistics.median(seconds):.3f} | {statistics.median(seconds) / slowest:.3f} |")
    print(f"\na copy of the weights: out {statistics.median(out):.3f} s, back {statistics.median(back):.3f} s")
    copies = {"copy out of the device's memory": summary(out), "copy back": summary(back)}
    return {"weights_bytes": nbytes, "device": device, **{name: summary(row) for name, row in rows.items()}, **copies}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="sd", choices=shapes.SHAPES)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--repeats", type=int, default=6, help="switches in each of two turns")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    shapes.disable_progress_bars()
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as folder, torch.no_grad():
        specs = []
        for model in ("one", "two"):  # files of their own: each is as cold as the other
            shapes.save(options.shape, Path(folder) / model)
            limits, defaults = Limits(multiple_of=16, max_images=2), Defaults(width=SIDE, height=SIDE)
            specs.append(ModelSpec(id=model, source=f"{folder}/{model}", limits=limits, defaults=defaults, max_batch=2))
        figures = figures_of(specs, options.device, options.repeats)
    if options.json:
        record.write(options.json, figures, shape=options.shape)


if __name__ == "__main__":
    main()
