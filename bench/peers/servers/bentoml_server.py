"""BentoML: one worker process; its dispatcher adapts how long it waits to the durations that it sees.

Started by `bentoml serve`. `max_latency_ms` is no wait window: requests that would take longer are refused.
"""

from __future__ import annotations

from typing import Any

import bentoml

from bench.peers.servers.batch_call import ROUTE, TIMEOUT_S, BatchCall, PeerSettings

SETTINGS = PeerSettings.from_environment()


@bentoml.service(workers=1, traffic={"timeout": TIMEOUT_S}, logging={"access": {"enabled": False}})
class Images:
    """Takes up to `requests` requests at once; the body of one is a list of one."""

    def __init__(self) -> None:
        self._call = BatchCall(SETTINGS.model)

    @bentoml.api(batchable=True, max_batch_size=SETTINGS.requests, max_latency_ms=1000 * TIMEOUT_S, route=ROUTE)
    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self._call(requests)
