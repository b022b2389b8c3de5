"""The prompts of a stream, read on a thread: a source that waits holds up no result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Read:
    """A prompt of the source."""

    prompt: Any


@dataclass(frozen=True)
class Ended:
    """The source has no more prompts, or has raised an error."""

    error: BaseException | None = None


class Source:
    """Reads a prompt for each `ask`, and hands it to `put` on its own thread."""

    def __init__(self, prompts: Iterable[Any], put: Callable[[Read | Ended], None]) -> None:
        self._prompts = iter(prompts)
        self._put = put
        self._asked = threading.Semaphore(0)
        self._closed = False
        # A source that never returns, such as a terminal, must not keep the process from ending.
        threading.Thread(target=self._run, name="prompts", daemon=True).start()

    def ask(self) -> None:
        self._asked.release()

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
