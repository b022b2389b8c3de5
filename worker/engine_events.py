"""Carries the engine's events to the event loop; nothing here works on the engine's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shared.job import Phase, Progress
from worker.engine import protocol
from worker.engine.protocol import EngineEvent, ForwardDone, JobEvent
from worker.job_runner import ClaimedJob
from worker.metrics import collectors
from worker.output.images import PreviewPublisher
from worker.output.upload import Uploader


class EngineEventHandler:
    """The engine's `EngineEvents`. Events of claims that are not in `jobs` any more are dropped."""

    def __init__(
        self,
        jobs: dict[str, ClaimedJob],
        uploader: Uploader,
        previews: PreviewPublisher,
        *,
        on_change: Callable[[ClaimedJob], None],
        on_forward: Callable[[ForwardDone], None],
    ) -> None:
        self._jobs = jobs  # read on the loop only
        self._uploader = uploader
        self._previews = previews
        self._on_change = on_change
        self._on_forward = on_forward
        self._loop = asyncio.get_running_loop()
        self._events: deque[EngineEvent] = deque()
        self._wake_scheduled = False

    def on_event(self, event: EngineEvent) -> None:
        # Waking the loop is a system call, and a forward has events for each of its jobs: one call serves all of them.
        self._events.append(event)
        if not self._wake_scheduled and not self._loop.is_closed():  # closed: the process is ending
            self._wake_scheduled = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._wake_scheduled = False  # before reading the events: those appended from now on schedule another call
        while self._events:
            self._loop.call_soon(self._handle, self._events.popleft())

    def _handle(self, event: EngineEvent) -> None:
        if isinstance(event, JobEvent):
            job = self._jobs.get(event.claim_key)
            if job is not None:
                self._handle_job_event(job, event)
        elif isinstance(event, ForwardDone):
            self._on_forward(event)
        else:
            collectors.model_event(event)

    def _handle_job_event(self, job: ClaimedJob, event: JobEvent) -> None:
        match event:
            case protocol.PreviewReady(index=index, pixels=pixels):
                job.publish_preview(self._previews, index, pixels)
                return
            case protocol.OutputReady(index=index, output=output):
                job.upload(self._uploader, index, output)
                return
            case protocol.JobPhaseChanged(phase=phase):
                job.advance(phase)
            case protocol.JobProgress(step=step, total=total):
                job.advance(Phase.DENOISING, Progress(step=step, total=total))
            case protocol.JobFinished():
                if job.engine_done.done():
                    return
                job.engine_done.set_result(event)
                job.advance(Phase.UPLOADING)
        self._on_change(job)
