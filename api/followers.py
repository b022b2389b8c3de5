"""How many clients of this process wait for something to happen to a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from api.errors import TooManyStreams
from shared.runtime import metrics

# Each holds a connection and a bounded queue; with many more the process would run out of file descriptors.
MAX_FOLLOWERS = 5_000


class WaiterLimit:
    """Counts those who follow a job, by a stream or by a request that waits."""

    def __init__(self) -> None:
        self._count = 0

    def check(self) -> None:
        """Raise `TooManyStreams` where there is no room for one more."""
        if self._count >= MAX_FOLLOWERS:
            raise TooManyStreams(f"{MAX_FOLLOWERS} clients are following jobs here already")

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one for as long as it follows, or raise `TooManyStreams`."""
        self.check()
        self._count += 1
        metrics.event_subscribers.inc()
        try:
            yield
        finally:
            self._count -= 1
            metrics.event_subscribers.dec()
