"""Events of the engine: from the thread that receives them to the claimed jobs on the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from shared.job import Phase
from shared.job_record import Progress
from worker.claims.claimed_job import ClaimedJob
from worker.engine import protocol
from worker.engine.protocol import CheckpointTaken, EngineEvent, ForwardDone, JobEvent, ModelLoaded
from worker.metrics import collectors
from worker.output.image_encoding import PreviewPublisher
from worker.output.upload import Uploader

log = structlog.get_logger()


@dataclass(eq=False)
class EngineEventHandler:
    """Carries the engine's events to the event loop. Events of claims that have ended are dropped."""

    claimed_jobs: dict[str, ClaimedJob]  # by claim key; read on the loop only
    uploader: Uploader
    previews: PreviewPublisher
    on_change: Callable[[ClaimedJob], None]
    on_forward: Callable[[ForwardDone], None]
    on_model_loaded: Callable[[ModelLoaded], None] = lambda _event: None
    on_checkpoint: Callable[[ClaimedJob, CheckpointTaken], None] = lambda _claimed, _event: None

    def __post_init__(self) -> None:
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
        claimed = self.claimed_jobs.get(event.claim_key) if isinstance(event, JobEvent) else None
        try:
            if isinstance(event, ForwardDone):
                self.on_forward(event)
            elif not isinstance(event, JobEvent):
                collectors.model_event(event)
                if isinstance(event, ModelLoaded):
                    self.on_model_loaded(event)
            elif claimed:
                self._handle_job_event(claimed, event)
        except Exception as error:
            log.exception("engine_event_failed", kind=type(event).__name__)
            if claimed:  # its output may be missing
                claimed.fail(error)

    def _handle_job_event(self, claimed: ClaimedJob, event: JobEvent) -> None:
        match event:
            case protocol.PreviewReady(index=index, pixels=pixels):
                claimed.publish_preview(self.previews, index, pixels)
                return
            case protocol.OutputReady(index=index, output=output):
                claimed.upload(self.uploader, index, output)
                return
            case protocol.CheckpointTaken():
                self.on_checkpoint(claimed, event)
                return
            case protocol.CandidatesDropped(running=running):
                claimed.slots = running
            case protocol.JobPhaseChanged(phase=phase):
                claimed.update_progress(phase)
            case protocol.JobProgress(step=step, total=total):
                claimed.update_progress(Phase.DENOISING, Progress(step=step, total=total))
            case protocol.JobFinished():
                if claimed.engine_done.done():
                    return
                claimed.engine_done.set_result(event)
                claimed.update_progress(Phase.UPLOADING)
        self.on_change(claimed)
