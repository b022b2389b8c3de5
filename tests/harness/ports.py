"""Ports for the servers of tests."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below the ephemeral range: connections take ports there, also that of a server which restarts."""

_chance = random.SystemRandom()  # a seed of some test's must not give the same ports again
_given: set[int] = set()


def free_port() -> int:
    """Return a port of the loopback that nobody has, and that this process was not given before."""
    for _ in range(1000):
        port = _chance.randint(LOWEST, HIGHEST)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise AssertionError(f"no port from {LOWEST} to {HIGHEST} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one whose connections linger is free to servers
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True
