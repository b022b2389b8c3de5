"""`python -m bench.engine.adapters`: what loading adapters costs running jobs, and upload to first image over HTTP.

An image with many steps runs in an engine of this process. Meanwhile jobs of one step come, one after the other: first
200 with one adapter that is loaded, then 200 with an adapter each that is not. Both delay the long job's steps by
their encoding, decoding and rows. Times are CPU times, which depend less on other load: of the engine's thread, which
also attaches adapters, and of the other threads, of which one reads them. What these take during one step is the most
by which a load delays it. The engine holds a few of the adapters at once. Then, against `fusequeue up` with the demo's
model: the time from the upload of an adapter to the last byte of the first image with it, for new adapters, one after
the other. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save, save_file

from bench.common import record
from bench.engine import shapes
from bench.engine.runner import bench_job, prompt
from bench.over_http import up
from shared.config.adapters import Adapter, AdapterSpec
from shared.config.models_file import Catalog, ModelSpec
from shared.config.settings import Settings
from shared.job_fields import Task
from shared.runtime import log
from worker.engine.engine import Engine
from worker.engine.process import SWITCH_INTERVAL_S
from worker.engine.protocol import EngineEvent, EngineRequest, JobFinished, JobProgress

RANK = 16
LAYERS = (".to_q", ".to_k", ".to_v", ".to_out.0")
TIMEOUT_S = 600.0
LONG_STEPS = 900  # a noise schedule has 1,000; the next long job follows


def lora(module: torch.nn.Module, seed: int, component: str = "unet") -> dict[str, torch.Tensor]:
    """Return random weights for the attention of a denoiser."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, torch.nn.Linear) and path.endswith(LAYERS):
            down = torch.randn(RANK, layer.in_features, generator=generator) * layer.in_features**-0.5
            state[f"{component}.{path}.lora_A.weight"] = down
            state[f"{component}.{path}.lora_B.weight"] = (
                torch.randn(layer.out_features, RANK, generator=generator) / RANK
            )
    return state


@dataclass(frozen=True)
class StepFigures:
    """CPU milliseconds of the long job's steps while `jobs` others came: of the engine's thread, and of the others."""

    jobs: int
    steps: int
    median_step_ms: float
    longest_step_ms: float
    median_others_ms: float
    longest_others_ms: float


@dataclass(frozen=True)
class StepTime:
    """When a step of a long job ended: CPU seconds of the engine's thread, and of all threads."""

    job: str
    thread_s: float
    process_s: float


