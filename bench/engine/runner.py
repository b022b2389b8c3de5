"""Runs jobs in an engine in this process, for the benchmarks of the engine."""

from __future__ import annotations

import threading
import time
from typing import Any

from shared.config.models_file import Catalog, ModelSpec
from shared.config.settings import Settings
from shared.job import Job
from worker.engine.engine import Engine
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.protocol import (
    EngineEvent,
    EngineRequest,
    ForwardDone,
    JobFinished,
    JobProgress,
    OutputReady,
    Pixels,
)

GUIDANCE = 5.0
TIMEOUT_S = 600.0


def prompt(at: int) -> str:
    """Return the prompt of image number `at`."""
    return f"a red circle on a blue ground, number {at}"


def bench_job(job_id: str, spec: ModelSpec, side: int, text: str, **fields: Any) -> Job:
    """Return a job for one image of `side` by `side` pixels; `fields` are those of the job that differ."""
    values = {"width": side, "height": side, "guidance_scale": GUIDANCE} | fields
    return Job(id=job_id, tenant="bench", created_at_ms=0, model=spec.id, prompt=text, **values)


class EngineRunner:
    """Submits jobs to an engine and waits for them; `rows` are those of all forwards, the rest is of the last run."""

    def __init__(self, spec: ModelSpec, device: str, threads: int) -> None:
        self.spec = spec
        self.rows: list[int] = []
        self.order: list[str] = []
        self.images: dict[str, Pixels] = {}
        self._submitted_s: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._late: tuple[int, Job] | None = None
        self._error: str | None = None
        self._change = threading.Condition()
        self._engine = Engine(Catalog((spec,)), self, Settings(torch_threads=threads, device=device))
        self._engine.start()
        self._engine.warm_up()

    @property
    def models(self) -> list[LoadedModel]:
        """The loaded models."""
        return list(self._engine._models.loaded.values())

    def run(self, jobs: list[Job], late: Job | None = None, at_step: int = 0) -> None:
        """Run `jobs`, and `late` from `at_step` on; raises `RuntimeError` if one fails or the timeout expires."""
        self._late = None if late is None else (at_step, late)
        self._ended_s, self.images, self.order = {}, {}, []
        ids = {job.id for job in jobs} | ({late.id} if late else set())
        self._submit(*jobs)
        with self._change:
            ended = self._change.wait_for(lambda: self._error or ids <= self._ended_s.keys(), TIMEOUT_S)
        if self._error or not ended:
            raise RuntimeError(self._error or f"not all jobs ended in {TIMEOUT_S:.0f} s")

    def latency_ms(self, job_id: str) -> float:
        """Return the time from submit to end of a job."""
        return 1000 * (self._ended_s[job_id] - self._submitted_s[job_id])

    def close(self) -> None:
        self._engine.stop(10)

    def _submit(self, *jobs: Job) -> None:
        self._submitted_s |= dict.fromkeys((job.id for job in jobs), time.perf_counter())
        self._engine.submit(*(EngineRequest(job.id, job, self.spec) for job in jobs))

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case JobProgress(step=step) if self._late is not None and step >= self._late[0]:
                (_, job), self._late = self._late, None
                self.order.append("arrival")
                self._submit(job)
            case OutputReady(claim_key=key, output=output):
                self.images[key] = output.pixels
            case JobFinished(claim_key=key, error=error):
                with self._change:
                    if error is not None:
                        self._error = error.message
                    self._ended_s[key] = time.perf_counter()
                    self._change.notify_all()
            case ForwardDone(claim_key=key, rows=rows):
                self.rows.append(rows)
                self.order.append(key)
