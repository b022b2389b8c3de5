"""Asks the parts whether they are ready."""

from __future__ import annotations

import socket

import httpx

from cli.process import Process


class Probes:
    """Readiness as the API tells it; `client` has the API's base URL."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def api(self, process: Process) -> bool:
        """Tell whether the API takes jobs."""
        return await self._get("/readyz") is not None

    async def worker(self, process: Process) -> bool:
        """Tell whether the worker has loaded its models and beats."""
        answer = await self._get("/v1/workers")
        ours = (socket.gethostname(), process.pid, "ready")
        return answer is not None and any(
            (worker["host"], worker["pid"], worker["state"]) == ours for worker in answer.json()["data"]
        )

    async def chores(self, process: Process) -> bool:
        """Tell whether the chores worker has said that it is ready; it serves nothing that could be asked."""
        return any("chores_ready" in line for line in process.log.tail())

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            answer = await self._client.get(path)
        except httpx.HTTPError:
            return None
        return answer if answer.is_success else None
