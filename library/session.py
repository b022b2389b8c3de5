"""A running engine and its items: each is a future that the engine's thread completes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import structlog
from PIL import Image

from library.requests import Fields, job_of
from library.results import Result
from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.errors import ConfigurationError, FusequeueError, InferenceFailed, InvalidRequest, ModelUnavailable
from shared.job import Job
from worker.engine.engine import Engine
from worker.engine.outputs import Audio, Latents, Mesh, Output
from worker.engine.protocol import (
    EngineEvent,
    EngineRequest,
    InputFiles,
    JobFinished,
    JobProgress,
    OutputReady,
    PreviewReady,
)

log = structlog.get_logger()

OnProgress: TypeAlias = Callable[[int, int, int], None]
"""Gets an item's number, its denoising steps done, and all of them; it is called on the engine's thread."""
OnPreview: TypeAlias = Callable[[int, Image.Image], None]
"""Gets an item's number and a small image of its present state; it is called on the engine's thread."""

CLOSED = "the engine was closed"
STOP_S = 60.0
_WATCH_S = 0.5


@dataclass(frozen=True)
class Watchers:
    """What a program gets of items that run: `previews` of each, and calls with its steps."""

    previews: int = 0
    on_progress: OnProgress | None = None
    on_preview: OnPreview | None = None


@dataclass(eq=False)
class Item:
    """An item; its future never raises: `Result.error` says what went wrong. One without a job is refused, and done."""

    index: int
    watchers: Watchers
    future: Future[Result]
    job: Job | None = None
    files: InputFiles = field(default_factory=InputFiles)
    outputs: dict[int, Output | Audio | Mesh | Latents] = field(default_factory=dict)


class Session:
    """An engine in this process. Items can be submitted from any thread."""

    def __init__(self, catalog: Catalog, settings: Settings) -> None:
        self.catalog = catalog
        self._settings = settings
        self._engine = Engine(catalog, self, settings)
        self._items: dict[str, Item] = {}
        self._closed = threading.Event()
        self._started = False
        self._thread: int | None = None  # of the engine, once it has called

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def check_usable(self) -> None:
        """Raise `ConfigurationError` if items cannot be made now."""
        if self.closed:
            raise ConfigurationError("the engine is closed; make another one")
        if not self._started:
            raise ConfigurationError("the engine is not started; use async with, or await start()")
        self._check_thread()

    def _check_thread(self) -> None:
        if threading.get_ident() == self._thread:
            raise ConfigurationError("on_progress and on_preview cannot use the engine, whose thread waits for them")

    def start(self) -> None:
        """Load the models; raises `ModelUnavailable` for one that cannot be loaded."""
        if not structlog.is_configured():  # else it would print each step of the engine
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        self._engine.start()
        self._started = True
        try:
            threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
            self._engine.warm_up()
        except BaseException:  # Ctrl-C: nobody has the engine that could close it
            self.close()
            raise
        failures = self._engine.status().unavailable_models
        for model, failure in failures.items():
            self.close()
            raise ModelUnavailable(f"model {model!r}: {failure.reason}")

    def close(self) -> None:
        """Stop the engine after its present forward; unfinished items are canceled. Does nothing a second time."""
        if self._closed.is_set():
            return
        self._check_thread()
        self._closed.set()
        if self._started:
            self._engine.stop(STOP_S)
        self._end_all(InferenceFailed(CLOSED))

    def prepare(self, index: int, fields: Fields, watchers: Watchers) -> Item:
        """Return an item for `submit`."""
        item = Item(index, watchers, Future())
        item.future.set_running_or_notify_cancel()  # one that is canceled would refuse its result
        try:
            item.job, item.files = job_of(fields, self.catalog, self._settings, watchers.previews)
        except InvalidRequest as error:
            item.future.set_result(Result(index, error=error))
        return item

    def submit(self, items: Iterable[Item]) -> None:
        """Start items together: they share the first forward."""
        requests = []
        for item in items:
            if (job := item.job) is not None:
                self._items[job.id] = item
                spec = self.catalog.for_size(job.model, job.width, job.height)
                requests.append(EngineRequest(job.id, job, spec, item.files))
                item.files = InputFiles()  # up to 80 MB, which the engine drops when they are decoded
        if self._closed.is_set():  # looked at last: close() ends those that it finds
            self._end_all(InferenceFailed(CLOSED))
        elif requests:
            self._engine.submit(*requests)

    def slots(self, model: str) -> int:
        """Return how many images of a model a forward takes at most."""
        return self.catalog.get(model).max_batch

    def cancel(self, future: Future[Result]) -> None:
        """Remove an item at its next step."""
        for key, item in list(self._items.items()):
            if item.future is future:
                self._engine.cancel(key)

    def on_event(self, event: EngineEvent) -> None:
        """Take an event of the engine, on its thread."""
        self._thread = threading.get_ident()
        item = self._items.get(getattr(event, "claim_key", ""))
        match event:
            case OutputReady(index=at, output=output) if item is not None:
                item.outputs[at] = output
            case JobProgress(step=step, total=total) if item is not None and item.watchers.on_progress is not None:
                _call(item.watchers.on_progress, item.index, step, total)
            case PreviewReady(pixels=pixels) if item is not None and item.watchers.on_preview is not None:
                _call(item.watchers.on_preview, item.index, Image.fromarray(pixels))
            case JobFinished() if item is not None:
                self._finish(event, item)

    def _finish(self, event: JobFinished, item: Item) -> None:
        if self._items.pop(event.claim_key, None) is None:
            return  # close() has ended it meanwhile
        error: FusequeueError | None = event.error
        if event.canceled:
            error = InferenceFailed("it was canceled")
        item.future.set_result(
            Result(
                item.index,
                job=item.job,
                outputs=() if error is not None else tuple(item.outputs[at] for at in sorted(item.outputs)),
                error=error,
                warnings=event.warnings,
                batching=event.batching,
                device_seconds=event.device_seconds,
            )
        )

    def _watch(self) -> None:
        """End all items if the engine's thread ends by itself, as when the device is lost."""
        while not self._engine.join(_WATCH_S):
            if (failure := self._engine.status().failure) is not None:
                self._end_all(InferenceFailed(failure))
        if not self._closed.is_set():
            self._closed.set()
            self._end_all(InferenceFailed("the engine ended; its log says why, and a new one can be made"))

    def _end_all(self, error: FusequeueError) -> None:
        for key in list(self._items):
            if (item := self._items.pop(key, None)) is not None:
                item.future.set_result(Result(item.index, job=item.job, error=error))


def _call(callback: Callable[..., Any], *arguments: Any) -> None:
    """Call a function of the program; its fault is not the engine's."""
    try:
        callback(*arguments)
    except BaseException:  # also sys.exit()
        log.exception("callback_failed")
