"""Asks the parts whether they are ready."""

from __future__ import annotations

import socket

import httpx

from cli.up.process import Process

KEY_NEEDED = (401, 403)


class Probes:
    """Readiness as the API tells it; `client` has the API's base URL."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def api(self, process: Process) -> bool:
        """Tell whether the API takes jobs."""
        answer = await self._get("/readyz")
        return answer is not None and answer.is_success

    async def worker(self, process: Process) -> bool:
        """Tell whether the worker has loaded its models and beats."""
        if not process.log.ready:
            return False
        answer = await self._get("/v1/workers")
        if answer is None:
            return False
        if answer.status_code in KEY_NEEDED:  # who is at work is for holders of an admin key; its own word must do
            return True
        ours = (socket.gethostname(), process.pid, "ready")
        return any((worker["host"], worker["pid"], worker["state"]) == ours for worker in answer.json()["data"])

    async def chores(self, process: Process) -> bool:
        """Tell whether the chores worker has said that it is ready; it serves nothing that could be asked."""
        return process.log.ready

    async def _get(self, path: str) -> httpx.Response | None:
        try:
            answer = await self._client.get(path)
        except httpx.HTTPError:
            return None
        return answer if answer.is_success or answer.status_code in KEY_NEEDED else None