class StepClock:
    """Receives the engine's events on its thread: the steps of the long jobs, and which jobs ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._error: str | None = None
        self.ended: set[str] = set()
        self.steps: list[StepTime] = []

    def on_event(self, event: EngineEvent) -> None:
        with self._changed:
            if isinstance(event, JobProgress) and event.claim_key.startswith("long"):
                self.steps.append(StepTime(event.claim_key, time.thread_time(), time.process_time()))
                self._changed.notify_all()
            if isinstance(event, JobFinished):
                self._error = self._error or (None if event.error is None else event.error.message)
                self.ended.add(event.claim_key)
                self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: self._error is not None or condition(), TIMEOUT_S)
        if self._error or not reached:
            raise RuntimeError(self._error or f"not within {TIMEOUT_S:.0f} s: {what}")


class LoadBenchmark:
    """One engine with a long job."""

    def __init__(self, spec: ModelSpec, side: int, settings: Settings) -> None:
        self._spec, self._side = spec, side
        self._clock = StepClock()
        self._engine = Engine(Catalog((spec,)), self._clock, settings)
        self._engine.start()
        self._engine.warm_up()
        self._long_jobs = 0

    def run(self, name: str, adapters: Sequence[AdapterSpec]) -> StepFigures:
        """Run a job of one step with each of the adapters, one after the other."""
        first = len(self._clock.steps)
        for at, adapter in enumerate(adapters):
            self._keep_long_job()
            job_id = f"{name}-{at}"
            self._submit(job_id, 1, adapter)
            self._clock.wait_until(lambda: job_id in self._clock.ended, f"{job_id} has ended")  # noqa: B023 - at once
        own, others = [], []
        for start, end in itertools.pairwise(self._clock.steps[first:]):
            if start.job == end.job:
                thread_s = end.thread_s - start.thread_s
                own.append(1000 * thread_s)
                others.append(1000 * (end.process_s - start.process_s - thread_s))
        figures = (statistics.median(own), max(own), statistics.median(others), max(others))
        return StepFigures(len(adapters), len(own), *(round(value, 1) for value in figures))

    def close(self) -> None:
        self._engine.release_all()
        self._engine.stop(10)

    def _keep_long_job(self) -> None:
        """Start the next long job if the last one has ended, and wait for its first steps."""
        if self._long_jobs == 0 or f"long-{self._long_jobs}" in self._clock.ended:
            self._long_jobs += 1
            made = len(self._clock.steps)
            self._submit(f"long-{self._long_jobs}", LONG_STEPS)
            self._clock.wait_until(lambda: len(self._clock.steps) >= made + 3, "the long job makes steps")

    def _submit(self, job_id: str, steps: int, adapter: AdapterSpec | None = None) -> None:
        uploaded = () if adapter is None else (adapter,)
        fields = {"adapters": tuple(Adapter(id=one.id) for one in uploaded), "mixed_fields": ("adapters",)}
        job = bench_job(job_id, self._spec, self._side, prompt(0), seed=0, steps=steps, **fields)
        self._engine.submit(EngineRequest(job_id, job, self._spec, adapters=uploaded))


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def measure_loads(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Return the figures with a loaded adapter and with loads, and the longest delay by a load."""
    dtype = getattr(torch, options.dtype)
    shapes.save(options.shape, folder / "model", options.device, dtype)
    pipeline = DiffusionPipeline.from_pretrained(folder / "model")
    adapters = []
    for at in range(options.adapters + 1):
        file = folder / "adapters" / str(at) / "adapter.safetensors"
        file.parent.mkdir(parents=True)
        save_file({name: tensor.to(dtype) for name, tensor in lora(pipeline.unet, at).items()}, file)
        adapters.append(AdapterSpec(id=f"adapter-{at}", source=str(file)))
    layers, size = len(lora(pipeline.unet, 0)) // 2, adapters[0]
    nbytes = Path(size.source).stat().st_size
    spec = ModelSpec(
        id="bench", source=str(folder / "model"), dtype=options.dtype, max_batch=8, tasks=(Task.TEXT_TO_IMAGE,)
    )
    settings = Settings(
        device=options.device, torch_threads=options.threads, adapter_memory_bytes=max(1, options.held * nbytes)
    )
    benchmark = LoadBenchmark(spec, options.side, settings)
    benchmark.run("first", adapters[:1])
    loaded = benchmark.run("loaded", adapters[:1] * options.adapters)
    loading = benchmark.run("loading", adapters[1:])
    again = benchmark.run("again", adapters[1 : 1 + options.adapters // 4])  # evicted: loaded a second time
    benchmark.close()
    attaching_ms = max(0.0, loading.longest_step_ms - loaded.longest_step_ms)
    return {
        "layers": layers,
        "adapter_bytes": nbytes,
        "held_at_once": options.held,
        "loaded": asdict(loaded),
        "loading": asdict(loading),
        "loading_again": asdict(again),
        "longest_delay_by_a_load_ms": round(attaching_ms + loading.longest_others_ms, 1),
    }


def measure_uploads(count: int, folder: Path) -> dict[str, object]:
    """Return the seconds from the start of an upload to the image, and to the response of the upload."""
    unet = DiffusionPipeline.from_pretrained(record.ROOT / "demo" / "model").unet
    uploads, totals = [], []
    with up(folder) as url, httpx.Client(base_url=url, timeout=60) as http:
        for seed in range(count):
            file = save(lora(unet, seed))
            started = time.perf_counter()
            files = {"file": ("adapter.safetensors", file)}
            made = http.post("/v1/adapters", files=files, data={"model": "demo"}).raise_for_status().json()
            uploads.append(round(time.perf_counter() - started, 3))
            body = {"model": "demo", "prompt": "a red circle", "adapters": [{"id": made["id"]}]}
            job = http.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"}).raise_for_status().json()
            if job["status"] != "succeeded":
                raise RuntimeError(str(job["error"]))
            http.get(f"/v1/jobs/{job['id']}/artifacts/0", follow_redirects=True).raise_for_status()
            totals.append(round(time.perf_counter() - started, 3))
    return {
        "adapter_bytes": len(file),
        "upload_s": uploads,
        "upload_to_image_s": totals,
        "median_upload_to_image_s": round(statistics.median(totals), 3),
        "longest_upload_to_image_s": max(totals),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="sd")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--held", type=int, default=32, help="adapters in the device's memory at once")
    parser.add_argument("--uploads", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    shapes.disable_progress_bars()
    log.configure("WARNING")  # else a line for each load
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in a worker's engine process
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        figures["loads"] = measure_loads(options, Path(folder))
        print(figures["loads"], flush=True)
    if options.uploads:
        with tempfile.TemporaryDirectory() as folder:
            figures["uploads"] = measure_uploads(options.uploads, Path(folder))
            print(figures["uploads"], flush=True)
    if options.json:
        record.write(options.json, figures, dtype=options.dtype)


if __name__ == "__main__":
    main()
