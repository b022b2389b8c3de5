"""Ray Serve: one replica with `serve.batch`.

The model's call holds the replica's event loop up. In a thread, each wait window would end as a batch of its own while
the model is busy: at 0.6 of the rate of full batches, the median latency was 22 solo calls instead of 2.8.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

# Read when Ray is imported, also by its processes: replicas serve HTTP themselves, and log little on a request's path.
os.environ |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from ray import serve
from starlette.requests import Request

from bench.peers.servers.batch_call import (
    HOST,
    ROUTE,
    BatchCall,
    ImageRequest,
    PeerSettings,
)

SETTINGS = PeerSettings.from_environment()
WAITING_REQUESTS = 1000
OBJECT_STORE_BYTES = 128 * 1024 * 1024


class Images:
    """Takes up to `requests` requests at once."""

    def __init__(self) -> None:
        self._call = BatchCall(SETTINGS.model)

    @serve.batch(max_batch_size=SETTINGS.requests, batch_wait_timeout_s=SETTINGS.wait_ms / 1000)
    async def generate(self, requests: list[ImageRequest]) -> list[dict[str, Any]]:
        return self._call(requests)

    async def __call__(self, request: Request) -> dict[str, Any]:
        response: dict[str, Any] = await self.generate(await request.json())
        return response


def main() -> None:
    """Serve until terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        _temp_dir=str(Path(SETTINGS.model).parent / "ray"),
    )
    try:
        serve.start(http_options={"host": HOST, "port": SETTINGS.port, "access_log": False})
        deployment = serve.deployment(num_replicas=1, max_ongoing_requests=WAITING_REQUESTS)(Images)
        serve.run(deployment.bind(), route_prefix=ROUTE, blocking=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
