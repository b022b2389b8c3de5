"""An engine for the sample jobs of one model, which `fusequeue probe` measures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import InferenceFailed
from shared.job import Job
from worker.engine.checks.sample_jobs import sample_files
from worker.engine.engine import Engine
from worker.engine.protocol import EngineEvent, EngineRequest, JobFinished

POLL_S = 0.5
TIMEOUT_S = 1800.0  # for the jobs of one run, and for the stop


class _EventQueue(SimpleQueue[EngineEvent]):
    def on_event(self, event: EngineEvent) -> None:
        self.put(event)


@contextmanager
def sample_engine(spec: ModelSpec, configured: Settings) -> Iterator[SampleEngine]:
    """Start an engine with the model loaded, and stop it."""
    events = _EventQueue()
    engine = Engine(Catalog((spec,)), events, configured)
    engine.start()
    try:
        engine.warm_up()
        yield SampleEngine(spec, engine, events)
    finally:
        engine.stop(TIMEOUT_S)


class SampleEngine:
    """Runs sample jobs of one model."""

    def __init__(self, spec: ModelSpec, engine: Engine, events: _EventQueue) -> None:
        self._spec = spec
        self._engine = engine
        self._events = events

    def run(self, jobs: Sequence[Job]) -> Iterator[EngineEvent]:
        """Submit jobs with ids that no earlier one had, and yield the events until all have ended.

        Raises the error of a failed job. The claim keys are the ids.
        """
        self._engine.submit(*(EngineRequest(job.id, job, self._spec, sample_files(job)) for job in jobs))
        unfinished, deadline = len(jobs), time.monotonic() + TIMEOUT_S
        while unfinished:
            try:
                event = self._events.get(timeout=POLL_S)
            except Empty:
                if self._engine.join(0) or time.monotonic() > deadline:
                    message = f"the engine failed, or its jobs took over {TIMEOUT_S:g} s; see the log"
                    raise InferenceFailed(message) from None
                continue
            if isinstance(event, JobFinished):
                if event.error is not None:
                    raise event.error
                unfinished -= 1
            yield event
