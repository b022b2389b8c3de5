"""Listening sockets that several API processes share.

They belong to `fusequeue up`, so that none of the queued connections is lost when one of the processes ends. With
SO_REUSEPORT each process would have its own queue, and macOS would give all connections to one.
"""

import errno
import socket

from shared.errors import ConfigurationError

BACKLOG = 1024  # connections that wait to be accepted


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host`; raises `ConfigurationError` if the port is not free."""
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(infos):
            try:
                listeners.append(_listen(socket.socket(family, kind, protocol), address))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 can be switched off
                    raise
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, "no address of this host is one of this machine")
    except OSError as error:
        close(listeners)
        reason = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise ConfigurationError(f"{reason}; choose others with --host and --port") from error
    return listeners


def _listen(listener: socket.socket, address: tuple[object, ...]) -> socket.socket:
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def close(listeners: list[socket.socket]) -> None:
    """Close the sockets: what connects later is refused once the processes have closed theirs."""
    for listener in listeners:
        listener.close()
