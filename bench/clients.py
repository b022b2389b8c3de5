"""Clients in a closed loop: each asks for a picture, waits for it, fetches it and asks for the next."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpcore

REQUEST_TIMEOUT_S = 90.0
SENT_ON = (302, 303, 307)

Headers: TypeAlias = dict[bytes | str, bytes | str]


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
    """Requests to one server, on httpcore alone: httpx around it takes more than as much again.

    What the clients take of a machine of two cores, they take from what is measured there.
    """

    def __init__(self, url: str, pool: httpcore.AsyncConnectionPool) -> None:
        self._url = url
        self._pool = pool

    async def get(self, path: str) -> bytes:
        """Return what is at `path`, or at a whole URL, also where one is sent on from there (a storage's signed URL).

        Raises `RuntimeError` where there is nothing.
        """
        return await self._ask("GET", path, {}, None)

    async def post(self, path: str, body: dict[str, object], **headers: str) -> Any:
        """Send `body` as JSON and return the answer's; raises `RuntimeError` where it is refused."""
        head: Headers = {"Content-Type": "application/json"}
        head.update(headers.items())
        return json.loads(await self._ask("POST", path, head, json.dumps(body).encode()))

    async def _ask(self, method: str, path: str, headers: Headers, content: bytes | None) -> bytes:
        url = path if path.startswith("http") else self._url + path
        patience = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), REQUEST_TIMEOUT_S)}
        answer = await self._pool.request(method, url, headers=headers, content=content, extensions=patience)
        if method == "GET" and answer.status in SENT_ON:
            elsewhere = dict(answer.headers)[b"location"].decode()
            answer = await self._pool.request(method, elsewhere, headers=headers, extensions=patience)
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {answer.content[:500]!r}")
        return answer.content


@asynccontextmanager
async def asking(url: str, clients: int) -> AsyncIterator[Asking]:
    """Keep connections for so many clients."""
    async with httpcore.AsyncConnectionPool(max_connections=None, max_keepalive_connections=clients) as pool:
        yield Asking(url, pool)


async def client(http: Asking, jobs: Iterator[dict[str, object]], meter: Meter) -> None:
    """Ask for one picture after the other until the measurement is over."""
    while not meter.over:
        job = await http.post("/v1/jobs", next(jobs), Prefer="wait=60")
        if job["status"] != "succeeded":
            raise RuntimeError(f"job {job['id']}: {job['status']} {job['error']}")
        await http.get(job["artifacts"][0]["url"])
        meter.note()
