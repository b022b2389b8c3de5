"""The items of one stream: prompts that are read together start together."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from library.requests import Fields
from library.results import Result
from library.session import Session, Watchers
from library.sources import Ended, Read

Event: TypeAlias = Read | Ended | Future[Result]

TOGETHER_S = 0.005
"""How long a prompt waits for one that the source is to give: in its first forward they are then rows of one batch."""
PREPARE_S = 0.05  # a prompt takes 0.3 ms; large images take up to seconds, for which the others do not wait


class Items:
    """At most `most` items that are read or run. `put` gets each one's future when it is done, on any thread.

    `start` can be called on another thread than the rest: what it starts after `cancel`, it cancels itself.
    """

    def __init__(
        self,
        session: Session,
        most: int,
        fields_of: Callable[[Any], Fields],
        watchers: Watchers,
        put: Callable[[Event], None],
    ) -> None:
        self._session = session
        self._most = most
        self._fields_of = fields_of
        self._watchers = watchers
        self._put = put
        self._numbers = itertools.count()
        self._read = deque[Any]()
        self._running = set[Future[Result]]()
        self._asked = 0  # prompts that the source has not given
        self._has_more = True
        self._canceled = threading.Event()

    @property
    def unfinished(self) -> bool:
        """Whether there is something to wait for; a closed session reads no more."""
        self._has_more = self._has_more and not self._session.closed
        return self._has_more or bool(self._running)

    def wanted(self) -> int:
        """Return how many prompts to ask for: none until a quarter of `most` are missing, as they start together."""
        missing = self._most - len(self._running) - self._asked
        count = missing if self._has_more and missing >= max(1, self._most // 4) else 0
        self._asked += count
        return count

    def awaits_mates(self, arrived: Sequence[Event]) -> bool:
        """Return whether the prompts among some events are about to be followed by others."""
        read = sum(isinstance(event, Read) for event in arrived)
        return 0 < read < self._asked and not any(isinstance(event, Ended) for event in arrived)

    def read(self, arrived: Sequence[Event]) -> bool:
        """Take the prompts among some events; return whether `start` has something to do."""
        prompts = [event.prompt for event in arrived if isinstance(event, Read)]
        self._asked -= len(prompts)
        self._read.extend(prompts)
        return bool(prompts)

    def start(self) -> None:
        """Start what is read. Images are read and encoded: up to seconds."""
        while self._read:
            until, batch = time.monotonic() + PREPARE_S, []
            while self._read and time.monotonic() < until:
                fields = self._fields_of(self._read.popleft())
                batch.append(self._session.prepare(next(self._numbers), fields, self._watchers))
            self._running.update(item.future for item in batch)
            self._session.submit(batch)
            for item in batch:
                item.future.add_done_callback(self._put)
            if self._canceled.is_set():
                self.cancel()

    def ended(self, arrived: Sequence[Event]) -> Iterator[Result]:
        """Yield the results among some events; raises the error of the source."""
        for event in arrived:
            if isinstance(event, Future):
                self._running.discard(event)
                yield event.result()
            elif isinstance(event, Ended):
                self._has_more = False
                if event.error is not None:
                    raise event.error

    def cancel(self) -> None:
        self._canceled.set()
        for future in list(self._running):
            self._session.cancel(future)
