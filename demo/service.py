"""What the demo asks of a running fusequeue."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from fusequeue import AsyncClient, Job

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

    job: Job
    pictures: tuple[Image.Image, ...]

    @property
    def succeeded(self) -> bool:
        """Whether it succeeded and has all its pictures, in the size that was asked for."""
        whole = all(picture.size == (self.job.width, self.job.height) for picture in self.pictures)
        return self.job.status == "succeeded" and len(self.pictures) == self.job.n and whole


class Service:
    """A running fusequeue, through its Python client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def upload(self, picture: Image.Image) -> str:
        """Store a picture to start from, and return its id."""
        data = io.BytesIO()
        picture.save(data, "PNG")
        return await self._client.upload(data.getvalue())

    async def run(self, body: Mapping[str, Any], note: Note) -> Ended:
        """Submit a job, follow its events until it has ended, telling `note` of each, and fetch its pictures."""
        job = await self._client.submit(**body)
        async for event in self._client.events(job.id):
            note(job.id, event.status, event.progress.step, event.progress.total)
            job = event.job or job
        return await self._with_pictures(job)

    async def run_alone(self, body: Mapping[str, Any]) -> Ended:
        """Submit a job and wait for it."""
        job = await self._client.submit(**body)
        return await self._with_pictures(await self._client.wait(job.id))

    async def forwards(self) -> Forwards:
        """Return the workers' counters once they stand still."""
        told = await self._forwards()
        while True:
            await asyncio.sleep(COUNTERS_STEADY_S)
            before, told = told, await self._forwards()
            if told == before:
                return told

    async def _forwards(self) -> Forwards:
        workers = await self._client.workers()
        return Forwards(sum(one["forwards"] for one in workers), sum(one["forward_rows"] for one in workers))

    async def _with_pictures(self, job: Job) -> Ended:
        files = [await self._client.read(artifact.url) for artifact in job.artifacts]
        return Ended(job, tuple(Image.open(io.BytesIO(file)).convert("RGB") for file in files))
