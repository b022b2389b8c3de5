"""Loading adapters in the background: read, combine and move them; attach them between two forwards."""

import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor

import structlog
import torch

from shared.errors import AdapterUnavailable, JobError
from worker.engine.lora.adapter_files import Changes, check_fit, combine, locate, move, read
from worker.engine.lora.per_row import AdapterKey
from worker.engine.pipelines.loading import LoadedModel

log = structlog.get_logger()

Post = Callable[[Callable[[], None]], None]
OnLoaded = Callable[[LoadedModel, AdapterKey, JobError | None], None]


class AdapterLoader:
    """Loads adapters on its own thread; all methods run on the engine's thread.

    `post` runs a function on the engine's thread; `on_loaded` gets the outcome of each load there. A model keeps
    adapters of at most `budget_bytes`, unless running jobs use more.
    """

    def __init__(self, device: torch.device, budget_bytes: int, post: Post, on_loaded: OnLoaded) -> None:
        self._device = device
        self._budget_bytes = budget_bytes
        self._post = post
        self._on_loaded = on_loaded
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="load-adapter")
        self._requested: set[tuple[int, AdapterKey]] = set()

    @property
    def loading(self) -> bool:
        return bool(self._requested)

    def request_load(self, model: LoadedModel, key: AdapterKey) -> None:
        """Start loading the adapters of `key` for `model`, unless already requested."""
        if (id(model), key) not in self._requested:
            self._requested.add((id(model), key))
            self._reader.submit(self._load, model, key)

    def trim(self, model: LoadedModel, in_use: Set[AdapterKey], *, keep_unused: bool = True) -> None:
        """Detach a model's adapters that are not in use: those above the budget, or all of them."""
        model.adapters.trim(self._budget_bytes if keep_unused else 0, in_use)

    def close(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _load(self, model: LoadedModel, key: AdapterKey) -> None:
        started = time.monotonic()
        outcome: Changes | JobError
        try:
            with torch.no_grad():
                outcome = changes_for(model, key, self._device)
        except JobError as error:
            outcome = type(error)(error.message, param="adapters")
        except BaseException as error:  # the top of the reader's thread: its jobs must end
            log.exception("adapter_load_failed", model=model.spec.id, adapters=key)
            outcome = AdapterUnavailable(f"adapters cannot be loaded: {type(error).__name__}", param="adapters")
        seconds = round(time.monotonic() - started, 3)
        self._post(lambda: self._settle(model, key, outcome, seconds))

    def _settle(self, model: LoadedModel, key: AdapterKey, outcome: Changes | JobError, seconds: float) -> None:
        self._requested.discard((id(model), key))
        if isinstance(outcome, JobError):
            log.error("adapter_unavailable", model=model.spec.id, adapters=key, error=outcome.message)
            self._on_loaded(model, key, outcome)
            return
        model.adapters.attach(key, outcome)
        log.info("adapter_loaded", model=model.spec.id, adapters=key, bytes=model.adapters.nbytes, seconds=seconds)
        self._on_loaded(model, key, None)


def changes_for(model: LoadedModel, key: AdapterKey, device: torch.device) -> Changes:
    """Return the combined changes of the adapters of `key`, on `device`; raises `AdapterUnavailable`."""
    specs = {spec.id: spec for spec in model.spec.adapter}
    modules = {component: adapters.module for component, adapters in model.adapters.modules.items()}
    pipeline = next(iter(model.templates.values()))
    scaled = []
    for name, scale in key:
        if name not in specs:
            raise AdapterUnavailable(f"this worker's models file has no adapter {name!r} for {model.spec.id!r}")
        changes = read(specs[name], locate(specs[name]), pipeline)
        try:
            check_fit(changes, modules)
        except AdapterUnavailable as error:
            raise AdapterUnavailable(f"adapter {name!r} does not fit {model.spec.id!r}: {error.message}") from None
        scaled.append((changes, scale))
    try:
        return move(combine(scaled), modules, device)
    except torch.OutOfMemoryError:
        raise AdapterUnavailable("the adapters do not fit into the device's memory") from None
