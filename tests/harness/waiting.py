"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Return when `condition()` is true; fail with `what` after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"timeout of {timeout_s:.0f} s waiting until {what}")
        time.sleep(0.05)
