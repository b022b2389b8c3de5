"""The synchronous client: `AsyncClient` on an event loop in a separate thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from fusequeue.aio import AsyncClient

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(method: Callable[Concatenate[AsyncClient, P], Awaitable[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._portal.call(lambda: method(client._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items, end = method(client._client, *args, **kwargs), object()

        async def next_item() -> T | object:
            return await anext(items, end)

        while (item := client._portal.call(next_item)) is not end:
            yield item  # type: ignore[misc]  # anything but the sentinel is a T

    return call


class Client:
    """A fusequeue service. The methods are those of `AsyncClient`; safe to use from several threads."""

    def __init__(
        self, base_url: str | None = None, *, api_key: str | None = None, timeout_s: float = 60.0, retries: int = 5
    ) -> None:
        self._open = ExitStack()
        self._portal = self._open.enter_context(start_blocking_portal())
        self._client = AsyncClient(base_url, api_key=api_key, timeout_s=timeout_s, retries=retries)
        self._open.callback(self._portal.call, self._client.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and stop the thread."""
        self._open.close()

    submit = _blocking(AsyncClient.submit)
    submit_many = _iterating(AsyncClient.submit_many)
    upload = _blocking(AsyncClient.upload)
    get = _blocking(AsyncClient.get)
    wait = _blocking(AsyncClient.wait)
    events = _iterating(AsyncClient.events)
    jobs = _iterating(AsyncClient.jobs)
    cancel = _blocking(AsyncClient.cancel)
    delete = _blocking(AsyncClient.delete)
    download = _blocking(AsyncClient.download)
    read = _blocking(AsyncClient.read)
    models = _blocking(AsyncClient.models)
    queues = _blocking(AsyncClient.queues)
    workers = _blocking(AsyncClient.workers)
    scale = _blocking(AsyncClient.scale)
    dead_letters = _iterating(AsyncClient.dead_letters)
    dead_letter = _blocking(AsyncClient.dead_letter)
    redrive = _blocking(AsyncClient.redrive)
    purge = _blocking(AsyncClient.purge)
