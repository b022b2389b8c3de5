"""Clients in a closed loop: each submits a job, waits for it, fetches its image and submits the next."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

REQUEST_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class ClientLoad:
    """Number of concurrent clients, and of images measured in each turn."""

    clients: int
    images: int


class Meter:
    """The steady state of a closed loop: begins after one image per client and lasts for `images`."""

    def __init__(self, load: ClientLoad) -> None:
        self._first = load.clients
        self._last = load.clients + load.images
        self._done = 0
        self._began = self._ended = 0.0

    @property
    def steady(self) -> bool:
        return self._done >= self._first

    @property
    def over(self) -> bool:
        return self._done >= self._last

    def count(self) -> None:
        """Count a fetched image."""
        self._done += 1
        if self._done == self._first:
            self._began = time.perf_counter()
        elif self._done == self._last:
            self._ended = time.perf_counter()

    @property
    def rate(self) -> float:
        """Images per second."""
        return (self._last - self._first) / (self._ended - self._began)


class LightClient:
    """HTTP client of low CPU cost, because it shares the machine with the measured processes."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def get(self, path: str) -> bytes:
        """Return the content of a path or URL, following redirects (to signed URLs); raises `RuntimeError`."""
        return await self._request("GET", path)

    async def post(self, path: str, body: dict[str, object], **headers: str) -> Any:
        """Send `body` as JSON and return the response's JSON; raises `RuntimeError` for an error response."""
        return json.loads(await self._request("POST", path, json=body, headers=headers))

    async def _request(self, method: str, path: str, **options: Any) -> bytes:
        url = path if path.startswith("http") else self._url + path
        async with self._session.request(method, url, **options) as response:
            content = await response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {content[:500]!r}")
        return content


@asynccontextmanager
async def light_client(url: str) -> AsyncIterator[LightClient]:
    """Yield a client without a limit of connections."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield LightClient(url, session)


async def run_client(
    http: LightClient,
    jobs: Iterator[dict[str, object]],
    meter: Meter,
    keep: Callable[[dict[str, object], dict[str, Any], bytes], None] | None = None,
) -> None:
    """Request images until the measurement is over; `keep` gets each request, its job and its image."""
    while not meter.over:
        body = next(jobs)
        job = await http.post("/v1/jobs", body, Prefer="wait=60")
        while job["status"] in ("queued", "running"):
            job = json.loads(await http.get(f"/v1/jobs/{job['id']}?wait=60"))
        if job["status"] != "succeeded":
            raise RuntimeError(f"job {job['id']}: {job['status']} {job['error']}")
        image = await http.get(job["artifacts"][0]["url"])
        if keep is not None:
            keep(body, job, image)
        meter.count()
