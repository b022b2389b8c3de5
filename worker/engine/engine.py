"""The engine: one thread that seats jobs, lets them meet, and tells a listener how each is doing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog
import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from shared.config.models_file import Catalog, ModelSpec
from shared.config.settings import Settings
from shared.errors import JobError
from worker.engine.device import chosen_device, uuid_of
from worker.engine.fusion.self_check import run_self_check
from worker.engine.lora.adapter_loader import AdapterLoader
from worker.engine.lora.per_row import AdapterKey
from worker.engine.pipelines.input_images import InputImages, prepare_inputs
from worker.engine.pipelines.loading import LoadedModel
from worker.engine.pipelines.model_cache import ModelCache, ModelCacheFull
from worker.engine.protocol import (
    Activity,
    EngineEvents,
    EngineRequest,
    EngineStatus,
    ModelLoaded,
    ModelLoadFailed,
    ThreadTime,
)
from worker.engine.scheduling.batch_scheduler import BatchScheduler
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.thread_time import ThreadTimer
from worker.engine.scheduling.timing import ForwardTimer
from worker.engine.thread_settings import go_first, keep_freed_memory
from worker.engine.warm_up import warm

log = structlog.get_logger()


class Engine:
    """Puts seated jobs through fused forwards on a thread of its own.

    `seat`, `cancel`, `release_all` and the views may be called from any thread and return at once. An error that
    is no job's fault (a lost device, a fault in the engine) ends the thread: its activity then is that of a hang.
    """

    def __init__(self, catalog: Catalog, events: EngineEvents, settings: Settings) -> None:
        self._catalog = catalog
        self._events = events
        self._threads = settings.torch_threads
        self.device = chosen_device(settings.device)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        adapters = AdapterLoader(self.device, settings.adapter_memory_bytes, self._inbox.put, self._adapters_arrived)
        self._models = ModelCache(
            self.device, settings.gpu_memory_bytes, self._inbox.put, self._model_arrived, adapters
        )
        self._pace = ForwardTimer(self.device)
        self._workday = ThreadTimer(time.monotonic())
        patience_s = settings.aging_ms / 1000
        self._rounds = BatchScheduler(self.device, self._models, self._pace, events, self._forget, patience_s)
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare-input")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._seats: dict[str, EngineRequest] = {}  # every job between seat() and finished()
        self._guard = threading.Lock()
        self._arrivals = 0
        self._stopping = False
        self._dead = False
        self._setting_up = False
        self._loads: dict[str, threading.Event] = {}
        self._load_s: dict[str, float] = {}
        self._unavailable: dict[str, str] = {}

    def start(self) -> None:
        # They would print a prompt that is too long, and bars.
        for library in (diffusers_logging, transformers_logging):
            library.set_verbosity_error()
            library.disable_progress_bar()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after its present forward, throwing out what is unfinished; waits up to `timeout_s`."""
        self._inbox.put(self._begin_stop)
        self._thread.join(timeout_s)
        self._preparer.shutdown(wait=False, cancel_futures=True)
        self._models.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; False if it has not come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, *requests: EngineRequest) -> None:
        """Take jobs in, which begin together; the listener hears of each from now on, and at last that it finished."""
        with self._guard:
            ages = range(self._arrivals + 1, self._arrivals + 1 + len(requests))
            self._arrivals += len(requests)
            self._seats.update({request.claim_key: request for request in requests})
        arrivals = list(zip(requests, ages, strict=True))
        if all(request.inputs.empty for request in requests):
            self._take_in(arrivals)
        else:
            self._preparer.submit(self._take_in, arrivals)

    def cancel(self, claim_key: str) -> None:
        """Let a job leave at its next step; unknown keys are ignored."""
        with self._guard:
            self._seats.pop(claim_key, None)
        self._inbox.put(lambda: self._rounds.throw_out(claim_key))

    def release_all(self) -> None:
        """Throw every unfinished job out; each finishes as canceled."""
        with self._guard:
            self._seats.clear()
        self._inbox.put(self._rounds.release_all)

    def status(self) -> EngineStatus:
        """Return what there is to tell of the engine now."""
        loaded = tuple(self._models.loaded)
        return EngineStatus(
            device=str(self.device),
            device_uuid=uuid_of(self.device) if loaded else None,  # asking for it makes torch wake the device
            memory_bytes=self._models.device_bytes,
            models_bytes=self._models.used_bytes(),
            loaded_models=loaded,
            load_seconds=dict(self._load_s),
            unavailable_models=dict(self._unavailable),
            row_limits=self._rounds.allowed(),
            activity=self._activity(),
            thread_time=ThreadTime(self._workday.busy_s(time.monotonic()), self._workday.idle_while_queued_s),
        )

    def _activity(self) -> Activity:
        if self._dead:
            return Activity(busy=True, since_s=float("-inf"))
        forwards = self._rounds.under_way
        loading = self._models.loading or self._setting_up
        return Activity(
            busy=forwards or loading,
            since_s=self._pace.last_progress,
            # The thread itself compiles and tries out what was loaded, also while jobs of other models wait for it.
            loading=self._setting_up or (loading and not forwards),
            expected_s=self._pace.expected_s,
        )

    def warm_up(self, specs: Sequence[ModelSpec] | None = None) -> None:
        """Load models, those of the catalog unless told, and wait until each has come or failed.

        It stops where the memory budget is full, so that the first of the catalog stay in memory.
        """
        for spec in self._catalog if specs is None else specs:
            with self._guard:
                arrived = self._loads.setdefault(spec.id, threading.Event())
            self._inbox.put(lambda spec=spec: self._warm(spec))  # type: ignore[misc]
            while self._thread.is_alive() and not arrived.wait(0.1):
                pass

    def _warm(self, spec: ModelSpec) -> None:
        if self._models.get(spec.id) is not None:
            with self._guard:
                arrived = self._loads.pop(spec.id, None)
            if arrived is not None:  # else it arrived for a job, just now
                arrived.set()
        else:
            self._models.request(spec, evict_others=False)

    # From here on, everything runs on the engine's thread.

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        if self.device.type == "cpu":
            keep_freed_memory()
        go_first(self.device.type, self._threads)
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._models.start_next_load(self._rounds.models_in_use())
                self._take_messages(wait=not self._rounds.runnable())
                self._rounds.run_one()
        except Exception:
            self._dead = True
            log.exception("engine_died", jobs=len(self._seats))
        finally:
            for arrived in self._loads.values():
                arrived.set()

    def _take_messages(self, wait: bool) -> None:
        if wait:
            self._workday.rest(time.monotonic())
            message = self._inbox.get()
            self._pace.note_life()  # before a job is under way: else the pause would look like a thread that hangs
            message()
            self._pace.note_life()
        while not self._inbox.empty():
            self._inbox.get()()

    def _begin_stop(self) -> None:
        self._stopping = True
        self._rounds.release_all()

    def _take_in(self, arrivals: Sequence[tuple[EngineRequest, int]]) -> None:
        """Decode the jobs' input pictures, beside the engine's thread where there are any, then have all admitted."""
        decoded = [(seat, age, _inputs_of(seat)) for seat, age in arrivals]

        def admit() -> None:
            for seat, age, inputs in decoded:
                self._admit(seat, age, inputs)

        self._inbox.put(admit)

    def _admit(self, seat: EngineRequest, age: int, inputs: InputImages | JobError) -> None:
        if isinstance(inputs, JobError):
            return self._rounds.refuse(EngineJob(seat, age, InputImages()), inputs)
        job, now = EngineJob(seat, age, inputs), time.monotonic()
        self._workday.work(now, now if seat.queued_since_s is None else seat.queued_since_s)
        with self._guard:
            wanted = job.key in self._seats
        if not wanted:  # canceled while its input was being decoded
            self._rounds.refuse(job, None)
        elif self._rounds.admit(job):
            self._models.request(seat.spec)
        return None

    def _forget(self, key: str) -> None:
        with self._guard:
            self._seats.pop(key, None)

    def _adapters_arrived(self, model: LoadedModel, key: AdapterKey, error: JobError | None) -> None:
        self._rounds.adapters_arrived(model, key, error)

    def _model_arrived(self, model: str, outcome: LoadedModel | JobError) -> None:
        if isinstance(outcome, LoadedModel):
            self._setting_up = True
            run_self_check(outcome, self.device)
            warm(outcome, self.device, self._pace.note_life)
            self._pace.note_life()
            self._setting_up = False
            self._load_s[model] = time.monotonic() - outcome.began_s
            self._events.on_event(ModelLoaded(model, self._load_s[model]))
            self._unavailable.pop(model, None)
        elif isinstance(outcome, ModelCacheFull):
            log.info("model_not_kept", model=model, reason=outcome.message)
        else:
            self._unavailable[model] = outcome.message
            self._events.on_event(ModelLoadFailed(model))
            log.error("model_unavailable", model=model, error=outcome.message)
        self._rounds.model_arrived(model, outcome)
        with self._guard:
            arrived = self._loads.pop(model, None)
        if arrived is not None:
            arrived.set()


def _inputs_of(seat: EngineRequest) -> InputImages | JobError:
    if seat.inputs.empty:
        return InputImages()
    try:
        return prepare_inputs(seat.job, seat.inputs)
    except JobError as error:
        return error
