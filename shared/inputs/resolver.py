"""Name resolution by the operating system, with a share of it per tenant."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence

from shared.runtime.shares import SharedPool

LOOKUPS = SharedPool("name_lookups", 64)
"""A silent name server keeps a lookup for up to half a minute: the system's timeout, its retries and its servers."""


async def resolve(host: str, port: int, tenant: str, lookups: SharedPool = LOOKUPS) -> Sequence[str]:
    """Return the addresses of `host` in the system's order of preference; raises `OSError` or `Overloaded`.

    The system's resolver knows /etc/hosts, search domains and the order of addresses, and cannot be cancelled: each
    lookup has a thread, which keeps its place of the tenant's share until the system gives up. Nothing is cached here:
    a name is resolved once per request, then its addresses are checked and used.
    """
    if not lookups.take(tenant, 1):
        raise lookups.refusal("too many names of this tenant are being resolved")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Sequence[str]] = loop.create_future()

    def settle(addresses: Sequence[str], error: Exception | None) -> None:
        lookups.release(tenant, 1)
        if answer.done():
            return  # the caller's time was over
        if error is None:
            answer.set_result(addresses)
        else:
            answer.set_exception(error)

    def look_up() -> None:
        addresses: Sequence[str] = ()
        failure: Exception | None = None
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except Exception as error:  # OSError, or UnicodeError for a name that IDNA cannot encode
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has been closed: the process ends
            loop.call_soon_threadsafe(settle, addresses, failure)

    try:
        # A daemon: the end of the process does not wait for it.
        threading.Thread(target=look_up, name="resolve", daemon=True).start()
    except RuntimeError as error:
        lookups.release(tenant, 1)
        raise lookups.refusal("the system starts no more threads") from error
    return await answer
