"""Waiting for a condition instead of sleeping for a time."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Return as soon as `condition()` is true; fail with `what` when it is not in time."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain until {what}")
        time.sleep(0.05)
