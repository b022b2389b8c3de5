"""The ports of what `fusequeue up` starts: which are free, and listening sockets that several processes share."""

import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigurationError

ATTEMPTS = 100
BACKLOG = 1024  # connections that wait to be accepted


@contextmanager
def reserved_port(host: str, port: int, remedy: str = "choose another with --port") -> Iterator[int]:
    """Reserve `port` or the next free one, and yield it; raises `ConfigurationError`.

    Another `up` skips a reserved port, also before this one's process listens on it and while that process restarts.
    """
    last = min(port + ATTEMPTS, 65_536) - 1
    for candidate in range(port, last + 1):
        lock = _lock(candidate)
        if lock is None:
            continue
        try:
            if _is_free(host, candidate):
                yield candidate
                return
        finally:
            os.close(lock)
    raise ConfigurationError(f"ports {port} to {last} are all taken; {remedy}")


def _lock(port: int) -> int | None:
    """Lock the file of `port` and return its descriptor; None if another process has it.

    Raises `ConfigurationError` where no file can be locked.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"fusequeue-{os.getuid()}-port-{port}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except PermissionError:  # the file of another user
        return None
    except OSError as error:
        raise _no_lock(error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise _no_lock(error) from error
    return lock


def _no_lock(error: OSError) -> ConfigurationError:
    reason = error.strerror or error
    return ConfigurationError(f"no port can be reserved: {reason}; set TMPDIR to a local folder with free space")


def _is_free(host: str, port: int) -> bool:
    """Return whether a server can listen on `port`; raises `ConfigurationError` if none can on `host`."""
    try:
        close(_listen_on_all(host, port))
    except UnicodeError as error:
        raise ConfigurationError(f"cannot listen on {host!r:.80}: not the name of a host; change --host") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise ConfigurationError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return True


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host`; raises `ConfigurationError` if the port is not free.

    The sockets belong to `fusequeue up`, so that none of the queued connections is lost when one of the processes
    that share them ends. With SO_REUSEPORT each process would have its own queue, and macOS would give all
    connections to one.
    """
    try:
        return _listen_on_all(host, port)
    except OSError as error:
        reason = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise ConfigurationError(f"{reason}; choose others with --host and --port") from error


def _listen_on_all(host: str, port: int) -> list[socket.socket]:
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
    except OSError:
        close(listeners)
        raise
    return listeners


def _listen(listener: socket.socket, address: tuple[object, ...]) -> socket.socket:
    """Listen; a port with old connections in TIME_WAIT counts as free, as it does for other servers."""
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
