"""Where waiting jobs stand, as of at most a second ago: clients poll more often than lines move."""

from __future__ import annotations

import time
from collections import OrderedDict

from shared.queue import Queue, QueuePosition

FRESH_S = 1.0
MAX_KEPT = 10_000


class QueuePositions:
    """Asks the queue for a job's place once a second at most; keeps a bounded number of answers."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._kept: OrderedDict[str, tuple[float, QueuePosition | None]] = OrderedDict()

    async def of(self, job_id: str) -> QueuePosition | None:
        """Return where a job stands, None when it does not wait."""
        kept = self._kept.get(job_id)
        if kept is not None and time.monotonic() - kept[0] < FRESH_S:
            return kept[1]
        place = await self._queue.jobs.position(job_id)
        self._kept[job_id] = (time.monotonic(), place)
        self._kept.move_to_end(job_id)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return place
