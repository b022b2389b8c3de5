"""Clients in a closed loop: each asks for a picture, waits for it, fetches it and asks for the next."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

REQUEST_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class Load:
    """How much is asked for: `clients` at a time, and `pictures` in each turn's measurement."""

    clients: int
    pictures: int


class Meter:
    """The steady state of a closed loop: from when every client has had a picture to `pictures` later."""

    def __init__(self, load: Load) -> None:
        self._first = load.clients
        self._last = load.clients + load.pictures
        self._done = 0
        self._began = self._ended = 0.0

    @property
    def steady(self) -> bool:
        return self._done >= self._first

    @property
    def over(self) -> bool:
        return self._done >= self._last

    def note(self) -> None:
        """Count one more picture that a client holds in its hands."""
        self._done += 1
        if self._done == self._first:
            self._began = time.perf_counter()
        elif self._done == self._last:
            self._ended = time.perf_counter()

    @property
    def rate(self) -> float:
        """Pictures a second."""
        return (self._last - self._first) / (self._ended - self._began)


class Asking:
    """Requests to one server, at little cost: what clients take of a machine, they take from what is measured there."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def get(self, path: str) -> bytes:
        """Return what is at `path`, or at a whole URL, also where one is sent on from there (a storage's signed URL).

        Raises `RuntimeError` where there is nothing.
        """
        return await self._ask("GET", path)

    async def post(self, path: str, body: dict[str, object], **headers: str) -> Any:
        """Send `body` as JSON and return the answer's; raises `RuntimeError` where it is refused."""
        return json.loads(await self._ask("POST", path, json=body, headers=headers))

    async def _ask(self, method: str, path: str, **asked: Any) -> bytes:
        url = path if path.startswith("http") else self._url + path
        async with self._session.request(method, url, **asked) as answer:
            content = await answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:500]!r}")
        return content


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[Asking]:
    """Keep as many connections as clients come to need."""
    patience = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=patience) as session:
        yield Asking(url, session)


async def client(http: Asking, jobs: Iterator[dict[str, object]], meter: Meter) -> None:
    """Ask for one picture after the other until the measurement is over."""
    while not meter.over:
        job = await http.post("/v1/jobs", next(jobs), Prefer="wait=60")
        if job["status"] != "succeeded":
            raise RuntimeError(f"job {job['id']}: {job['status']} {job['error']}")
        await http.get(job["artifacts"][0]["url"])
        meter.note()
