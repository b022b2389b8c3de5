"""`Engine` and `AsyncEngine`: images and videos of prompts, in this process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from library.catalogs import catalog_of
from library.requests import Fields, job_of
from library.results import GenerationFailed, Made, Result
from library.session import OnPreview, OnProgress, Session
from shared.config import settings as configuration
from shared.errors import InvalidRequest

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
        return max(2, 2 * slots // max(1, int(fields.get("n", 1) or 1)))


def _adapter(name: str, path: Path) -> dict[str, Any]:
    if path.is_file():
        return {"id": name, "source": str(path.resolve().parent), "weight_name": path.name}
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
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress) as bar:
            shown = bar.add_task("items", total=len(items))
            results: list[Result | None] = [None] * len(items)
            for result in self.stream(items, **fields):
                results[result.index] = result
                bar.advance(shown)
        done = [result for result in results if result is not None]
        if any(result.error is not None for result in done):
            raise GenerationFailed(done)
        return [image for result in done for image in result.images]

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

        `prompts` can be endless: it is read as items end. Leaving the loop early cancels those that run.
        """
        self._check(fields)
        items = enumerate(self._items(prompts, fields))
        most, running = self._most(fields), set[Future[Result]]()
        try:
            while True:
                for index, item in itertools.islice(items, most - len(running)):
                    running.add(self._session.submit(index, item, previews, on_progress, on_preview))
                if not running:
                    return
                done, running = futures.wait(running, _WAIT_S, futures.FIRST_COMPLETED)
                yield from sorted((future.result() for future in done), key=lambda result: result.index)
        finally:
            for future in running:
                self._session.cancel(future)

    def close(self) -> None:
        """Stop the engine and its threads, and free its memory."""
        self._session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


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
        results = sorted([result async for result in self.stream(items, **fields)], key=lambda result: result.index)
        if any(result.error is not None for result in results):
            raise GenerationFailed(results)
        return [image for result in results for image in result.images]

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
        self._check(fields)
        source = aiter(prompts if isinstance(prompts, AsyncIterable) else _async_of(prompts))
        most, started = self._most(fields), list[Future[Result]]()
        running, index, ended = set[asyncio.Future[Result]](), itertools.count(), False
        try:
            while True:
                while not ended and len(running) < most:
                    try:
                        prompt = await anext(source)
                    except StopAsyncIteration:
                        ended = True
                        break
                    (item,) = self._items([prompt], fields)
                    future = self._session.submit(next(index), item, previews, on_progress, on_preview)
                    started.append(future)
                    running.add(asyncio.wrap_future(future))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                started = [future for future in started if not future.done()]
                for result in sorted((one.result() for one in done), key=lambda result: result.index):
                    yield result
        finally:
            for future in started:
                self._session.cancel(future)

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


async def _async_of(prompts: Iterable[Prompt]) -> AsyncIterator[Prompt]:
    for prompt in prompts:
        yield prompt
