"""LitServe: one worker, which collects a batch during each wait window."""

from __future__ import annotations

import sys
from typing import Any

# The mcp of this project is visible here, and LitServe would use it together with fastmcp, which is not.
sys.modules["mcp"] = None  # type: ignore[assignment]

import litserve  # noqa: E402

from bench.peers.servers.batch_call import (  # noqa: E402
    HOST,
    ROUTE,
    TIMEOUT_S,
    BatchCall,
    ImageRequest,
    PeerSettings,
)


class Images(litserve.LitAPI):
    """Takes up to `requests` requests at once."""

    def setup(self, device: str) -> None:
        self._call = BatchCall(PeerSettings.from_environment().model)

    def batch(self, inputs: list[ImageRequest]) -> list[ImageRequest]:
        return inputs

    def predict(self, x: list[ImageRequest]) -> list[dict[str, Any]]:
        return self._call(x)

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return output


def main() -> None:
    """Serve until terminated."""
    settings = PeerSettings.from_environment()
    api = Images(max_batch_size=settings.requests, batch_timeout=settings.wait_ms / 1000, api_path=ROUTE)
    server = litserve.LitServer(
        api,
        accelerator="cpu",
        devices=1,
        workers_per_device=1,
        timeout=TIMEOUT_S,
        fast_queue=True,  # ZeroMQ instead of a multiprocessing manager's queue
    )
    server.run(
        host=HOST,
        port=settings.port,
        num_api_servers=1,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )


if __name__ == "__main__":
    main()
