"""Finds ports that nobody listens on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from shared.errors import ConfigurationError

TRIES = 100


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on `host` and `port` now; raises OSError for a host that is not ours."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a port whose old connections linger in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def first_free(host: str, port: int, tell: Callable[[str], None], what: str) -> int:
    """Return `port` or the next one that is free, and tell when it is another."""
    for candidate in range(port, min(port + TRIES, 65_536)):
        try:
            free = is_free(host, candidate)
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host} port {candidate}: {error.strerror}") from error
        if free:
            if candidate != port:
                tell(f"port {port} is taken; {what} gets {candidate}")
            return candidate
    raise ConfigurationError(f"ports {port} to {candidate} are all taken; name another with --port")
