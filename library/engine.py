"""`Engine` and `AsyncEngine`: images and videos of prompts, in this process."""

from __future__ import annotations

import asyncio
import itertools
import numbers
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from library.catalogs import HUB_ID, catalog_of
from library.requests import Fields, job_of
from library.results import GenerationFailed, Made, Result
from library.session import CLOSED, OnPreview, OnProgress, Session
from library.sources import Ended, Read, Source
from shared.config import settings as configuration
from shared.errors import ConfigurationError, InferenceFailed, InvalidRequest
from shared.runtime.asyncio_tools import cancel_and_wait
from worker.engine.device import device_facts

Model: TypeAlias = str | os.PathLike[str]
Prompt: TypeAlias = str | Mapping[str, Any]
"""A text, or the fields of an item: `prompt` and those in which it differs."""

_WAIT_S = 0.2  # between looks for Ctrl-C, which a wait without an end would hold up


class _Base:
    """What both engines have: their models, and the fields of items."""

    def __init__(
        self,
        *models: Model,
        device: str | None = None,
        models_file: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        """Each of `models` is a folder, an id of the hub, or an entry of the models file; the first is the default.

        `options` are keys of a model's table, such as `max_batch`, `dtype`, `tasks` or `quantization`; `adapters` are
        LoRA files by the name that items give. Raises `ConfigurationError`.
        """
        if not models:
            raise TypeError("Engine needs a model: a folder, an id of the hub, or an entry of models.toml")
        configured = configuration.load()
        if device is not None:
            configured = configured.model_copy(update={"device": device})
        _check_device(configured.device)
        if adapters:
            listed = [_adapter(name, Path(path)) for name, path in adapters.items()]
            options = {**options, "adapter": [*options.get("adapter", ()), *listed]}
        file = Path(models_file or configured.models)
        self._settings = configured
        self._session = Session(catalog_of(models, file, options), configured)

    @property
    def models(self) -> list[str]:
        """The names of the models, which `model` of an item can be."""
        return [spec.id for spec in self._session.catalog]

    def _items(self, prompts: Iterable[Prompt], fields: Fields) -> Iterator[dict[str, Any]]:
        """Yield the fields of each item."""
        for prompt in prompts:
            own = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
            yield {"model": self.models[0], **fields, **own}

    def _check(self, fields: Fields) -> None:
        """Raise `InvalidRequest` for a fault of the fields that all items have."""
        try:
            job_of({"model": self.models[0], "prompt": "-", **fields}, self._session.catalog, self._settings)
        except InvalidRequest as error:
            if (error.param or "").partition(".")[0] in fields:
                raise

    def _most(self, fields: Fields) -> int:
        """Return how many items are started at once: two batches, so that a row that ends is followed at once."""
        slots = self._session.slots(str(fields.get("model", self.models[0])))
        count = fields.get("n")
        return max(2, 2 * slots // max(1, int(count) if isinstance(count, numbers.Integral) else 1))


def _check_device(device: str | None) -> None:
    try:
        device_facts(device)
    except ValueError as error:
        raise ConfigurationError(f"device: {error}; use cuda, cuda:N or cpu") from error


def _made(results: Sequence[Result | None]) -> list[Made]:
    """Return what all items have made, or raise `GenerationFailed`; an item without a result was never started."""
    done = [
        Result(index, error=InferenceFailed(CLOSED)) if result is None else result
        for index, result in enumerate(results)
    ]
    if any(result.error is not None for result in done):
        raise GenerationFailed(done)
    return [image for result in done for image in result.images]


def _adapter(name: str, path: Path) -> dict[str, Any]:
    if path.is_file():
        return {"id": name, "source": str(path.resolve().parent), "weight_name": path.name}
    if not path.is_dir() and (path.suffix or not HUB_ID.fullmatch(str(path))):
        raise ConfigurationError(f"adapters: {name!r}: there is no file {path}")
    return {"id": name, "source": str(path)}


@dataclass
class _Reading:
    """Whether a source has more prompts, and whether it has been asked for one."""

    has_more: bool = True
    asked: bool = False

    def take(self, event: Read | Ended) -> Read | None:
        """Return the prompt that the source has given, None at its end; raises the error of the source."""
        self.asked = False
        if isinstance(event, Read):
            return event
        self.has_more = False
        if event.error is not None:
            raise event.error
        return None


class Engine(_Base):
    """Makes images and videos with the fused forwards of the service, without Redis, HTTP or storage.

    >>> engine = Engine("stabilityai/stable-diffusion-xl-base-1.0", max_batch=8)
    >>> images = engine.generate(["a cup of coffee", "a toy dinosaur"], steps=30, seed=7)

    Fields are those of `POST /v1/jobs`; images are paths, bytes, images of Pillow or arrays, a `video` is a path or
    bytes. `close` ends its threads.
    """

    def __init__(self, *models: Model, **options: Any) -> None:
        super().__init__(*models, **options)
        self._session.start()

    __init__.__doc__ = _Base.__init__.__doc__

    def generate(self, prompts: Prompt | Sequence[Prompt], *, progress: bool = True, **fields: Any) -> list[Made]:
        """Return the images or videos of one prompt or several, in order, with a bar of the items that are done.

        Raises `InvalidRequest` for fields that are wrong for all items, and `GenerationFailed` with all results if
        some items failed.
        """
        items = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress) as bar:
            shown = bar.add_task("items", total=len(items))
            results: list[Result | None] = [None] * len(items)
            for result in self.stream(items, **fields):
                results[result.index] = result
                bar.advance(shown)
        return _made(results)

    def stream(
        self,
        prompts: Iterable[Prompt],
        *,
        previews: int = 0,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        **fields: Any,
    ) -> Iterator[Result]:
        """Yield the result of each prompt as it is done; `index` is its number. An item that fails has an `error`.

        `prompts` can be endless: it is read as items end, on a thread, so that one that waits for more holds up no
        result. Leaving the loop early cancels the items that run; after `close` they end with an error.
        """
        self._session.check_usable()
        self._check(fields)
        events = queue.SimpleQueue[Read | Ended | Future[Result]]()
        most, running, state = self._most(fields), set[Future[Result]](), _Reading()
        source, index = Source(prompts, events.put), itertools.count()
        try:
            while state.has_more or running:
                if self._session.closed:
                    state.has_more = False
                if state.has_more and not state.asked and len(running) < most:
                    state.asked = True
                    source.ask()
                try:
                    event = events.get(timeout=_WAIT_S)
                except queue.Empty:
                    continue
                if isinstance(event, Future):
                    running.discard(event)
                    yield event.result()
                elif (prompt := state.take(event)) is not None:
                    (item,) = self._items([prompt.prompt], fields)
                    future = self._session.submit(next(index), item, previews, on_progress, on_preview)
                    running.add(future)
                    future.add_done_callback(events.put)
        finally:
            source.close()
            for future in running:
                self._session.cancel(future)

    def close(self) -> None:
        """Stop the engine and its threads, and free its memory."""
        self._session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Items:
    """The items of an asynchronous stream, which threads start: one that is left meanwhile is canceled by its own."""

    def __init__(self, session: Session, options: tuple[int, OnProgress | None, OnPreview | None]) -> None:
        self._session = session
        self._options = options
        self._index = itertools.count()
        self._running = set[Future[Result]]()
        self._canceled = threading.Event()

    def start(self, fields: Fields) -> Future[Result]:
        future = self._session.submit(next(self._index), fields, *self._options)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        if self._canceled.is_set():
            self._session.cancel(future)
        return future

    def cancel(self) -> None:
        self._canceled.set()
        for future in list(self._running):
            self._session.cancel(future)


class AsyncEngine(_Base):
    """`Engine` for programs with an event loop, which it does not block.

    >>> async with AsyncEngine("stabilityai/stable-diffusion-xl-base-1.0") as engine:
    ...     image, = await engine.generate("a cup of coffee")
    """

    async def start(self) -> None:
        """Load the models; `async with` does it."""
        await asyncio.to_thread(self._session.start)

    async def generate(self, prompts: Prompt | Sequence[Prompt], **fields: Any) -> list[Made]:
        """Return the images or videos of one prompt or several, in order; errors are those of `Engine.generate`."""
        items = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        results: list[Result | None] = [None] * len(items)
        async for result in self.stream(items, **fields):
            results[result.index] = result
        return _made(results)

    async def stream(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        *,
        previews: int = 0,
        on_progress: OnProgress | None = None,
        on_preview: OnPreview | None = None,
        **fields: Any,
    ) -> AsyncIterator[Result]:
        """Yield the result of each prompt as it is done, as `Engine.stream` does."""
        self._session.check_usable()
        await asyncio.to_thread(self._check, fields)
        source = aiter(prompts) if isinstance(prompts, AsyncIterable) else _read_on_thread(prompts)
        most, items = self._most(fields), _Items(self._session, (previews, on_progress, on_preview))
        running, has_more = set[asyncio.Future[Result]](), True
        reading: asyncio.Task[asyncio.Future[Result] | None] | None = None
        try:
            while has_more or running:
                if has_more and reading is None and len(running) < most:
                    reading = asyncio.create_task(self._start_next(source, fields, items))
                waiting = {*running, *(() if reading is None else (reading,))}
                done, _ = await asyncio.wait(waiting, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and reading.done():
                    started, reading = reading.result(), None
                    has_more = started is not None
                    running |= set() if started is None else {started}
                has_more = has_more and not self._session.closed
                for one in running & done:
                    running.discard(one)
                    yield one.result()
        finally:
            items.cancel()
            if reading is not None:
                await cancel_and_wait((reading,))
            if isinstance(source, AsyncGenerator):
                await source.aclose()

    async def _start_next(
        self, source: AsyncIterator[Prompt], fields: Fields, items: _Items
    ) -> asyncio.Future[Result] | None:
        """Start the next prompt of a source; None if it has no more."""
        try:
            prompt = await anext(source)
        except StopAsyncIteration:
            return None
        (item,) = self._items([prompt], fields)
        # Images are read and encoded: up to seconds.
        return asyncio.wrap_future(await asyncio.to_thread(items.start, item))

    async def close(self) -> None:
        """Stop the engine and its threads, and free its memory."""
        await asyncio.to_thread(self._session.close)

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


async def _read_on_thread(prompts: Iterable[Prompt]) -> AsyncGenerator[Prompt]:
    """Yield prompts that are read on a thread: a source that waits does not hold up the event loop."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Read | Ended]()

    def put(event: Read | Ended) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(events.put_nowait, event)

    source, state = Source(prompts, put), _Reading()
    try:
        while True:
            source.ask()
            read = state.take(await events.get())
            if read is None:
                return
            yield read.prompt
    finally:
        source.close()
