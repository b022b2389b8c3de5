"""From the engine's thread to the event loop: every callback is handed over, none does work on the GPU thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from shared.job import Phase, Progress
from worker.engine import EngineIncident, ForwardDone, JobFinished, Output, Pixels
from worker.job_runner import ClaimedJob
from worker.metrics import collectors
from worker.output.images import PreviewPublisher
from worker.output.upload import Uploader


class EngineEventHandler:
    """The engine's `Listener`. `runs` is read on the loop only; a callback for a run that is gone is dropped."""

    def __init__(
        self,
        runs: dict[str, ClaimedJob],
        delivery: Uploader,
        previews: PreviewPublisher,
        *,
        on_change: Callable[[ClaimedJob], None],
        on_forward: Callable[[ForwardDone], None],
    ) -> None:
        self._runs = runs
        self._delivery = delivery
        self._previews = previews
        self._on_change = on_change
        self._on_forward = on_forward
        self._loop = asyncio.get_running_loop()
        self._handed: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._called = False

    def loading(self, key: str) -> None:
        self._hand_over(self._advance, key, Phase.LOADING, None)

    def progress(self, key: str, step: int, total: int) -> None:
        self._hand_over(self._advance, key, Phase.DENOISING, Progress(step=step, total=total))

    def decoding(self, key: str) -> None:
        self._hand_over(self._advance, key, Phase.DECODING, None)

    def preview(self, key: str, index: int, pixels: Pixels) -> None:
        self._hand_over(self._preview, key, index, pixels)

    def picture(self, key: str, index: int, made: Output) -> None:
        self._hand_over(self._deliver, key, index, made)

    def finished(self, key: str, finished: JobFinished) -> None:
        self._hand_over(self._finish, key, finished)

    def forward(self, facts: ForwardDone) -> None:
        self._hand_over(self._on_forward, facts)

    def incident(self, incident: EngineIncident) -> None:
        self._hand_over(collectors.incident, incident)

    def _hand_over(self, function: Callable[..., None], *arguments: object) -> None:
        # Waking the loop is a system call, and all jobs of a forward have progress to tell: one wakes it for all.
        self._handed.append((function, arguments))
        # A closed loop means that the process is leaving: there is nobody to tell.
        if not self._called and not self._loop.is_closed():
            self._called = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._called = False  # before looking: what is handed over from now on calls again
        while self._handed:
            function, arguments = self._handed.popleft()
            self._loop.call_soon(function, *arguments)

    def _advance(self, key: str, phase: Phase, progress: Progress | None) -> None:
        if run := self._runs.get(key):
            run.advance(phase, progress)
            self._on_change(run)

    def _deliver(self, key: str, index: int, made: Output) -> None:
        if run := self._runs.get(key):
            run.upload(self._delivery, index, made)

    def _preview(self, key: str, index: int, pixels: Pixels) -> None:
        if run := self._runs.get(key):
            run.publish_preview(self._previews, index, pixels)

    def _finish(self, key: str, finished: JobFinished) -> None:
        if (run := self._runs.get(key)) and not run.engine_done.done():
            run.engine_done.set_result(finished)
            run.advance(Phase.UPLOADING)
            self._on_change(run)
