"""LRU cache of models in device memory, loaded in the background, within a budget. Evicted ones can be kept."""

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
import torch

from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import JobError, LoadPostponed, ModelUnavailable
from worker.engine import thread_pools
from worker.engine.models.adapter_loader import AdapterLoader, Post
from worker.engine.models.cpu_memory import KeptModel, KeptModels
from worker.engine.models.residency import ModelInMemory, next_evicted
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.loading import load, load_error, locate
from worker.engine.weights.missing_packages import missing_package

log = structlog.get_logger()
T = TypeVar("T")
Outcome = LoadedModel | JobError
OnLoaded = Callable[[str, Outcome, bool], None]


class ModelCacheFull(ModelUnavailable):
    """A model that no job requests is not loaded, as it would evict another one."""


class PinsInTheWay(LoadPostponed):
    """A model that does not fit next to the pinned ones."""


class _Located(NamedTuple):
    """A model that is to be loaded next: from its folder, or from CPU memory."""

    spec: ModelSpec
    source: Path | KeptModel
    nbytes: int


class ModelCache:
    """The models of one device. All methods run on the engine's thread; loading and each download have their own.

    `post` runs a function on the engine's thread; `on_loaded` gets the outcome of each load there, and whether the
    weights came from CPU memory. A model above the default budget is loaded when it has the device to itself; one
    above a configured budget, or above the device's memory, is refused.
    """

    def __init__(
        self, device: torch.device, settings: Settings, post: Post, on_loaded: OnLoaded, adapters: AdapterLoader
    ) -> None:
        budget_bytes = settings.gpu_memory_bytes
        self.device = device
        if device.type == "cuda":
            self.device_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        else:
            self.device_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # 30% of the device's memory is for activations.
        self.budget_bytes = int(0.7 * self.device_bytes) if budget_bytes is None else budget_bytes
        self._most_bytes = self.device_bytes if budget_bytes is None else budget_bytes
        self.loaded: dict[str, LoadedModel] = {}
        self.kept = KeptModels(device, settings.cpu_memory_bytes)
        self.pinned: tuple[str, ...] = ()  # never evicted
        self.sizes: dict[str, int] = {}  # of models whose files have been read
        self.waiting_for_jobs: str | None = None  # the model whose load waits for the memory of busy ones
        self._post = post
        self._on_loaded = on_loaded
        self.adapters = adapters
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-model")
        self._requested: dict[str, bool] = {}  # whether other models can be evicted for it
        self._downloading: set[str] = set()
        self._located: list[_Located] = []
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

    @property
    def lost_rank(self) -> str | None:
        """Why the ranks of a model over several devices cannot run its forwards any more, None if they can."""
        groups = [model.ranks for model in tuple(self.loaded.values()) if model.ranks is not None]
        return next((group.lost for group in groups if group.lost is not None), None)

    def request_load(self, spec: ModelSpec, *, evict_others: bool = True) -> None:
        """Request a load, unless already requested; without `evict_others` the model is loaded only if it fits."""
        is_new = spec.id not in self._requested
        self._requested[spec.id] = evict_others or self._requested.get(spec.id, False)
        if not is_new:
            return
        if kept := self.kept.take(spec.id):
            self._located.append(_Located(spec, kept, kept.model.nbytes))
            return
        if spec.is_on_hub:
            self._downloading.add(spec.id)
        self._in_background(spec, lambda: _Located(spec, *locate(spec)), self._add_located)

    def is_requested(self, model: str) -> bool:
        return model in self._requested

    @property
    def requested(self) -> tuple[str, ...]:
        """The models that are loaded or wait for it, callable from any thread."""
        return tuple(self._requested)

    def _add_located(self, located: _Located) -> None:
        self._downloading.discard(located.spec.id)
        self.sizes[located.spec.id] = located.nbytes
        self._located.append(located)

    def start_next_load(self, busy: set[str]) -> None:
        """Start the next load if the model fits, evicting models that are not `busy`, least recently used first."""
        self.waiting_for_jobs = None
        if self._load_running or not self._located:
            return
        spec, source, nbytes = self._located[0]
        failure = too_large(spec, nbytes, self._most_bytes) or self._pins_in_the_way(spec, nbytes)
        while failure is None and self.loaded and self.used_bytes() + nbytes > self.budget_bytes:
            if not self._requested[spec.id]:
                failure = ModelCacheFull(f"model {spec.id!r}: no memory left after the models loaded")
            elif not self.evict_one(busy) and not self._detach_adapters(busy):
                self.waiting_for_jobs = spec.id
                return
        self._located.pop(0)
        if failure is not None:
            if isinstance(source, KeptModel):
                self.kept.put_back(source)
            self._refuse(_Located(spec, source, nbytes), failure)
        else:
            self._load_running = spec.id
            self._start_load(spec, source, nbytes)

    def _refuse(self, located: _Located, failure: ModelUnavailable) -> None:
        """Settle a model that is not loaded; of one that jobs can request later the classes are checked before."""
        spec, source, _ = located

        def settle(fault: str | None) -> None:
            if self._requested[spec.id]:  # by a job, meanwhile
                self._located.append(located)
            else:
                self._settle(spec, load_error(spec, ImportError(fault)) if fault else failure)

        if isinstance(failure, ModelCacheFull) and isinstance(source, Path):
            self._in_background(spec, partial(missing_package, spec, source, load_parts=False), settle)
        else:
            self._settle(spec, failure)

    def _pins_in_the_way(self, spec: ModelSpec, nbytes: int) -> ModelUnavailable | None:
        pins = {model: self.loaded[model].nbytes for model in self.pinned if model in self.loaded and model != spec.id}
        if not pins or sum(pins.values()) + nbytes <= self.budget_bytes:
            return None
        listed = ", ".join(f"{model} {size / 2**30:.3g} GiB" for model, size in pins.items())
        return PinsInTheWay(
            f"model {spec.id!r} has no memory next to the pinned models: it takes {nbytes / 2**30:.3g} GiB, {listed}, "
            f"and models can take {self.budget_bytes / 2**30:.3g}; unpin one, or raise FUSEQUEUE_GPU_MEMORY_BYTES"
        )

    def _start_load(self, spec: ModelSpec, source: Path | KeptModel, nbytes: int) -> None:
        if isinstance(source, KeptModel):
            kept = source
            self._in_background(spec, lambda: self._bring_back(kept), lambda model: self._settle(spec, model, kept))
        else:
            folder = source
            if self.kept.make_room(nbytes):
                self._collect_garbage()
            self._in_background(spec, lambda: load(spec, folder, self.device), lambda model: self._settle(spec, model))

    def _bring_back(self, kept: KeptModel) -> LoadedModel:
        """Return a kept model, loaded from its files if its weights cannot be copied; runs on the loader's thread."""
        started, spec = time.monotonic(), kept.model.spec
        try:
            model = kept.move_back()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of CUDA, which has its own classes
            log.warning("model_not_copied", model=spec.id, error=str(error), remedy="none: it is loaded from its files")
            return load(spec, locate(spec)[0], self.device)
        model.load_started_s = started
        log.info("model_copied", model=spec.id, bytes=model.nbytes, seconds=round(time.monotonic() - started, 3))
        return model

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

    def _settle(self, spec: ModelSpec, outcome: Outcome, kept: KeptModel | None = None) -> None:
        self._requested.pop(spec.id, None)
        self._downloading.discard(spec.id)
        if self._load_running == spec.id:
            self._load_running = None
        if isinstance(outcome, LoadedModel):
            self.loaded[spec.id] = outcome
            self.sizes[spec.id] = outcome.nbytes
        self.kept.end_return(spec.id)
        self._on_loaded(spec.id, outcome, kept is not None and kept.model is outcome)

    def used_bytes(self) -> int:
        """Return the bytes of models and adapters in memory; callable from any thread."""
        return sum(model.nbytes + model.adapters.nbytes for model in tuple(self.loaded.values()))

    def evict_one(self, busy: set[str], *, keep: bool = True) -> bool:
        """Evict the least recently used model that is neither `busy` nor pinned; False if there is none.

        It is kept in CPU memory if there is room, unless the device's memory must be free at once (`keep=False`).
        """
        held = [ModelInMemory(model.spec.id, model.nbytes, model.last_used) for model in self.loaded.values()]
        model = next_evicted(held, busy, self.pinned)
        if model is None:
            return False
        self._evict(model, keep=keep)
        return True

    def _detach_adapters(self, busy: set[str]) -> bool:
        """Detach the adapters of pinned models that are not `busy`; return whether that has freed memory."""
        before = self.used_bytes()
        for model in self.loaded.values():
            if model.spec.id not in busy:
                self.adapters.trim(model, set(), keep_unused=False)
        return self.used_bytes() < before

    def unload(self, model: str) -> None:
        """Free a model, in device and CPU memory; ignores one that is not there."""
        if model in self.loaded:
            self._evict(model, keep=False)
        elif self.kept.drop(model):
            log.info("kept_model_dropped", model=model)
            self._collect_garbage()

    def _evict(self, name: str, *, keep: bool) -> None:
        model = self.loaded.pop(name)
        kept = self.kept.add(model) if keep else None
        log.info("model_evicted", model=name, bytes=model.nbytes, kept=kept is not None)
        if kept is None:
            model.close()
        else:
            self.adapters.trim(model, set(), keep_unused=False)
            model.release_tensors()
            model.text_cache.clear()
            self._loader.submit(self._move_out, kept)  # before the load for which there must be room
        del model  # so that garbage collection frees it
        self._collect_garbage()

    def _move_out(self, kept: KeptModel) -> None:
        """Move the weights of an evicted model to CPU memory, or drop it; runs on the loader's thread."""
        try:
            with torch.no_grad():
                self.kept.move_out(kept)
        except (MemoryError, RuntimeError) as error:
            log.warning("model_not_kept", model=kept.model.spec.id, error=str(error))
            self._post(lambda: self._forget(kept))
        empty_cache(self.device)  # what it held

    def _forget(self, kept: KeptModel) -> None:
        self.kept.forget(kept)
        del kept
        self._collect_garbage()

    def _collect_garbage(self) -> None:
        """Free the models to which no reference is left."""
        was_frozen = gc.get_freeze_count()
        gc.unfreeze()  # the model can be among the objects frozen by gc.freeze
        gc.collect()
        if was_frozen:
            gc.freeze()
        empty_cache(self.device)

    def replace_entries(self, catalog: Catalog) -> None:
        """Give the models in memory their entries of a changed models file."""
        for model in (*self.loaded.values(), *self.kept.models):
            model.spec = catalog.find(model.spec.id) or model.spec

    def close(self) -> None:
        thread_pools.end(self._loader)
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
