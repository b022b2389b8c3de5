"""The queue, as the rest of fusequeue sees it."""

from __future__ import annotations

from shared.config.settings import Settings
from shared.queue.api_keys import Access
from shared.queue.batches import Backfilling
from shared.queue.claims import Claiming
from shared.queue.client import connect_blocking, connect_commands
from shared.queue.files import Filing
from shared.queue.maintenance import Upkeep
from shared.queue.previews import Previewing
from shared.queue.reading import Reading
from shared.queue.redis_check import Examining
from shared.queue.submission import Submitting
from shared.queue.sync_calls import Tries
from shared.queue.webhooks import Hooking


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
