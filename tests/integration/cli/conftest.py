"""The event loop of tests of commands."""

from __future__ import annotations

import asyncio
from typing import Any


def pytest_asyncio_loop_factories() -> dict[str, Any]:
    """Return asyncio's own loop: the processes that it starts are forked, those of uvloop are executed."""
    return {"asyncio": asyncio.new_event_loop}
