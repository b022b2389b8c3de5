"""Metrics of claims, jobs and the engine, and those read at each scrape (GPU thread, GPU)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog

from shared.job import State
from shared.job_record import Outcome
from shared.queue import Claim
from shared.queue.maintenance.tenant_usage import used_by
from shared.runtime import metrics
from worker.engine import protocol
from worker.engine.engine_status import EngineStatus, ThreadTime
from worker.engine.protocol import ModelEvent

log = structlog.get_logger()

NVML_TIMEOUT_S = 2.0

for _attempt in ("first", "again", "solo"):
    metrics.claims.labels(_attempt)  # from 0 on: Prometheus sees no increase at a series' first sample


def claimed(claim: Claim) -> None:
    attempt = "solo" if claim.must_run_solo else "first" if claim.epoch == 1 else "again"
    metrics.claims.labels(attempt).inc()
    metrics.queue_wait_seconds.labels(claim.job.priority.value).observe(claim.queued_ms / 1000)


def settled(claim: Claim, outcome: Outcome) -> None:
    metrics.jobs_ended.labels(claim.job.model, outcome.state.value).inc()
    if outcome.error is not None:
        metrics.job_failures.labels(outcome.error.code).inc()
    used(claim.job.model, outcome)
    skipped = outcome.batching.skipped_steps + outcome.resumed_steps
    steps, inference_ms = (outcome.progress.total - skipped) // claim.job.slots, outcome.timings.inference_ms
    if outcome.state is State.SUCCEEDED and steps and inference_ms is not None:
        metrics.step_seconds.labels(claim.job.model).observe(inference_ms / 1000 / steps)


def used(model: str, outcome: Outcome) -> None:
    """Count what a run has used, as the usage of its tenant does."""
    run = used_by(outcome)
    metrics.device_seconds.labels(model).inc(outcome.device_seconds)
    metrics.computed_steps.labels(model).inc(run.steps)
    metrics.skipped_steps.labels(model).inc(run.skipped_steps)
    metrics.images.labels(model).inc(run.images)
    metrics.videos.labels(model).inc(run.videos)
    metrics.output_bytes.labels(model).inc(run.output_bytes)


def model_event(event: ModelEvent) -> None:
    match event:
        case protocol.ModelLoaded(model=model, seconds=seconds, from_cpu_memory=from_cpu_memory):
            times = metrics.model_copy_seconds if from_cpu_memory else metrics.model_load_seconds
            times.labels(model).observe(seconds)
        case protocol.ModelLoadFailed(model):
            metrics.model_loads_failed.labels(model).inc()
        case protocol.MemoryExhausted(model):
            metrics.out_of_memory.labels(model).inc()
        case protocol.ForwardRetried(model, retries):
            metrics.forwards_retried.labels(model).inc(retries)


class ScrapeMetrics:
    """Metrics that are brought up to date at each scrape."""

    def __init__(self) -> None:
        self._reported = ThreadTime()
        self._gpu: NvmlGpu | None = None
        self._gpu_searched = False

    async def refresh(self, engine: EngineStatus) -> None:
        """Advance the counters of the GPU thread's time to its totals, and set the GPU's gauges."""
        time, reported = engine.thread_time, self._reported
        metrics.gpu_busy_seconds.inc(max(0.0, time.busy_s - reported.busy_s))
        metrics.gpu_idle_while_queued_seconds.inc(max(0.0, time.idle_while_queued_s - reported.idle_while_queued_s))
        self._reported = time
        if engine.device_uuid is not None and not self._gpu_searched:
            self._gpu_searched = True
            self._gpu = NvmlGpu.find(engine.device_uuid)
        if self._gpu is None:
            return
        try:
            async with asyncio.timeout(NVML_TIMEOUT_S):
                usage = await asyncio.to_thread(self._gpu.read)
        except TimeoutError:
            log.warning("nvml_timed_out", timeout_s=NVML_TIMEOUT_S, remedy="GPU metrics stay off until a restart")
            self._gpu = None
            return
        if usage is not None:
            metrics.gpu_memory_bytes.labels("used").set(usage.used_bytes)
            metrics.gpu_memory_bytes.labels("total").set(usage.total_bytes)
            if usage.utilisation is not None:
                metrics.gpu_utilisation.set(usage.utilisation)


@dataclass(frozen=True)
class GpuUsage:
    """`utilisation` is the share of time with a running kernel; None for a MIG slice, which does not report it."""

    used_bytes: int
    total_bytes: int
    utilisation: float | None


class NvmlGpu:
    """A GPU, or a MIG slice of one, read through NVML (NVIDIA's management library)."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def find(cls, uuid: str) -> NvmlGpu | None:
        """Return the GPU of this UUID (hexadecimal digits only); None without NVML or such a GPU."""
        try:
            import pynvml
        except ImportError:
            log.info("nvml_missing", remedy="pip install nvidia-ml-py, for metrics of the GPU's memory and utilisation")
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            log.info("nvml_unavailable", reason=str(error))
            return None
        for kind in ("GPU", "MIG"):
            try:
                return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}"))
            except pynvml.NVMLError as error:
                log.debug("nvml_gpu_not_found", kind=kind, reason=str(error))
        return None

    def read(self) -> GpuUsage | None:
        """Return the current usage; None when NVML cannot read it."""
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            log.debug("nvml_read_failed", reason=str(error))
            return None
        try:
            utilisation = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._nvml.NVMLError:
            utilisation = None
        return GpuUsage(int(memory.used), int(memory.total), utilisation)
