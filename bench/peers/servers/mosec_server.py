"""Mosec: its HTTP server and batcher are compiled; one worker process runs the model."""

from __future__ import annotations

import os
from typing import Any

from bench.peers.servers.batch_call import HOST, ROUTE, TIMEOUT_S, BatchCall, ImageRequest, PeerSettings

# Read from the environment when mosec is imported, also by the worker process.
os.environ |= {
    "MOSEC_ADDRESS": HOST,
    "MOSEC_PORT": str(PeerSettings.from_environment().port),
    "MOSEC_TIMEOUT": str(1000 * TIMEOUT_S),
    "MOSEC_LOG_LEVEL": "warning",
}

import mosec


class Images(mosec.Worker):
    """Takes up to `requests` requests at once."""

    def __init__(self) -> None:
        super().__init__()
        self._call = BatchCall(PeerSettings.from_environment().model)

    def forward(self, data: list[ImageRequest]) -> list[dict[str, Any]]:
        return self._call(data)


def main() -> None:
    """Serve until terminated."""
    settings = PeerSettings.from_environment()
    server = mosec.Server()
    server.append_worker(
        Images,
        num=1,
        max_batch_size=settings.requests,
        max_wait_time=settings.wait_ms,
        route=ROUTE,
    )
    server.run()


if __name__ == "__main__":
    main()
