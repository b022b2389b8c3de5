"""The prompts of a stream, read ahead as they are asked for: a source that waits holds up no result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shared.runtime.asyncio_tools import cancel_and_wait


@dataclass(frozen=True)
class Read:
    """A prompt of the source."""

    prompt: Any


@dataclass(frozen=True)
class Ended:
    """The source has no more prompts, or has raised an error."""

    error: BaseException | None = None


class Source:
    """Hands as many prompts to `put` as `ask` names: of a list at once, of others on its own thread."""

    def __init__(self, prompts: Iterable[Any], put: Callable[[Read | Ended], None]) -> None:
        self._prompts = iter(prompts)
        self._put = put
        self._asked = threading.Semaphore(0)
        self._closed = False
        self._is_list = isinstance(prompts, list | tuple)
        if not self._is_list:
            # A source that never returns, such as a terminal, must not keep the process from ending.
            threading.Thread(target=self._run, name="prompts", daemon=True).start()

    def ask(self, count: int) -> None:
        if not self._is_list:
            return self._asked.release(count)
        found = list(islice(self._prompts, count))
        for prompt in found:
            self._put(Read(prompt))
        if len(found) < count:
            self._put(Ended())

    def close(self) -> None:
        """Read no more; the thread ends when the source returns."""
        self._closed = True
        self._asked.release()

    def _run(self) -> None:
        try:
            while self._asked.acquire() and not self._closed:
                try:
                    prompt = next(self._prompts)
                except StopIteration:
                    self._put(Ended())
                    return
                self._put(Read(prompt))
        except BaseException as error:
            self._put(Ended(error))


class AsyncSource:
    """`Source` for an asynchronous iterable, which a task reads."""

    def __init__(self, prompts: AsyncIterable[Any], put: Callable[[Read | Ended], None]) -> None:
        self._prompts = aiter(prompts)
        self._put = put
        self._asked = asyncio.Semaphore(0)
        self._task = asyncio.create_task(self._run())

    def ask(self, count: int) -> None:
        for _ in range(count):
            self._asked.release()

    async def aclose(self) -> None:
        """Read no more, and close the source."""
        await cancel_and_wait((self._task,))
        if isinstance(self._prompts, AsyncGenerator):
            await self._prompts.aclose()

    async def _run(self) -> None:
        try:
            while await self._asked.acquire():
                try:
                    prompt = await anext(self._prompts)
                except StopAsyncIteration:
                    self._put(Ended())
                    return
                self._put(Read(prompt))
        except BaseException as error:
            self._put(Ended(error))
            if not isinstance(error, Exception):
                raise
