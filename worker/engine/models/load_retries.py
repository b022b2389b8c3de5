"""Models whose last load failed: why, and when each is loaded again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import structlog

from shared.config.model_spec import ModelSpec
from shared.errors import JobError, LoadPostponed
from worker.engine.engine_status import LoadFailure
from worker.engine.models.model_cache import PinsInTheWay
from worker.engine.weights.load_failures import LONGEST_DELAY_FAILURES, retry_delay_s

log = structlog.get_logger()


class LoadRetries:
    """Plans the next load of each model in `unavailable`; `retry` is called on a thread of its own.

    All methods but `close` are for the engine's thread.
    """

    def __init__(self, first_delay_s: float, retry: Callable[[ModelSpec], None]) -> None:
        self.unavailable: dict[str, LoadFailure] = {}
        self._first_delay_s = first_delay_s
        self._retry = retry
        self._failures: Counter[str] = Counter()  # in a row, by model
        self._timers: dict[str, threading.Timer] = {}
        self._crowded_out: set[str] = set()  # unavailable because of pins

    def note_failure(self, spec: ModelSpec, error: JobError) -> None:
        """Plan the next load; one that will hardly succeed after the longest delay."""
        permanent = not isinstance(error, LoadPostponed)
        self._failures[spec.id] += 1
        failures = LONGEST_DELAY_FAILURES if permanent else self._failures[spec.id]
        delay_s = retry_delay_s(failures, self._first_delay_s, random.random())
        self.unavailable[spec.id] = LoadFailure(error.message, permanent, time.monotonic() + delay_s)
        self._crowded_out.discard(spec.id)
        if isinstance(error, PinsInTheWay):
            self._crowded_out.add(spec.id)
        retry_in_s = round(delay_s, 1)
        log.error("model_unavailable", model=spec.id, error=error.message, permanent=permanent, retry_in_s=retry_in_s)
        self._cancel(spec.id)
        timer = threading.Timer(delay_s, self._retry, (spec,))
        timer.daemon = True
        timer.start()
        self._timers[spec.id] = timer

    def note_load(self, model: str) -> None:
        """Forget the failures of a model that is loaded."""
        self.note_usable(model)
        self._failures.pop(model, None)

    def note_usable(self, model: str) -> None:
        """Serve jobs of a model again: its files are there, or no load of it is wanted."""
        self.unavailable.pop(model, None)
        self._crowded_out.discard(model)

    def forget(self, model: str) -> None:
        """Forget the failures of a model, and the planned load."""
        self.note_load(model)
        self._cancel(model)

    def forget_pins(self) -> None:
        """Forget the failures that pins were the reason of: there is memory now, and jobs load the models."""
        for model in tuple(self._crowded_out):
            self.forget(model)

    def postponed(self, model: str) -> LoadPostponed | None:
        """Return the error of a job that came before the next load of its model; None if there is none to wait for."""
        failure = self.unavailable.get(model)
        if failure is None or failure.permanent or failure.retry_at_s <= time.monotonic():
            return None
        return LoadPostponed(failure.reason)

    def close(self) -> None:
        for timer in list(self._timers.values()):
            timer.cancel()

    def _cancel(self, model: str) -> None:
        if timer := self._timers.pop(model, None):
            timer.cancel()
