"""Ray Serve: one replica, with `serve.batch` before the model, which runs in a thread of the replica."""

from __future__ import annotations

import asyncio
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
OBJECT_STORE_BYTES = 128 * 1024 * 1024


@serve.deployment(num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 1})
class Images:
    """Takes up to `requests` requests at once."""

    def __init__(self) -> None:
        self._call = BatchCall(SETTINGS.model)

    @serve.batch(max_batch_size=SETTINGS.requests, batch_wait_timeout_s=SETTINGS.wait_ms / 1000)
    async def generate(self, requests: list[ImageRequest]) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self._call, requests)  # the replica's event loop goes on to read requests

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
        serve.run(Images.bind(), route_prefix=ROUTE, blocking=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
