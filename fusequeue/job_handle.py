"""A handle of one job: `client.job(job)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fusequeue.arguments import callback, folder_path, path_of, seconds
from fusequeue.errors import WaitTimeout
from fusequeue.job_fields import JobState
from fusequeue.loop_thread import Blocking, blocking, iterating
from fusequeue.params import StrPath
from fusequeue.response_types import Event, Job, Result
from fusequeue.result_files import check_folder

if TYPE_CHECKING:
    from fusequeue.aio import AsyncClient

WAIT_TIMEOUT_S = 600.0
"""Default of `wait` and `run`: most images take seconds, and a wait without an end hides a service without workers."""

OnProgress: TypeAlias = Callable[[Event], object]
"""Called with every change and step of a job; may return an awaitable."""


class AsyncJobHandle:
    """One job and what can be done with it: `client.job(job)`.

    `latest` is the job as the service has last returned it to this handle, None before the first response.
    """

    def __init__(self, client: AsyncClient, job: Job | str) -> None:
        path_of("", job)  # an id that is none is found here
        self._client = client
        self.id = job if isinstance(job, str) else job.id
        self.latest = job if isinstance(job, Job) else None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}: {self.status or 'not read'}>"

    @property
    def status(self) -> JobState | None:
        """The state of `latest`; `refresh` reads it anew."""
        return None if self.latest is None else self.latest.status

    async def refresh(self) -> Job:
        """Return the job as it is now."""
        return self._note(await self._client.get(self.id))

    async def wait(self, *, timeout_s: float | None = WAIT_TIMEOUT_S, on_progress: OnProgress | None = None) -> Job:
        """Return the job once it has ended in any state; raises `WaitTimeout` after `timeout_s`, None: never."""
        try:
            return self._note(await self._client.wait(self.id, timeout_s=timeout_s, on_progress=on_progress))
        except WaitTimeout as error:
            self._note(error.job)
            raise

    async def result(
        self,
        *,
        folder: StrPath | None = None,
        timeout_s: float | None = WAIT_TIMEOUT_S,
        on_progress: OnProgress | None = None,
    ) -> Result:
        """Wait for the job, and return its images, videos, sounds or meshes, also saved in `folder`.

        Raises `JobFailed` if the job ends without a result, and `WaitTimeout` after `timeout_s`; it then continues.
        """
        seconds("timeout_s", timeout_s)
        callback("on_progress", on_progress)
        if folder is not None:
            await asyncio.to_thread(check_folder, folder_path("folder", folder))
        done = (await self.wait(timeout_s=timeout_s, on_progress=on_progress)).require_success()
        data = [await self._client.read(one) for one in done.artifacts if not one.was_sent]
        result = Result(done, tuple(data))
        return result if folder is None else await asyncio.to_thread(result.save, folder)

    async def events(self) -> AsyncGenerator[Event]:
        """Yield the current state, every change and step, and last the whole job; reconnects when the stream breaks."""
        async with aclosing(self._client.events(self.id)) as events:
            async for event in events:
                if event.job is not None:
                    self._note(event.job)
                yield event

    async def cancel(self) -> Job:
        """Cancel the job: at once while it is queued, at its next step while it runs."""
        return self._note(await self._client.cancel(self.id))

    async def pause(self) -> Job:
        """Pause the job until `resume`: at once while it is queued, at its next step while it runs."""
        return self._note(await self._client.pause(self.id))

    async def resume(self) -> Job:
        """End the pause of the job, which goes on at its step."""
        return self._note(await self._client.resume(self.id))

    async def download(self, folder: StrPath, *, name: str | None = None) -> list[Path]:
        """Save the results that there are now, as `AsyncClient.download` does, and return the files."""
        return await self._client.download(await self.refresh(), folder, name=name)

    async def delete(self) -> None:
        """Delete the job, which has ended, and its images."""
        await self._client.delete(self.id)

    def _note(self, job: Job) -> Job:
        self.latest = job
        return job


class JobHandle(Blocking[AsyncJobHandle]):
    """One job and what can be done with it: `client.job(job)`. The methods are those of `AsyncJobHandle`."""

    def __repr__(self) -> str:
        return repr(self._asynchronous).replace("Async", "", 1)

    @property
    def id(self) -> str:
        """The id of the job."""
        return self._asynchronous.id

    @property
    def latest(self) -> Job | None:
        """The job as the service has last returned it to this handle, None before the first response."""
        return self._asynchronous.latest

    @property
    def status(self) -> JobState | None:
        """The state of `latest`; `refresh` reads it anew."""
        return self._asynchronous.status

    refresh = blocking(AsyncJobHandle.refresh)
    wait = blocking(AsyncJobHandle.wait)
    result = blocking(AsyncJobHandle.result)
    events = iterating(AsyncJobHandle.events)
    cancel = blocking(AsyncJobHandle.cancel)
    pause = blocking(AsyncJobHandle.pause)
    resume = blocking(AsyncJobHandle.resume)
    download = blocking(AsyncJobHandle.download)
    delete = blocking(AsyncJobHandle.delete)
