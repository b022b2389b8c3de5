"""Clients in a closed loop: each submits a job, waits for it, fetches its image and submits the next."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

REQUEST_TIMEOUT_S = 90.0
HEARTBEATS_S = 1.2  # a worker sends its counters twice per second


@dataclass(frozen=True)
class ClientLoad:
    """Number of concurrent clients, and of images measured in each turn."""

    clients: int
    images: int


class Meter:
    """The steady state of a closed loop: begins after one image per client and lasts for `images`."""

    def __init__(self, load: ClientLoad) -> None:
        self.clients = self._first = load.clients
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
        return await self.request("GET", path)

    async def post(self, path: str, body: dict[str, object], **headers: str) -> Any:
        """Send `body` as JSON and return the response's JSON; raises `RuntimeError` for an error response."""
        return json.loads(await self.request("POST", path, json=body, headers=headers))

    async def request(self, method: str, path: str, **options: Any) -> bytes:
        """Return the content of the response; raises `RuntimeError` for an error response."""
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


async def finished(http: LightClient, body: dict[str, object]) -> tuple[dict[str, Any], bytes]:
    """Submit a job and wait for it; return it and its image, or raise `RuntimeError` if it has none."""
    job = await http.post("/v1/jobs", body, Prefer="wait=60")
    while job["status"] in ("queued", "running"):
        job = json.loads(await http.get(f"/v1/jobs/{job['id']}?wait=60"))
    if job["status"] != "succeeded":
        raise RuntimeError(f"job {job['id']}: {job['status']} {job['error']}")
    return job, await http.get(job["artifacts"][0]["url"])


async def together(clients: int, client: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run clients until all have ended."""
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def closed_loop(
    http: LightClient,
    meter: Meter,
    jobs: Iterator[dict[str, object]],
    keep: Callable[[dict[str, object], dict[str, Any], bytes], None] | None = None,
) -> None:
    """Request images until the measurement is over; `keep` gets each request, its job and its image."""

    async def client() -> None:
        while not meter.over:
            body = next(jobs)
            job, image = await finished(http, body)
            if keep is not None:
                keep(body, job, image)
            meter.count()

    await together(meter.clients, client)


@dataclass
class WorkerWork:
    """What the worker did, by its counters."""

    forwards: float = 0
    forward_rows: float = 0
    busy_s: float = 0
    idle_while_queued_s: float = 0

    @property
    def rows_per_forward(self) -> float:
        return self.forward_rows / max(1, self.forwards)

    @property
    def idle_share(self) -> float:
        """Share of the time while jobs were queued."""
        return self.idle_while_queued_s / max(1e-9, self.idle_while_queued_s + self.busy_s)


@asynccontextmanager
async def counted(http: LightClient) -> AsyncIterator[WorkerWork]:
    """Yield what the worker does inside, known at the end; raises `RuntimeError` if another one has taken its place."""
    before, work = await _counters(http), WorkerWork()
    yield work
    after = await _counters(http)
    if before["id"] != after["id"]:
        raise RuntimeError("the worker was restarted during a turn; its messages are above")
    for counter in fields(work):
        setattr(work, counter.name, after[counter.name] - before[counter.name])


async def _counters(http: LightClient) -> dict[str, Any]:
    """Return the worker's counters after its next heartbeat."""
    await asyncio.sleep(HEARTBEATS_S)
    (worker,) = json.loads(await http.get("/v1/workers"))["data"]
    return dict(worker)


async def scrape(port: int) -> dict[str, float]:
    """Return the worker's metrics by name, summed over their labels."""
    async with light_client(f"http://127.0.0.1:{port}") as http:
        text = (await http.get("/metrics")).decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
