"""Who may reach an API that asks for no key: this machine alone, unless an operator says the word."""

from __future__ import annotations

import asyncio
import ipaddress
from urllib.parse import urlsplit

import structlog

from shared.config.settings import Settings
from shared.errors import ConfigurationError, HostRefused, RedisUnavailable
from shared.queue import Queue

log = structlog.get_logger()

CHECK_TIMEOUT_S = 10.0


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches `host`; a name other than localhost may be any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_own_host(host: str | None, settings: Settings) -> None:
    """Raise `HostRefused` where a request that needs no key names another host than this machine.

    A page of any site can have its own name resolve to 127.0.0.1, and would then read and write here as its own origin.
    """
    if settings.auth == "insecure-no-keys" or is_loopback(host or ""):
        return
    if settings.public_url is not None and host == urlsplit(settings.public_url).hostname:
        return
    raise HostRefused(
        f"without API keys this answers to localhost alone, and not to {(host or 'no host')[:100]!r}; make a key with "
        "`fusequeue keys create`, or set FUSEQUEUE_PUBLIC_URL to where clients reach it",
        param="Host",
    )


async def guarded(settings: Settings, host: str) -> Settings:
    """Return the settings to serve `host` with; raises `ConfigurationError` where that would be open to others.

    Off the loopback `auto` becomes `keys`, once there are any: what is found now must not change to open later.
    """
    if is_loopback(host) or settings.auth == "keys":
        return settings
    if settings.auth == "insecure-no-keys":
        log.warning("insecure_no_keys", host=host, told="whoever reaches this address may use all of it")
        return settings
    if not await _keys_made(settings):
        raise ConfigurationError(
            f"there are no API keys, so {host} would be open to whoever reaches it. Make a key first with "
            "`fusequeue keys create`, or set FUSEQUEUE_AUTH=keys and make it while the API runs, or listen on "
            "127.0.0.1. To serve without keys nevertheless: --insecure-no-keys"
        )
    return settings.model_copy(update={"auth": "keys"})


async def _keys_made(settings: Settings) -> bool:
    """Return whether there has been a key. A Redis that is away cannot tell: keys are asked for then."""
    queue = Queue.connect(settings)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await queue.api_keys.any_created()
    except (RedisUnavailable, TimeoutError) as error:
        log.warning("keys_unknown", reason=str(error), told="the API asks for keys")
        return True
    finally:
        await queue.close()
