"""LRU cache of models in memory: loaded in the background, within a memory budget."""

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from shared.config.models_file import ModelSpec
from shared.errors import JobError, ModelUnavailable
from worker.engine.lora.adapter_loader import AdapterLoader, Post
from worker.engine.pipelines.loading import LoadedModel, load, load_error, locate

log = structlog.get_logger()
T = TypeVar("T")
Outcome = LoadedModel | JobError
OnLoaded = Callable[[str, Outcome], None]


class ModelCacheFull(ModelUnavailable):
    """A model that no job requests is not loaded, as it would evict another one."""


class ModelCache:
    """The models of one device. All methods run on the engine's thread; loading and each download have their own.

    `post` runs a function on the engine's thread; `on_loaded` gets the outcome of each load there. A model above the
    default budget is loaded when it has the device to itself; one above a configured budget, or above the device's
    memory, is refused.
    """

    def __init__(
        self, device: torch.device, budget_bytes: int | None, post: Post, on_loaded: OnLoaded, adapters: AdapterLoader
    ) -> None:
        self.device = device
        if device.type == "cuda":
            self.device_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        else:
            self.device_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # 30% of the device's memory is for activations.
        self.budget_bytes = int(0.7 * self.device_bytes) if budget_bytes is None else budget_bytes
        self._most_bytes = self.device_bytes if budget_bytes is None else budget_bytes
        self.loaded: dict[str, LoadedModel] = {}
        self._post = post
        self._on_loaded = on_loaded
        self.adapters = adapters
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-model")
        self._requested: dict[str, bool] = {}  # whether other models can be evicted for it
        self._downloading: set[str] = set()
        self._located: list[tuple[ModelSpec, Path, int]] = []
        self._load_running: str | None = None

    def get(self, model: str) -> LoadedModel | None:
        """Return a model that is in memory, and mark it as used."""
        loaded = self.loaded.get(model)
        if loaded is not None:
            loaded.last_used = time.monotonic()
        return loaded

    @property
    def loading(self) -> bool:
        """Whether models or adapters are loaded; downloads do not count: they have their own limit."""
        return bool(self._requested.keys() - self._downloading) or self.adapters.loading

    def request_load(self, spec: ModelSpec, *, evict_others: bool = True) -> None:
        """Request a load, unless already requested; without `evict_others` the model is loaded only if it fits."""
        is_new = spec.id not in self._requested
        self._requested[spec.id] = evict_others or self._requested.get(spec.id, False)
        if not is_new:
            return
        if spec.is_on_hub:
            self._downloading.add(spec.id)
        self._in_background(spec, lambda: (spec, *locate(spec)), self._add_located)

    def _add_located(self, located: tuple[ModelSpec, Path, int]) -> None:
        self._downloading.discard(located[0].id)
        self._located.append(located)

    def start_next_load(self, busy: set[str]) -> None:
        """Start the next load if the model fits, evicting models that are not `busy`, least recently used first."""
        if self._load_running or not self._located:
            return
        spec, folder, nbytes = self._located[0]
        failure = too_large(spec, nbytes, self._most_bytes)
        while failure is None and self.loaded and self.used_bytes() + nbytes > self.budget_bytes:
            if not self._requested[spec.id]:
                failure = ModelCacheFull(f"model {spec.id!r}: no memory left after the models loaded")
            elif not self.evict_one(busy):
                return
        self._located.pop(0)
        if failure is not None:
            self._settle(spec, failure)
        else:
            self._load_running = spec.id
            self._in_background(spec, lambda: load(spec, folder, self.device), lambda model: self._settle(spec, model))

    def _in_background(self, spec: ModelSpec, work: Callable[[], T], done: Callable[[T], None]) -> None:
        def run() -> None:
            try:
                with torch.no_grad():
                    result = work()
            except JobError as error:
                error.__traceback__ = error.__context__ = None  # its frames hold what was loaded
                failure: JobError = error
            except BaseException as error:  # the top of the loader's thread: its jobs must end
                log.exception("model_load_failed", model=spec.id)
                failure = load_error(spec, error)
            else:
                self._post(lambda: done(result))
                return
            self._post(lambda: self._settle(spec, failure))

        if spec.id in self._downloading:  # other models are loaded meanwhile, and the process ends without it
            threading.Thread(target=run, name="locate-model", daemon=True).start()
        else:
            self._loader.submit(run)

    def _settle(self, spec: ModelSpec, outcome: Outcome) -> None:
        self._requested.pop(spec.id, None)
        self._downloading.discard(spec.id)
        if self._load_running == spec.id:
            self._load_running = None
        if isinstance(outcome, LoadedModel):
            self.loaded[spec.id] = outcome
        self._on_loaded(spec.id, outcome)

    def used_bytes(self) -> int:
        """Return the bytes of models and adapters in memory; callable from any thread."""
        return sum(model.nbytes + model.adapters.nbytes for model in tuple(self.loaded.values()))

    def evict_one(self, busy: set[str]) -> bool:
        """Evict the least recently used model that is not `busy`; False if there is none."""
        idle = [model for model in self.loaded.values() if model.spec.id not in busy]
        if not idle:
            return False
        oldest = self.loaded.pop(min(idle, key=lambda model: model.last_used).spec.id)
        log.info("model_evicted", model=oldest.spec.id, bytes=oldest.nbytes)
        oldest.close()
        del oldest, idle  # so that garbage collection frees it
        was_frozen = gc.get_freeze_count()
        gc.unfreeze()  # the model can be among the objects frozen by gc.freeze
        gc.collect()
        if was_frozen:
            gc.freeze()
        empty_cache(self.device)
        return True

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        for model in self.loaded.values():
            model.close()
        self.adapters.close()


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def too_large(spec: ModelSpec, nbytes: int, most_bytes: int) -> ModelUnavailable | None:
    """Return the error of a model that can never fit into `most_bytes`, None if it can."""
    if nbytes <= most_bytes or spec.offload == "group":  # groups are never on the device all at once
        return None
    return ModelUnavailable(
        f"model {spec.id!r} does not fit: its weights take {nbytes / 2**30:.3g} GiB as {spec.dtype} and there are "
        f'{most_bytes / 2**30:.3g}; use a smaller dtype, offload = "group" or a larger FUSEQUEUE_GPU_MEMORY_BYTES'
    )
