"""The rounds of the engine's thread: run a forward of those who are chosen, let each go on with its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch

from shared.errors import JobError
from shared.signature import DENOISERS
from worker.engine.device import device_name
from worker.engine.fusion.fused_call import FusedCall
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.lora.per_row import AdapterKey
from worker.engine.pipelines.call_arguments import non_finite_error
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.pipelines.model_cache import ModelCache, empty_cache
from worker.engine.pipelines.text_cache import TextCache
from worker.engine.protocol import (
    EngineEvents,
    ForwardDone,
    ForwardRetried,
    JobDecoding,
    JobLoading,
    JobProgress,
    MemoryExhausted,
    OutputReady,
    PreviewReady,
)
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.engine.scheduling.selection import Candidate, Chooser
from worker.engine.scheduling.timing import ForwardTimer

log = structlog.get_logger()

DENOISING = frozenset(f"{name}.forward" for name in DENOISERS)


class BatchScheduler:
    """The jobs of one device, going on one forward at a time. All on the engine's thread, but for the views."""

    def __init__(
        self,
        device: torch.device,
        models: ModelCache,
        pace: ForwardTimer,
        events: EngineEvents,
        left: Callable[[str], None],
        patience_s: float,
    ) -> None:
        self._device = device
        self._models = models
        self._pace = pace
        self._events = events
        self._left = left
        self._jobs: dict[str, EngineJob] = {}
        self._memory = MemoryLimits()
        self._chooser = Chooser(pace, self._memory, patience_s)

    # Views, from any thread.

    @property
    def under_way(self) -> bool:
        return any(job.started for job in list(self._jobs.values()))

    def allowed(self) -> dict[tuple[str, str], int]:
        """Return how many rows memory lets a denoiser take together now, by model and shape, where it ran out."""
        found: dict[tuple[str, str], int] = {}
        for (model, shape, point), most in self._memory.caps().items():
            if point in DENOISING:
                found[model, shape] = min(most, found.get((model, shape), most))
        return found

    # Coming and going.

    def admit(self, job: EngineJob) -> bool:
        """Take a job in; True if its model must be loaded first."""
        self._jobs[job.key] = job
        model = self._models.get(job.seat.spec.id)
        if model is not None:
            self._begin(job, model)
            return False
        if job.wait_for_load():
            self._events.on_event(JobLoading(job.key))
        return True

    def model_arrived(self, model: str, outcome: LoadedModel | JobError) -> None:
        """Begin the jobs that waited for a model, or end them if it did not come."""
        for job in [job for job in self._jobs.values() if job.seat.spec.id == model and not job.started]:
            if isinstance(outcome, JobError):
                self._end(job, error=outcome)
            else:
                self._begin(job, outcome)

    def adapters_arrived(self, model: LoadedModel, key: AdapterKey, error: JobError | None) -> None:
        """Begin the jobs that waited for adapters of a model, or end them if those did not come."""
        for job in [job for job in self._jobs.values() if job.awaits is model and job.adapter == key]:
            if error is not None:
                self._end(job, error=error)
            else:
                self._begin(job, model)
        self._trim_adapters(model)

    def _trim_adapters(self, model: LoadedModel, keep_unused: bool = True) -> None:
        of_model = (job for job in self._jobs.values() if job.seat.spec.id == model.spec.id)
        self._models.adapters.trim(model, {job.adapter for job in of_model if job.started}, keep_unused=keep_unused)

    def refuse(self, job: EngineJob, error: JobError | None) -> None:
        """End a job before it began: with an error, or as canceled."""
        self._end(job, error=error, canceled=error is None)

    def throw_out(self, key: str) -> None:
        """End a job where it stands, as canceled; an unknown one has ended already."""
        job = self._jobs.get(key)
        if job is not None:
            self._end(job, canceled=True)

    def release_all(self) -> None:
        for key in list(self._jobs):
            self.throw_out(key)

    def models_in_use(self) -> set[str]:
        return {job.seat.spec.id for job in self._jobs.values() if job.started or job.awaits is not None}

    def _begin(self, job: EngineJob, model: LoadedModel) -> None:
        job.awaits = None if model.adapters.use(job.adapter) else model
        if job.awaits is not None:
            if job.wait_for_load():
                self._events.on_event(JobLoading(job.key))
            self._models.adapters.request(model, job.adapter)
            return
        job.begin(model)
        for picture in job.pictures:
            if job.key in self._jobs:  # an earlier picture may have ended it
                picture.start(self._device)
                self._look_after(job, picture)

    def _end(self, job: EngineJob, error: JobError | None = None, canceled: bool = False) -> None:
        self._jobs.pop(job.key, None)
        job.throw_out()
        self._pace.settle()
        self._left(job.key)
        self._events.on_event(job.finish(error, canceled))
        model = self._models.get(job.seat.spec.id)
        if model is not None and model.spec.id not in self.models_in_use():
            model.release_tensors()
        if model is not None and job.adapter:
            self._trim_adapters(model)

    # One round.

    def runnable(self) -> bool:
        return any(picture.call is not None for job in self._jobs.values() for picture in job.pictures)

    def run_one(self) -> None:
        """Run one forward for those who are due, and let each go on to its next meeting point."""
        members = self._chooser.choose(self._jobs.values())
        if members and members[0][2].shared_method.method == "decode":
            members = self._drop_non_finite(members)
        if not members:
            return
        outcomes = self._outcomes(members)
        for (job, picture, _), outcome in zip(members, outcomes, strict=True):
            if not picture.done:
                picture.resume(self._device, outcome)
                self._look_after(job, picture)
        self._tell_progress({job.key: job for job, _, _ in members})

    def _drop_non_finite(self, members: list[Candidate]) -> list[Candidate]:
        """Fail the jobs whose latents are not finite; one wait for the device for all of them."""
        sound = torch.stack([call.finite() for _, _, call in members]).tolist()
        for (job, picture, _), fine in zip(members, sound, strict=True):
            if not fine and not picture.done:
                picture.resume(self._device, non_finite_error())
                self._look_after(job, picture)
        return [member for member, fine in zip(members, sound, strict=True) if fine and not member[1].done]

    def _outcomes(self, members: Sequence[Candidate]) -> list[Any]:
        encodings = self._encodings(members[0].job, members[0].call)
        if encodings is None:
            return self._execute(members)
        calls = [call for _, _, call in members]
        return encodings.get_or_run(calls, lambda which: self._execute([members[at] for at in which]))

    def _encodings(self, job: EngineJob, call: ParkedCall) -> TextCache | None:
        """Return where the outcome of a call may be known from or kept, None if nowhere."""
        # What was encoded in other company has other last bits, which a reproducible job may not have.
        if call.shared_method.stage is not Stage.ENCODE or job.fixed_rows is not None:
            return None
        model = self._models.get(job.seat.spec.id)
        return None if model is None else model.text_cache

    def _known(self, job: EngineJob, call: ParkedCall) -> Any | None:
        encodings = self._encodings(job, call)
        return None if encodings is None else encodings.get(call)

    def _execute(self, members: Sequence[Candidate]) -> list[Any]:
        call, kind, fixed = members[0].call, members[0].kind, members[0].fixed
        for other, _, at in members:
            if at.shared_method.stage is Stage.DECODE and not (at.preview or other.told_decoding):
                other.told_decoding = True
                self._events.on_event(JobDecoding(other.key))

        def measure(run: Callable[[], list[Any]], which: Sequence[int]) -> list[Any]:
            jobs = [members[at][0] for at in which]
            rows = self._pace.measure((*kind, len(jobs)), run, lambda seconds: self._account(jobs, call, seconds))
            self._memory.ran(kind, len(jobs))
            return rows

        def free(calls: int, fits: int) -> None:
            self._events.on_event(MemoryExhausted(kind[0]))
            log.warning("out_of_memory", model=kind[0], shape=kind[1], at=kind[2], calls=calls, tried_next=fits)
            if fixed is None:  # else every forward has the same rows, however many calls it is for
                self._memory.ran_out(kind, calls, fits)
            self._free()

        known = self._memory.fits(kind) if fixed is None else None
        execution = FusedCall(
            [member.call for member in members],
            fixed_rows=fixed,
            positions=() if fixed is None else [member.place for member in members],
            measure=measure,
            free_memory=free,
            known_fit=known,
        )
        outcomes = execution.run()
        if execution.retries:
            self._events.on_event(ForwardRetried(kind[0], execution.retries))
            log.warning("forward_repeated", model=kind[0], at=kind[2], calls=len(members), failed=execution.retries)
        return outcomes

    def _account(self, jobs: Sequence[EngineJob], call: ParkedCall, seconds: float) -> None:
        """Charge a forward's time to its jobs by their pictures in it, and tell of it if it was a denoiser's."""
        company = {job.key: job for job in jobs}
        for job in jobs:
            job.charge(seconds / len(jobs))
        if call.shared_method.stage is not Stage.DENOISE:
            return
        for job in company.values():
            job.note_forward(len(jobs), len(company), seconds)
        first = jobs[0]
        self._events.on_event(
            ForwardDone(
                model=first.seat.spec.id,
                rows=len(jobs),
                jobs=len(company),
                seconds=seconds,
                device=device_name(self._device),
                shape=first.shape,
                padding=max(0, (first.fixed_rows or 0) - len(jobs)),
                claim_key=first.key,
            )
        )

    def _free(self) -> None:
        while self._models.evict_one(self.models_in_use()):
            pass
        for model in self._models.loaded.values():
            self._trim_adapters(model, keep_unused=False)
            model.text_cache.clear()
        empty_cache(self._device)

    def _look_after(self, job: EngineJob, picture: ImageTask) -> None:
        """Give a picture what is known already; hand it over if it is done, and end its job if that was the last one.

        A job of which a picture failed ends too.
        """
        while picture.call is not None and (known := self._known(job, picture.call)) is not None:
            picture.resume(self._device, known)
        self._pace.note_life()  # its own code may take long: GLM-Image draws a whole coarse picture in it
        if picture.call is not None and job.seat.job.previews:
            picture.call.preview = job.is_previewing(picture)
        if not picture.done or job.key not in self._jobs:
            return
        if picture.error is not None:
            return self._end(job, error=picture.error)
        made, index = picture.result, job.pictures.index(picture)
        self._tell_progress({job.key: job})
        for part, result in enumerate(made):
            self._events.on_event(OutputReady(job.key, index * len(made) + part, result))
        picture.result = None
        if job.done():
            self._end(job)
        return None

    def _tell_progress(self, jobs: dict[str, EngineJob]) -> None:
        for key, job in jobs.items():
            if job.changed and key in self._jobs:
                job.changed = False
                for index, pixels in job.take_previews():
                    self._events.on_event(PreviewReady(key, index, pixels))
                self._events.on_event(JobProgress(key, *job.progress()))
