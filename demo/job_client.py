"""What the demo requests from a running fusequeue."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from fusequeue import AsyncClient, Job

# Workers publish their counters once a second: counters unchanged for this long are final.
COUNTERS_STEADY_S = 2.5
JOB_TIMEOUT_S = 3600.0  # all jobs of the demo are submitted at once, and run on a CPU

OnProgress = Callable[[str, str, int, int], None]
"""Called with job id, status, step and total steps."""


@dataclass(frozen=True)
class ForwardCounts:
    """Denoiser forwards of all workers since their start, and the images in them, counted in each forward."""

    forwards: int
    rows: int

    def since(self, before: ForwardCounts) -> ForwardCounts:
        return ForwardCounts(self.forwards - before.forwards, self.rows - before.rows)

    @property
    def mean_rows(self) -> float:
        return self.rows / self.forwards if self.forwards else 0.0


@dataclass(frozen=True)
class FinishedJob:
    """A job in a terminal state, with its images."""

    job: Job
    images: tuple[Image.Image, ...]

    @property
    def succeeded(self) -> bool:
        """True for a succeeded job with all its images in the requested size."""
        complete = all(image.size == (self.job.width, self.job.height) for image in self.images)
        return self.job.status == "succeeded" and len(self.images) == self.job.n and complete


class JobClient:
    """Runs jobs through the Python client."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def upload(self, image: Image.Image) -> str:
        """Upload an input image and return its id."""
        return await self._client.upload(image)

    async def run_with_events(self, body: Mapping[str, Any], on_progress: OnProgress) -> FinishedJob:
        """Submit a job, pass its events to `on_progress` until it ends, and fetch its images."""
        job = await self._client.submit(body["model"], body["prompt"], extra_body=body)
        async for event in self._client.events(job):
            on_progress(job.id, event.status, event.progress.step, event.progress.total)
            job = event.job or job
        return await self._with_images(job)

    async def run(self, body: Mapping[str, Any]) -> FinishedJob:
        """Submit a job and wait for it."""
        job = await self._client.submit(body["model"], body["prompt"], extra_body=body)
        return await self._with_images(await self._client.wait(job, timeout_s=JOB_TIMEOUT_S))

    async def forward_counts(self) -> ForwardCounts:
        """Return the workers' counters once they no longer change."""
        counts = await self._forward_counts()
        while True:
            await asyncio.sleep(COUNTERS_STEADY_S)
            before, counts = counts, await self._forward_counts()
            if counts == before:
                return counts

    async def _forward_counts(self) -> ForwardCounts:
        workers = await self._client.workers()
        forwards = sum(worker.forwards for worker in workers)
        return ForwardCounts(forwards, sum(worker.forward_rows for worker in workers))

    async def _with_images(self, job: Job) -> FinishedJob:
        files = [await self._client.read(artifact) for artifact in job.artifacts]
        return FinishedJob(job, tuple(Image.open(io.BytesIO(file)).convert("RGB") for file in files))
