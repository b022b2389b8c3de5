"""How the engine's thread spends its time; what it lacks is work, or is it only late to hear of it?"""

from __future__ import annotations


class ThreadTimer:
    """Adds up the time with pictures to go on with, and the time without while a job waited in line.

    Times are `time.monotonic()`, passed in. One thread writes; any may read.
    """

    def __init__(self, now_s: float) -> None:
        self.idle_while_queued_s = 0.0
        self._busy_s = 0.0
        self._since_s = now_s
        self._working = False

    def rest(self, now_s: float) -> None:
        """Note that there is nothing to go on with."""
        if self._working:
            self._busy_s += now_s - self._since_s
            self._since_s, self._working = now_s, False

    def work(self, now_s: float, queued_since_s: float) -> None:
        """Note that a job came which had stood in line since `waiting_since_s`."""
        if not self._working:
            self.idle_while_queued_s += max(0.0, now_s - max(self._since_s, queued_since_s))
            self._since_s, self._working = now_s, True

    def busy_s(self, now_s: float) -> float:
        """Return the time with pictures to go on with, up to now."""
        return self._busy_s + (now_s - self._since_s if self._working else 0.0)
