"""Runs jobs in an engine in this process, for the benchmarks of the engine."""

from __future__ import annotations

import threading
from typing import Any

from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.job import Job
from worker.engine.engine import Engine
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.protocol import EngineEvent, EngineRequest, ForwardDone, JobFinished

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
    """Submits jobs to an engine and waits for them; `rows` are those of all forwards."""

    def __init__(self, spec: ModelSpec, device: str, threads: int) -> None:
        self.spec = spec
        self.rows: list[int] = []
        self._ended: set[str] = set()
        self._error: str | None = None
        self._change = threading.Condition()
        self._engine = Engine(Catalog((spec,)), self, Settings(torch_threads=threads, device=device))
        self._engine.start()
        self._engine.warm_up()

    @property
    def models(self) -> list[LoadedModel]:
        """The loaded models."""
        return list(self._engine._models.loaded.values())

    def run(self, jobs: list[Job], checkpoint_s: float | None = None) -> None:
        """Run jobs; raises `RuntimeError` if one fails or the timeout expires."""
        self._ended = set()
        ids = {job.id for job in jobs}
        self._engine.submit(*(EngineRequest(job.id, job, self.spec, checkpoint_s=checkpoint_s) for job in jobs))
        with self._change:
            ended = self._change.wait_for(lambda: self._error or ids <= self._ended, TIMEOUT_S)
        if self._error or not ended:
            raise RuntimeError(self._error or f"not all jobs ended in {TIMEOUT_S:.0f} s")

    def close(self) -> None:
        self._engine.stop(10)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case JobFinished(claim_key=key, error=error):
                with self._change:
                    if error is not None:
                        self._error = error.message
                    self._ended.add(key)
                    self._change.notify_all()
            case ForwardDone(rows=rows):
                self.rows.append(rows)
