"""The engine: one thread that loads models, admits jobs, and runs the batch scheduler."""

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

import structlog
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import JobError, LoadPostponed
from shared.job import Job
from worker.engine import protocol
from worker.engine.checks.resume_check import check_resuming
from worker.engine.checks.self_check import run_self_check
from worker.engine.checks.warm_up import warm_up_model
from worker.engine.device import choose_device, device_uuid, prepare_thread
from worker.engine.engine_status import Activity, EngineStatus
from worker.engine.fusion.task_greenlet import run_on_trampoline
from worker.engine.lora.embedding_files import published_widths
from worker.engine.lora.fitting import adaptable_layers
from worker.engine.lora.per_row import AdapterKey
from worker.engine.models.adapter_loader import AdapterLoader
from worker.engine.models.load_retries import LoadRetries
from worker.engine.models.model_cache import ModelCache, ModelCacheFull
from worker.engine.models.order_follower import OrderFollower
from worker.engine.pipelines.extra_inputs import describe_inputs
from worker.engine.pipelines.input_decoder import DecodedInputs, InputDecoder
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.protocol import EngineEvents, EngineRequest, MemoryOrders
from worker.engine.scheduling.batch_scheduler import BatchScheduler
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.job_checkpoints import JobCheckpoints
from worker.engine.scheduling.timing import ForwardTimer, ThreadTimer
from worker.engine.weights.downloads import limit_requests

log = structlog.get_logger()


