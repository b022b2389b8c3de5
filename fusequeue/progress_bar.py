"""A bar on the terminal, for a client that needs no package for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sized

_WIDTH = 24
_INTERVAL_S = 0.1


class ProgressBar:
    """Shows on stderr how many of the items are done, if that is a terminal or a notebook and `shown` is true."""

    def __init__(self, items: Iterable[object], shown: bool) -> None:
        self._total = len(items) if isinstance(items, Sized) else None
        self._shown = shown and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._done = 0
        self._started = time.monotonic()
        self._drawn = 0.0
        self._draw()

    def advance(self) -> None:
        self._done += 1
        if self._done == self._total or time.monotonic() - self._drawn >= _INTERVAL_S:
            self._draw()

    def close(self) -> None:
        """End its line."""
        if self._shown:
            self._draw()
            sys.stderr.write("\n")
            self._shown = False

    def _draw(self) -> None:
        if self._shown:
            self._drawn = time.monotonic()
            sys.stderr.write(f"\r{bar_line(self._done, self._total, self._drawn - self._started)} ")
            sys.stderr.flush()


def bar_line(done: int, total: int | None, passed_s: float) -> str:
    """Return a bar with the counts, the time that has passed and the time that is left."""
    if total is None:
        return f"{done} done, {_minutes(passed_s)}"
    filled = _WIDTH * done // total if total else _WIDTH
    left = f", {_minutes(passed_s * (total - done) / done)} left" if 0 < done < total else ""
    return f"{'█' * filled}{'░' * (_WIDTH - filled)} {done}/{total} {_minutes(passed_s)}{left}"


def _minutes(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
