"""`Engine` and `AsyncEngine`: images and videos of prompts, in this process."""

from __future__ import annotations

import asyncio
import numbers
import os
import queue
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from library.catalogs import HUB_ID, catalog_of
from library.progress_bar import items_bar
from library.requests import Fields, job_of
from library.results import GenerationFailed, Made, Result
from library.session import CLOSED, OnPreview, OnProgress, Session, Watchers
from library.sources import AsyncSource, Source
from library.streams import TOGETHER_S, Event, Items
from shared.config import settings as configuration
from shared.errors import ConfigurationError, InferenceFailed, InvalidRequest
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

    def _stream(self, fields: Fields, watchers: Watchers, put: Callable[[Event], None]) -> Items:
        def fields_of(prompt: Prompt) -> Fields:
            own = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
            return {"model": self.models[0], **fields, **own}

        return Items(self._session, self._most(fields), fields_of, watchers, put)

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
        count, best_of = fields.get("n"), fields.get("best_of")
        if isinstance(best_of, Mapping):
            count = best_of.get("candidates")
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
        results: list[Result | None] = [None] * len(items)
        with items_bar(shown=progress) as bar:
            shown = bar.add_task("items", total=len(items))
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
        events = queue.SimpleQueue[Event]()
        items = self._stream(fields, Watchers(previews, on_progress, on_preview), events.put)
        source = Source(prompts, events.put)
        try:
            while items.unfinished:
                if count := items.wanted():
                    source.ask(count)
                arrived = _arrived(events, items)
                if items.read(arrived):
                    items.start()
                yield from items.ended(arrived)
        finally:
            source.close()
            items.cancel()

    def close(self) -> None:
        """Stop the engine and its threads, and free its memory."""
        self._session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _arrived(events: queue.SimpleQueue[Event], items: Items) -> list[Event]:
    """Return the events that have come, after a wait for the first."""
    arrived: list[Event] = []
    with suppress(queue.Empty):
        arrived.append(events.get(timeout=_WAIT_S))
        while True:
            arrived.append(events.get(timeout=TOGETHER_S if items.awaits_mates(arrived) else 0))
    return arrived


class AsyncEngine(_Base):
    """`Engine` for programs with an event loop, which it does not block.

    >>> async with AsyncEngine("stabilityai/stable-diffusion-xl-base-1.0") as engine:
    ...     image, = await engine.generate("a cup of coffee")
    """

    async def start(self) -> None:
        """Load the models; `async with` does it."""
        await asyncio.to_thread(self._session.start)

    async def generate(self, prompts: Prompt | Sequence[Prompt], *, progress: bool = True, **fields: Any) -> list[Made]:
        """Return the images or videos of one prompt or several, in order; bar and errors as in `Engine.generate`."""
        items = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        results: list[Result | None] = [None] * len(items)
        with items_bar(shown=progress) as bar:
            shown = bar.add_task("items", total=len(items))
            async for result in self.stream(items, **fields):
                results[result.index] = result
                bar.advance(shown)
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
        events, loop = asyncio.Queue[Event](), asyncio.get_running_loop()

        def put(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(events.put_nowait, event)

        items = self._stream(fields, Watchers(previews, on_progress, on_preview), put)
        source = AsyncSource(prompts, events.put_nowait) if isinstance(prompts, AsyncIterable) else Source(prompts, put)
        try:
            while items.unfinished:
                if count := items.wanted():
                    source.ask(count)
                arrived = await _arrived_async(events, items)
                if items.read(arrived):
                    await asyncio.to_thread(items.start)
                for result in items.ended(arrived):
                    yield result
        finally:
            items.cancel()
            if isinstance(source, AsyncSource):
                await source.aclose()
            else:
                source.close()

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


async def _arrived_async(events: asyncio.Queue[Event], items: Items) -> list[Event]:
    """Return the events that have come, after a wait for the first."""
    arrived: list[Event] = []
    with suppress(TimeoutError, asyncio.QueueEmpty):
        async with asyncio.timeout(_WAIT_S):
            arrived.append(await events.get())
        while True:
            if items.awaits_mates(arrived):
                async with asyncio.timeout(TOGETHER_S):
                    arrived.append(await events.get())
            else:
                arrived.append(events.get_nowait())
    return arrived
