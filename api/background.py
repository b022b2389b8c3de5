"""Work that outlasts a chore: on an event loop in a thread, which both live as long as the process.

rq runs one chore at a time. One that waited for its slowest delivery or batch would hold up those of other tenants. So
a chore begins work and returns, and what is in progress continues here.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from shared.config import settings
from shared.config.settings import Settings
from shared.errors import Unavailable

DRAIN_TIMEOUT_S = 60.0

stopping = threading.Event()
"""Set when this process begins to stop: passes end early."""

_open: list["Background"] = []


class Pass(Protocol):
    async def run(self) -> int:
        """Begin due work for a while, and return how much was begun."""
        ...


class Background:
    """Opens a pass at the first chore, and runs it at each."""

    def __init__(self, opened: Callable[[Settings], contextlib.AbstractAsyncContextManager[Pass]]) -> None:
        self._opened = opened
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stack = contextlib.AsyncExitStack()
        self._pass: Pass | None = None

    def run(self) -> int:
        """Run the pass and return its result; called from the thread of a chore."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="chores-background", daemon=True)
            self._thread.start()
            _open.append(self)
        running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        try:
            return running.result()
        except BaseException:  # also rq's timeout
            running.cancel()
            raise

    async def _run(self) -> int:
        if self._pass is None:
            self._pass = await self._stack.enter_async_context(self._opened(settings.load()))
        return await self._pass.run()

    def close(self) -> None:
        """Wait for what is in progress, and end the thread."""
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(TimeoutError, Unavailable):
            asyncio.run_coroutine_threadsafe(self._stack.aclose(), self._loop).result(DRAIN_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        _open.remove(self)
        self._loop = self._thread = self._pass = None


def close_all() -> None:
    """Close what the chores of this process have opened."""
    for background in tuple(_open):
        background.close()
