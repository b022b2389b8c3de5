"""Free ports for the servers of tests."""

from __future__ import annotations

import os
import random
import socket

LOWEST, HIGHEST = 20_000, 32_000
"""Below the ephemeral ports, which a connection could take while a server restarts."""

_rng = random.SystemRandom()  # independent of seeds set by tests
_returned: set[int] = set()
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# A process that has replaced a crashed one has the next number.
_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PROCESSES


def free_port(*, next_at: int = 0) -> int:
    """Return a free loopback port that neither this process nor another one of the test run has returned before.

    The port `next_at` above it is free as well.
    """
    for _ in range(1000):
        port = _rng.randint(LOWEST, HIGHEST - next_at)
        if port % _PROCESSES == _PROCESS and port not in _returned and _is_free(port) and _is_free(port + next_at):
            _returned.add(port)
            return port
    raise AssertionError(f"no port from {LOWEST} to {HIGHEST} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port with connections in TIME_WAIT is free
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True
