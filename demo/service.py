"""What the demo does over HTTP, as any client would."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from PIL import Image

ENDED = ("succeeded", "failed", "canceled", "expired")
REQUEST_TIMEOUT_S = 60.0
RECONNECTS = 20
# Workers tell their counters once a second: equal for this long means that all has been told.
COUNTERS_STEADY_S = 2.5

Note = Callable[[str, str, int, int], None]


@dataclass(frozen=True)
class Forwards:
    """Denoiser forwards of all workers since they started, and the pictures in them, each counted in each forward."""

    forwards: int
    rows: int

    def since(self, before: Forwards) -> Forwards:
        return Forwards(self.forwards - before.forwards, self.rows - before.rows)

    @property
    def mean_rows(self) -> float:
        return self.rows / self.forwards if self.forwards else 0.0


@dataclass(frozen=True)
class Ended:
    """A job as it ended, with its pictures."""

    job: Mapping[str, Any]
    pictures: tuple[Image.Image, ...]

    @property
    def succeeded(self) -> bool:
        """Whether it succeeded and has all its pictures, in the size that was asked for."""
        whole = all(picture.size == (self.job["width"], self.job["height"]) for picture in self.pictures)
        return self.job["status"] == "succeeded" and len(self.pictures) == self.job["n"] and whole


class Service:
    """A running fusequeue, seen by a client."""

    def __init__(self, url: str) -> None:
        # One event stream a job is open at a time.
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits)

    async def __aenter__(self) -> Service:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def upload(self, picture: Image.Image) -> str:
        """Store a picture to start from, and return its id."""
        data = io.BytesIO()
        picture.save(data, "PNG")
        answer = await self._client.post("/v1/inputs", files={"file": ("start.png", data.getvalue(), "image/png")})
        return str(_checked(answer)["id"])

    async def submit(self, body: Mapping[str, object]) -> str:
        """Submit a job, and return its id."""
        return str(_checked(await self._client.post("/v1/jobs", json=body))["id"])

    async def finish(self, job_id: str, note: Note) -> Ended:
        """Follow the job's events until it has ended, telling `note` of each, and fetch its pictures."""
        for _ in range(RECONNECTS):
            async for event in self._events(job_id):
                progress = event.get("progress") or {}
                # Events of progress need not repeat the status: there is progress only while a job runs.
                note(job_id, event["status"] or "running", progress.get("step", 0), progress.get("total", 0))
            job = _checked(await self._client.get(f"/v1/jobs/{job_id}"))
            if job["status"] in ENDED:
                return await self._with_pictures(job)
            await asyncio.sleep(0.2)
        raise RuntimeError(f"the events of {job_id} broke off {RECONNECTS} times")

    async def run_alone(self, body: Mapping[str, object]) -> Ended:
        """Submit a job and wait for it in the same request."""
        answer = await self._client.post("/v1/jobs", json=body, headers={"Prefer": "wait=30"})
        job = _checked(answer)
        while job["status"] not in ENDED:
            job = _checked(await self._client.get(f"/v1/jobs/{job['id']}", params={"wait": 30}))
        return await self._with_pictures(job)

    async def forwards(self) -> Forwards:
        """Return the workers' counters once they stand still."""
        told = await self._forwards()
        while True:
            await asyncio.sleep(COUNTERS_STEADY_S)
            before, told = told, await self._forwards()
            if told == before:
                return told

    async def _forwards(self) -> Forwards:
        workers = _checked(await self._client.get("/v1/workers"))["data"]
        return Forwards(sum(one["forwards"] for one in workers), sum(one["forward_rows"] for one in workers))

    async def _events(self, job_id: str) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        yield json.loads(line.removeprefix("data:"))
        except httpx.TransportError:
            return

    async def _with_pictures(self, job: Mapping[str, Any]) -> Ended:
        pictures = []
        for artifact in job["artifacts"]:
            answer = await self._client.get(artifact["url"])
            answer.raise_for_status()
            pictures.append(Image.open(io.BytesIO(answer.content)).convert("RGB"))
        return Ended(job, tuple(pictures))


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise RuntimeError(f"{answer.request.method} {answer.request.url}: {answer.status_code} {answer.text[:500]}")
    body: dict[str, Any] = answer.json()
    return body
