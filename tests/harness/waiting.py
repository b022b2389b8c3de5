"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Return when `condition()` is true; fail with `what` after the timeout.

    It is asked less often the longer it takes: 20 reads a second over HTTP take a tenth of a core.
    """
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise AssertionError(f"timeout of {timeout_s:.0f} s waiting until {what}")
        time.sleep(min(0.3, max(0.02, waited / 10)))
