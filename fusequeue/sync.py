"""The synchronous client: `AsyncClient` on an event loop in a separate thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from fusequeue.aio import AsyncClient
from fusequeue.resources import DeadLetter, Event, Job, LineResult, Scale

T = TypeVar("T")


class Client:
    """A fusequeue service. The methods are those of `AsyncClient`; safe to use from several threads."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 5,
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

    def submit(self, model: str, prompt: str, *, idempotency_key: str | None = None, **fields: Any) -> Job:
        return self._run(lambda: self._client.submit(model, prompt, idempotency_key=idempotency_key, **fields))

    def submit_many(
        self, bodies: Iterable[Mapping[str, Any] | None], *, idempotency_key: str | None = None
    ) -> Iterator[LineResult]:
        return self._iterate(self._client.submit_many(bodies, idempotency_key=idempotency_key))

    def upload(self, image: Path | bytes) -> str:
        return self._run(lambda: self._client.upload(image))

    def get(self, job_id: str, *, wait_s: float | None = None) -> Job:
        return self._run(lambda: self._client.get(job_id, wait_s=wait_s))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        return self._run(lambda: self._client.wait(job_id, timeout_s=timeout_s))

    def events(self, job_id: str) -> Iterator[Event]:
        return self._iterate(self._client.events(job_id))

    def jobs(self, *, limit: int | None = None, **filters: Any) -> Iterator[Job]:
        return self._iterate(self._client.jobs(limit=limit, **filters))

    def cancel(self, job_id: str) -> Job:
        return self._run(lambda: self._client.cancel(job_id))

    def delete(self, job_id: str) -> None:
        self._run(lambda: self._client.delete(job_id))

    def download(self, job: Job, folder: Path, *, name: str | None = None) -> list[Path]:
        return self._run(lambda: self._client.download(job, folder, name=name))

    def read(self, url: str) -> bytes:
        return self._run(lambda: self._client.read(url))

    def models(self) -> list[dict[str, Any]]:
        return self._run(self._client.models)

    def queues(self) -> list[dict[str, Any]]:
        return self._run(self._client.queues)

    def workers(self) -> list[dict[str, Any]]:
        return self._run(self._client.workers)

    def scale(self, pool: str = "default") -> Scale:
        return self._run(lambda: self._client.scale(pool))

    def dead_letters(self, *, limit: int | None = None) -> Iterator[DeadLetter]:
        return self._iterate(self._client.dead_letters(limit=limit))

    def dead_letter(self, letter_id: str) -> DeadLetter:
        return self._run(lambda: self._client.dead_letter(letter_id))

    def redrive(self, letter_id: str) -> None:
        self._run(lambda: self._client.redrive(letter_id))

    def purge(self, letter_id: str) -> None:
        self._run(lambda: self._client.purge(letter_id))

    def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        return self._portal.call(call)

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        done = object()

        async def next_item() -> T | object:
            return await anext(items, done)

        while (item := self._portal.call(next_item)) is not done:
            yield item  # type: ignore[misc]  # anything but the sentinel is a T