class Engine:
    """In-process implementation of `EngineInterface`; `RemoteEngine` runs it in a child process.

    Public methods can be called from any thread; only `stop`, `join` and `warm_up` block. An error that no job causes
    (a lost device, a bug in the engine) ends the thread, and `status` then reports a hang.
    """

    def __init__(self, catalog: Catalog, events: EngineEvents, settings: Settings) -> None:
        self._catalog = catalog
        self._events = events
        self._torch_threads = settings.torch_threads
        self.device = choose_device(settings.device)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arrivals = itertools.count(1)
        # Several threads change these two, by single operations, which are atomic.
        self._unfinished: set[str] = set()
        self._load_waiters: dict[str, threading.Event] = {}
        adapters = AdapterLoader(self.device, settings.adapter_memory_bytes, self._inbox.put, self._adapters_loaded)
        self._models = ModelCache(self.device, settings, self._inbox.put, self._model_loaded, adapters)
        self._follower = OrderFollower(catalog, self._models)
        self._forward_timer = ForwardTimer(self.device)
        self._thread_timer = ThreadTimer(time.monotonic())
        aging_s = settings.aging_ms / 1000
        self._scheduler = BatchScheduler(self._models, self._forward_timer, events, self._unfinished, aging_s)
        self._checkpoints = JobCheckpoints(self._inbox.put, self._scheduler.report_checkpoint, self._check_resuming)
        self._scheduler.take_checkpoint = self._checkpoints.take
        adapters.busy = lambda: self._scheduler.running
        self._input_decoder = InputDecoder(
            lambda decoded: self._inbox.put(lambda: self._admit(decoded)),
            self._unfinished.__contains__,
            settings.max_input_pixels,
        )
        self._thread = threading.Thread(target=run_on_trampoline, args=(self._run,), name="engine", daemon=True)
        self._stopping = self._failed = self._checking_model = False
        self._load_seconds: dict[str, float] = {}
        self._load_retries = LoadRetries(
            settings.load_retry_s, lambda spec: self._inbox.put(lambda: self._request_model(spec))
        )
        self._outdated_loads: set[str] = set()  # models that are being loaded for an entry that has changed

    def start(self) -> None:
        # diffusers' and transformers' warnings about long prompts and progress bars would clutter the log.
        for library in (diffusers_logging, transformers_logging):
            library.set_verbosity_error()
            library.disable_progress_bar()
        limit_requests()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._inbox.put(self._begin_stop)
        self._thread.join(timeout_s)
        self._load_retries.close()
        self._input_decoder.close()
        self._checkpoints.close()
        self._models.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; False on timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, *requests: EngineRequest) -> None:
        self._unfinished.update([request.claim_key for request in requests])
        self._input_decoder.submit([(request, next(self._arrivals)) for request in requests])

    def cancel(self, claim_key: str) -> None:
        self._unfinished.discard(claim_key)
        self._inbox.put(lambda: self._scheduler.cancel(claim_key))

    def release_all(self) -> None:
        self._unfinished.clear()
        self._inbox.put(self._scheduler.cancel_all)

    def take_checkpoints(self, *claim_keys: str) -> None:
        self._inbox.put(lambda: self._scheduler.take_checkpoints(claim_keys))

    def hand_over(self, *claim_keys: str) -> None:
        self._inbox.put(lambda: self._scheduler.hand_over(claim_keys))

    def order_models(self, orders: MemoryOrders) -> None:
        self._inbox.put(lambda: self._follow(orders))

    def replace_models(self, catalog: Catalog, changed: Collection[str]) -> None:
        self._inbox.put(lambda: self._replace_models(catalog, changed))

    def status(self) -> EngineStatus:
        loaded = tuple(self._models.loaded)
        return EngineStatus(
            device=str(self.device),
            device_uuid=device_uuid(self.device) if loaded else None,  # reading it makes torch initialize the device
            memory_bytes=self._models.device_bytes,
            models_bytes=self._models.used_bytes() + self._scheduler.kept_bytes,
            loaded_models=loaded,
            kept_models=self._models.kept.names,
            loading_models=self._models.requested,
            pinned_models=self._models.pinned,
            kept_bytes=self._models.kept.nbytes,
            models_limit_bytes=self._models.budget_bytes,
            model_bytes=dict(self._models.sizes),
            awaits_jobs=self._follower.awaits_jobs,
            load_seconds=self._load_seconds | self._models.kept.move_times_s(),
            unavailable_models=dict(self._load_retries.unavailable),
            row_limits=self._scheduler.row_limits(),
            activity=self._activity(),
            thread_time=self._thread_timer.time(time.monotonic()),
            failure=self._models.lost_rank,
        )

    def _activity(self) -> Activity:
        if self._failed or self._models.lost_rank is not None:
            return Activity(busy=True, since_s=float("-inf"))
        running = self._scheduler.running
        loading = self._models.loading or self._checking_model
        return Activity(
            busy=running or loading,
            since_s=self._forward_timer.last_progress_s,
            # The thread itself compiles and checks a loaded model, also while jobs of other models wait.
            loading=self._checking_model or (loading and not running),
            expected_s=self._forward_timer.expected_s,
        )

    def warm_up(self) -> None:
        """Load the catalog's models; skips those that do not fit into the rest of the budget, or are to be unloaded."""
        for spec in self._catalog:
            done = self._load_waiters.setdefault(spec.id, threading.Event())
            self._inbox.put(partial(self._request_model, spec))
            while self._thread.is_alive() and not done.wait(0.1):
                pass

    # All methods below run on the engine's thread.

    def _run(self) -> None:
        prepare_thread(self.device, self._torch_threads)
        try:
            while not self._stopping:
                busy = self._scheduler.models_in_use()
                self._follower.unload_idle(busy)
                self._models.start_next_load(busy)
                self._check_again()
                self._run_messages(wait=not (self._scheduler.can_run() or self._models.adapters.attaching))
                self._models.adapters.attach_some()
                if self._scheduler.can_run():
                    self._note_busy()
                self._scheduler.run_forward()
        except BaseException:
            self._failed = True
            log.exception("engine_thread_failed", jobs=len(self._unfinished))
        finally:
            for done in list(self._load_waiters.values()):
                done.set()

    def _run_messages(self, wait: bool) -> None:
        if wait:
            self._note_idle()
            message = self._next_message()
            self._forward_timer.note_progress()  # before a job starts, else the pause would look like a hang
            message()
            self._forward_timer.note_progress()
        while not self._inbox.empty():
            self._inbox.get()()

    def _next_message(self) -> Callable[[], None]:
        """Wait for a message, at most until a self-check is to be repeated."""
        at_s = min((model.next_check_s for model in self._models.loaded.values()), default=math.inf)
        try:
            return self._inbox.get(timeout=None if at_s == math.inf else max(0.0, at_s - time.monotonic()))
        except queue.Empty:
            return lambda: None

    def _note_busy(self) -> None:
        if not self._thread_timer.busy:
            self._thread_timer.note_busy(time.monotonic())
            self._forward_timer.begin_busy()

    def _note_idle(self) -> None:
        self._thread_timer.note_idle(time.monotonic())
        self._forward_timer.end_busy()

    @contextmanager
    def _checking(self) -> Iterator[None]:
        """While the thread checks a model; its time is that of no job, and not busy."""
        self._forward_timer.drain()
        busy = self._thread_timer.busy
        self._note_idle()
        self._checking_model = True
        yield
        self._forward_timer.note_progress()
        self._checking_model = False
        if busy:
            self._note_busy()

    def _adapters_loaded(self, model: LoadedModel, key: AdapterKey, error: JobError | None) -> None:
        self._note_busy()  # jobs that waited for the adapters start
        self._scheduler.adapters_loaded(model, key, error)

    def _begin_stop(self) -> None:
        self._stopping = True
        self._scheduler.cancel_all()

    def _admit(self, jobs: list[DecodedInputs]) -> None:
        for decoded in jobs:
            engine_job = EngineJob(decoded.request, decoded.arrival, decoded.images)
            if decoded.error is not None:
                self._scheduler.finish(engine_job, decoded.error)
                continue
            now, queued_since_s = time.monotonic(), engine_job.request.queued_since_s
            if not self._thread_timer.busy:
                self._thread_timer.note_job(now, now if queued_since_s is None else queued_since_s)
                self._forward_timer.begin_busy()
            if engine_job.claim_key not in self._unfinished:  # canceled while its inputs were decoded
                self._scheduler.finish(engine_job, canceled=True)
            elif postponed := self._load_retries.postponed(engine_job.spec.id):
                self._scheduler.finish(engine_job, postponed)
            else:
                self._scheduler.admit(engine_job)

    def _follow(self, orders: MemoryOrders) -> None:
        ended = set(self._models.pinned) - set(orders.pinned)
        self._follower.follow(orders)
        if ended:
            self._load_retries.forget_pins()

    def _replace_models(self, catalog: Catalog, changed: Collection[str]) -> None:
        self._catalog.replace(catalog)
        for model in changed:
            self._forget(model)
        self._models.replace_entries(self._catalog)
        for spec in self._catalog:
            if spec.id in changed:
                self._request_model(spec)

    def _forget(self, model: str) -> None:
        """Free a model, and forget what was learned of it; one that is being loaded is freed at the end of its load."""
        for known in (self._load_seconds, self._models.sizes):
            known.pop(model, None)
        self._load_retries.forget(model)
        if self._models.is_requested(model):
            self._outdated_loads.add(model)
        else:
            self._models.unload(model)
        self._scheduler.forget(model)

    def _end_outdated_load(self, model: str) -> None:
        """Free a model that was loaded for an earlier entry, and load it for the present one."""
        self._outdated_loads.discard(model)
        self._models.unload(model)
        self._models.sizes.pop(model, None)
        spec = self._catalog.find(model)
        if spec is None:
            self._wake_load_waiter(model)
        else:
            evict_others = self._scheduler.awaits(model) or model in self._models.pinned
            self._models.request_load(spec, evict_others=evict_others)

    def _request_model(self, spec: ModelSpec) -> None:
        """Load a model without a job, if there is room or it is pinned."""
        if self._follower.is_unwanted(spec.id):
            self._load_retries.note_usable(spec.id)
        if self._models.get(spec.id) is not None or self._follower.is_unwanted(spec.id):
            self._wake_load_waiter(spec.id)
        else:
            self._models.request_load(spec, evict_others=spec.id in self._models.pinned)

    def _model_loaded(self, model: str, result: LoadedModel | JobError, from_cpu_memory: bool) -> None:
        if model in self._outdated_loads:
            return self._end_outdated_load(model)
        self._follower.load_ended(model)
        if isinstance(result, LoadedModel):
            if not from_cpu_memory:  # else it has been checked, and its kernels are ready
                with self._checking():
                    run_self_check(result, self.device)
                    warm_up_model(result, self.device, self._forward_timer.note_progress)
            self._forward_timer.note_progress()
            seconds = time.monotonic() - result.load_started_s
            if not from_cpu_memory:
                self._load_seconds[model] = seconds
            layers = adaptable_layers({name: one.module for name, one in result.adapters.modules.items()})
            layers |= published_widths(next(iter(result.templates.values())))
            inputs = describe_inputs(result.templates)
            self._events.on_event(protocol.ModelLoaded(model, seconds, from_cpu_memory, layers, inputs, result.facts))
            self._load_retries.note_load(model)
        elif isinstance(result, ModelCacheFull):
            self._load_retries.note_usable(model)
            log.info("model_load_skipped", model=model, reason=result.message)
        else:
            self._repeat_load(model, result)
        self._note_busy()  # jobs that waited for the model start
        self._scheduler.model_loaded(model, result)
        self._wake_load_waiter(model)

    def _repeat_load(self, model: str, error: JobError) -> None:
        self._load_retries.note_failure(self._catalog.get(model), error)
        self._events.on_event(protocol.ModelLoadFailed(model))
        if isinstance(error, LoadPostponed) and error.lacks_memory:  # the budget allowed more than the device
            self._models.evict_one(self._scheduler.models_in_use(), keep=False)

    def _check_again(self) -> None:
        """Repeat self-checks for which memory was too scarce."""
        for model in list(self._models.loaded.values()):
            if model.next_check_s <= time.monotonic():
                with self._checking():
                    run_self_check(model, self.device)

    def _check_resuming(self, model: LoadedModel, job: Job) -> None:
        with self._checking():
            check_resuming(model, job, self.device)

    def _wake_load_waiter(self, model: str) -> None:
        if done := self._load_waiters.pop(model, None):
            done.set()
