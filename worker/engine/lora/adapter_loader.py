"""Adapters on their way into memory: read, added up and moved beside the forwards, attached between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor

import structlog
import torch

from shared.errors import AdapterUnavailable, JobError
from worker.engine.lora.adapter_files import Changes, check_fit, combine, locate, place, read
from worker.engine.lora.per_row import AdapterKey
from worker.engine.pipelines.loading import LoadedModel

log = structlog.get_logger()

Arrived = Callable[[LoadedModel, AdapterKey, JobError | None], None]


class AdapterLoader:
    """Loads adapters on a thread of its own; all methods run on the engine's thread.

    `post` runs a function on the engine's thread, soon; `arrived` is told there how each load ended.
    A model keeps adapters of at most `budget_bytes`, unless jobs under way use more.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        post: Callable[[Callable[[], None]], None],
        arrived: Arrived,
    ) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._post = post
        self._arrived = arrived
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="load-adapter")
        self._wanted: set[tuple[int, AdapterKey]] = set()

    @property
    def loading(self) -> bool:
        return bool(self._wanted)

    def request(self, model: LoadedModel, key: AdapterKey) -> None:
        """Start loading the adapters of `key` for `model`, unless that is under way."""
        if (id(model), key) not in self._wanted:
            self._wanted.add((id(model), key))
            self._reader.submit(self._load, model, key)

    def trim(self, model: LoadedModel, in_use: Set[AdapterKey], *, keep_unused: bool = True) -> None:
        """Let go of a model's adapters that are not in use: what exceeds the budget, or all of them."""
        model.adapters.trim(self._budget_bytes if keep_unused else 0, in_use)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _load(self, model: LoadedModel, key: AdapterKey) -> None:
        started = time.monotonic()
        outcome: Changes | JobError
        try:
            with torch.no_grad():
                outcome = changes_for(model, key, self._device)
        except JobError as error:
            outcome = type(error)(error.message, param="adapters")
        except Exception as error:  # the top of the reader's thread: whatever happens, the jobs are told
            log.exception("adapter_load_failed", model=model.spec.id, adapters=key)
            outcome = AdapterUnavailable(f"adapters cannot be loaded: {type(error).__name__}", param="adapters")
        seconds = round(time.monotonic() - started, 3)
        self._post(lambda: self._settle(model, key, outcome, seconds))

    def _settle(self, model: LoadedModel, key: AdapterKey, outcome: Changes | JobError, seconds: float) -> None:
        self._wanted.discard((id(model), key))
        if isinstance(outcome, JobError):
            log.error("adapter_unavailable", model=model.spec.id, adapters=key, error=outcome.message)
            self._arrived(model, key, outcome)
            return
        model.adapters.attach(key, outcome)
        log.info("adapter_loaded", model=model.spec.id, adapters=key, bytes=model.adapters.nbytes, seconds=seconds)
        self._arrived(model, key, None)


def changes_for(model: LoadedModel, key: AdapterKey, device: torch.device) -> Changes:
    """Return what the adapters of `key` together change in `model`, on `device`; raises `AdapterUnavailable`."""
    specs = {spec.id: spec for spec in model.spec.adapter}
    modules = {component: adapters.module for component, adapters in model.adapters.modules.items()}
    pipeline = next(iter(model.templates.values()))
    parts = []
    for name, scale in key:
        if name not in specs:
            raise AdapterUnavailable(f"this worker's models file has no adapter {name!r} for {model.spec.id!r}")
        changes = read(specs[name], locate(specs[name]), pipeline)
        try:
            check_fit(changes, modules)
        except AdapterUnavailable as error:
            raise AdapterUnavailable(f"adapter {name!r} does not fit {model.spec.id!r}: {error.message}") from None
        parts.append((changes, scale))
    try:
        return place(combine(parts), modules, device)
    except torch.OutOfMemoryError:
        raise AdapterUnavailable("the adapters do not fit into the device's memory") from None
