"""Whether requests need an API key. From the first key on they do, for good: also when Redis has lost all its data.

An object in the storage, the marker, says that a namespace has had a key. `fusequeue keys create` and every API process
that sees a key write it; every API process reads it before it serves a request without a key.
"""

from __future__ import annotations

import asyncio
import random

import structlog

from api.keyless import is_loopback
from shared.auth import keys_marked, mark_keys
from shared.config.settings import Settings
from shared.errors import ConfigurationError, RedisUnavailable, StorageUnavailable, Unavailable
from shared.queue import Queue
from shared.storage import Storage, connect

log = structlog.get_logger()

READ_TIMEOUT_S = 5.0
CHECK_EVERY_S = 5.0
RETRY_EVERY_S = 1.0


class KeysRequired:
    """Latch: None while Redis decides, then True for the rest of the process; False with `insecure-no-keys`."""

    def __init__(self, queue: Queue, storage: Storage, settings: Settings) -> None:
        self._queue = queue
        self._storage = storage
        self._namespace = settings.namespace
        self._mode = settings.auth
        self._created = False
        self._marked: bool | None = None
        self._failing = False

    @property
    def decided(self) -> bool | None:
        """True or False whatever Redis holds; None: True once a key exists."""
        if self._mode == "insecure-no-keys":
            return False
        return True if self._mode == "keys" or self._created or self._marked else None

    @property
    def known(self) -> bool:
        """Whether the storage has said if there was a key; until then requests without a key are refused."""
        return self.decided is not None or self._marked is not None

    def note_created(self) -> None:
        """Record that a key exists."""
        self._created = True

    async def watch(self) -> None:
        """Read the marker until the storage responds, and write it once a key exists; return when it is written."""
        while self._mode != "insecure-no-keys" and not self._marked:
            await self.update()
            pause_s = RETRY_EVERY_S if self._marked is None else CHECK_EVERY_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))

    async def update(self) -> None:
        """Read the marker, unless it is known, and write it if a key exists; an outage leaves that to the next call."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                if not self._marked:  # another process can have written it
                    self._marked = await keys_marked(self._storage, self._namespace)
                self._created = self._created or await self._queue.api_keys.any_created()
                if self._created and not self._marked:
                    await mark_keys(self._storage, self._namespace)
                    self._marked = True
                    log.info("keys_marked", namespace=self._namespace)
            self._failing = False
        except (Unavailable, TimeoutError) as error:
            if not self._failing:
                log.warning("keys_marker_failed", reason=str(error), known=self.known)
            self._failing = True


async def secured(settings: Settings, host: str) -> Settings:
    """Return the settings to serve `host` with, or raise `ConfigurationError` where it would be open to others.

    Off the loopback, `auto` becomes `keys` once a key exists: the API must not turn open later.
    """
    if is_loopback(host) or settings.auth == "keys":
        return settings
    if settings.auth == "insecure-no-keys":
        log.warning("auth_disabled", host=host, detail="anyone who reaches this address can use all of the API")
        return settings
    if not await _keys_exist(settings):
        raise ConfigurationError(
            f"there are no API keys, so {host} would be open to everyone who reaches it. Create a key first with "
            "`fusequeue keys create`, or set FUSEQUEUE_AUTH=keys and create it while the API runs, or listen on "
            "127.0.0.1. To serve without keys nevertheless: --insecure-no-keys"
        )
    return settings.model_copy(update={"auth": "keys"})


async def _keys_exist(settings: Settings) -> bool:
    """Return whether a key has ever existed; True while Redis or the storage is silent: the API stays closed."""
    queue, storage = Queue.connect(settings), connect(settings)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await queue.api_keys.any_created() or await keys_marked(storage, settings.namespace)
    except (RedisUnavailable, StorageUnavailable, TimeoutError) as error:
        log.warning("key_lookup_failed", reason=str(error), detail="the API requires keys")
        return True
    finally:
        await storage.close()
        await queue.close()
