"""The queue, as the rest of fusequeue sees it."""

from __future__ import annotations

from shared.queue.access import Access
from shared.queue.backfills import Backfilling
from shared.queue.claiming import Claiming
from shared.queue.client import connect_blocking, connect_commands
from shared.queue.examine import Examining
from shared.queue.filing import Filing
from shared.queue.hooks import Hooking
from shared.queue.previews import Previewing
from shared.queue.reading import Reading
from shared.queue.submission import Submitting
from shared.queue.tries import Tries
from shared.queue.upkeep import Upkeep
from shared.settings import Settings


class Queue(Submitting, Reading, Claiming, Upkeep, Access, Examining, Hooking, Filing, Tries, Backfilling, Previewing):
    """The jobs of one namespace. Every method raises `RedisUnavailable` when Redis does not serve.

    Times are Redis' own. A job is in line, in one worker's hands, or ended; each move between is one script.
    """

    @classmethod
    def connect(cls, settings: Settings) -> Queue:
        """Return a queue with clients of its own: one for commands, one for what may block. `close` closes both."""
        url = settings.redis_url
        return cls(
            connect_commands(url), namespace=settings.namespace, settings=settings, blocking=connect_blocking(url)
        )
