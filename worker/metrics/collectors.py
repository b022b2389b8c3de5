"""The metrics of a worker's single jobs, and of its time."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from shared.job import Outcome, State
from shared.queue import Claim
from shared.runtime import metrics
from worker.engine import EngineIncident, EngineStatus, ThreadTime

log = structlog.get_logger()

NVML_S = 2.0


def claimed(claim: Claim) -> None:
    """Count a claim, and what it waited for."""
    attempt = "solo" if claim.solo else "first" if claim.attempt == 1 else "again"
    metrics.claims.labels(attempt).inc()
    metrics.queue_wait_seconds.labels(claim.job.priority.value).observe(claim.queued_ms / 1000)


def settled(claim: Claim, outcome: Outcome) -> None:
    """Count a job that ended."""
    metrics.jobs_ended.labels(claim.job.model, outcome.state.value).inc()
    if outcome.error is not None:
        metrics.job_failures.labels(outcome.error.code).inc()
    steps, inference_ms = outcome.progress.total // max(1, claim.job.n), outcome.timings.inference_ms
    if outcome.state is State.SUCCEEDED and steps and inference_ms is not None:
        metrics.step_seconds.labels(claim.job.model).observe(inference_ms / 1000 / steps)


def given_up(reason: str) -> None:
    """Count a claim that ended in no settling by this worker."""
    metrics.claims_abandoned.labels(reason).inc()


def incident(incident: EngineIncident) -> None:
    """Count what the engine met with."""
    match incident.kind:
        case "model_loaded":
            metrics.model_load_seconds.labels(incident.model).observe(incident.amount)
        case "model_load_failed":
            metrics.model_loads_failed.labels(incident.model).inc(incident.amount)
        case "out_of_memory":
            metrics.out_of_memory.labels(incident.model).inc(incident.amount)
        case "forward_repeated":
            metrics.forwards_retried.labels(incident.model).inc(incident.amount)


class Spent:
    """Brings the counters of the GPU thread's time up to what it has spent."""

    def __init__(self) -> None:
        self._told = ThreadTime()

    def show(self, spent: ThreadTime) -> None:
        """Add what has been spent since the last call."""
        metrics.gpu_busy_seconds.inc(max(0.0, spent.busy_s - self._told.busy_s))
        idle_s = spent.idle_while_queued_s - self._told.idle_while_queued_s
        metrics.gpu_idle_while_queued_seconds.inc(max(0.0, idle_s))
        self._told = spent


class Gauges:
    """Brings them up to date when asked to."""

    def __init__(self) -> None:
        self._spent = Spent()
        self._card: Card | None = None
        self._looked = False

    async def refresh(
        self, engine: EngineStatus, *, spool_bytes: int, spool_limit_bytes: int, running_slots: int, ready: bool
    ) -> None:
        """Set the gauges, and count what the GPU thread has done since the last call."""
        self._spent.show(engine.thread_time)
        metrics.spool_bytes.set(spool_bytes)
        metrics.spool_limit_bytes.set(spool_limit_bytes)
        metrics.running_slots.set(running_slots)
        metrics.worker_ready.set(ready)
        if engine.device_uuid is not None and not self._looked:
            self._looked = True
            self._card = Card.find(engine.device_uuid)
        if self._card is not None:
            await self._read(self._card)

    async def _read(self, card: Card) -> None:
        try:
            async with asyncio.timeout(NVML_S):
                facts = await asyncio.to_thread(card.read)
        except TimeoutError:
            log.warning("nvml_silent", timeout_s=NVML_S, remedy="it is not asked again")
            self._card = None
            return
        if facts is not None:
            used, total, share = facts
            metrics.gpu_memory_bytes.labels("used").set(used)
            metrics.gpu_memory_bytes.labels("total").set(total)
            if share is not None:
                metrics.gpu_utilisation.set(share)


class Card:
    """One GPU, or one slice (MIG) of it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def find(cls, uuid: str) -> Card | None:
        """Return the card of this UUID (hexadecimal digits alone), None where NVML or the card cannot be had."""
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
                log.debug("nvml_card_not_found", kind=kind, reason=str(error))
        return None

    def read(self) -> tuple[int, int, float | None] | None:
        """Return memory in use and in all, in bytes, and the share of the last moments in which a kernel ran.

        The share is None where the card does not tell it (a slice of one); None altogether where it tells nothing now.
        """
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            log.debug("nvml_silent", reason=str(error))
            return None
        try:
            share = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._nvml.NVMLError:
            share = None
        return int(memory.used), int(memory.total), share
