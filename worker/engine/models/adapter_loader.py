"""Loading adapters in the background: read, combine and move them; attach them in pieces between forwards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import structlog
import torch

from shared.config.adapters import AdapterSpec
from shared.errors import AdapterUnavailable, JobError
from worker.engine import thread_pools
from worker.engine.lora import new_tokens
from worker.engine.lora.adapter_files import AdapterFile, locate, read
from worker.engine.lora.embedding_files import read_embedding
from worker.engine.lora.fitting import check_fit, check_rank, combine, move
from worker.engine.lora.layer_update import Changes
from worker.engine.lora.new_tokens import NewTokens
from worker.engine.lora.pacing import Pace, no_pace
from worker.engine.lora.per_row import AdapterKey
from worker.engine.pipelines.loaded_model import LoadedModel

log = structlog.get_logger()

Post = Callable[[Callable[[], None]], None]
OnLoaded = Callable[[LoadedModel, AdapterKey, JobError | None], None]


ATTACH_S = 0.005
"""Time for attaching adapters between two forwards. A layer takes 20 us, and the adapters of SDXL can change 900."""

WORK_S, REST = 0.002, 3.0
"""While jobs run, the reader rests three times as long as it has worked, every 2 ms: it shares Python's lock with the
forwards. The attention of SDXL takes 0.2 s of work, of which 20 ms, diffusers' own, have no pause."""

_END = object()


@dataclass(frozen=True)
class _Attachment:
    """Adapters in memory that are being attached; `pieces` attaches the next layer. `seconds`: of the load before."""

    model: LoadedModel
    key: AdapterKey
    pieces: Iterator[None]
    seconds: float


class _Pacer:
    """Rests on a thread in proportion to its work, while `busy`; call it between pieces of the work."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._since_s = time.thread_time()

    def __call__(self) -> None:
        worked_s = time.thread_time() - self._since_s
        if worked_s >= WORK_S:
            if self._busy():
                time.sleep(REST * worked_s)
            self._since_s = time.thread_time()


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
        self.busy: Callable[[], bool] = lambda: False
        """Whether jobs run, which loads must not delay; called on the reader's thread."""
        self._requested: dict[tuple[int, AdapterKey], Sequence[AdapterSpec]] = {}  # with the files of the last request
        self._attachments: deque[_Attachment] = deque()

    @property
    def loading(self) -> bool:
        return bool(self._requested)

    @property
    def attaching(self) -> bool:
        """Whether `attach_some` has something to do."""
        return bool(self._attachments)

    def request_load(self, model: LoadedModel, key: AdapterKey, uploaded: Sequence[AdapterSpec] = ()) -> None:
        """Start loading the adapters of `key` for `model`, unless already requested; `uploaded` are local files, which
        stay while the job of the request runs."""
        is_new = (id(model), key) not in self._requested
        self._requested[id(model), key] = uploaded
        if is_new:
            self._reader.submit(self._load, model, key)

    def attach_some(self) -> None:
        """Attach what is loaded, for about `ATTACH_S`; call it between forwards."""
        until_s = time.monotonic() + ATTACH_S
        while self._attachments and time.monotonic() < until_s:
            attachment = self._attachments[0]
            if next(attachment.pieces, _END) is _END:
                self._attachments.popleft()
                self._end_load(attachment)

    def trim(self, model: LoadedModel, in_use: Set[AdapterKey], *, keep_unused: bool = True) -> None:
        """Detach a model's adapters that are not in use: those above the budget, or all of them."""
        model.adapters.trim(self._budget_bytes if keep_unused else 0, in_use)

    def close(self) -> None:
        thread_pools.end(self._reader)

    def _load(self, model: LoadedModel, key: AdapterKey) -> None:
        started, uploaded = time.monotonic(), self._requested[id(model), key]
        outcome: AdapterFile | JobError
        try:
            with torch.no_grad():
                outcome = changes_for(model, key, self._device, uploaded, _Pacer(self.busy))
        except JobError as error:
            outcome = type(error)(error.message, param="adapters")
        except BaseException as error:  # the top of the reader's thread: its jobs must end
            log.exception("adapter_load_failed", model=model.spec.id, adapters=key)
            outcome = AdapterUnavailable(f"adapters cannot be loaded: {type(error).__name__}", param="adapters")
        seconds = round(time.monotonic() - started, 3)
        self._post(lambda: self._settle(model, key, outcome, seconds, uploaded))

    def _settle(
        self,
        model: LoadedModel,
        key: AdapterKey,
        outcome: AdapterFile | JobError,
        seconds: float,
        uploaded: Sequence[AdapterSpec],
    ) -> None:
        if isinstance(outcome, JobError) and self._requested[id(model), key] is not uploaded:
            self._reader.submit(self._load, model, key)  # the job of these files has ended, and another one needs them
        elif isinstance(outcome, JobError):
            del self._requested[id(model), key]
            log.error("adapter_unavailable", model=model.spec.id, adapters=key, error=outcome.message)
            self._on_loaded(model, key, outcome)
        else:
            pieces = model.adapters.attach_layers(key, outcome)
            self._attachments.append(_Attachment(model, key, pieces, seconds))

    def _end_load(self, loaded: _Attachment) -> None:
        model, key = loaded.model, loaded.key
        del self._requested[id(model), key]
        log.info(
            "adapter_loaded", model=model.spec.id, adapters=key, bytes=model.adapters.nbytes, seconds=loaded.seconds
        )
        self._on_loaded(model, key, None)


def changes_for(
    model: LoadedModel,
    key: AdapterKey,
    device: torch.device,
    uploaded: Sequence[AdapterSpec] = (),
    pace: Pace = no_pace,
) -> AdapterFile:
    """Return the combined changes of the adapters of `key`, on `device`; raises `AdapterUnavailable`."""
    specs = {spec.id: spec for spec in (*uploaded, *model.spec.adapter)}
    modules = {component: adapters.module for component, adapters in model.adapters.modules.items()}
    pipeline = next(iter(model.templates.values()))
    scaled: list[tuple[Changes, float]] = []
    embeddings: list[NewTokens] = []
    warnings: list[str] = []
    for name, scale in key:
        if name not in specs:
            raise AdapterUnavailable(f"this worker's models file has no adapter {name!r} for {model.spec.id!r}")
        if specs[name].token is not None:
            embeddings.append(read_embedding(specs[name], locate(specs[name]), pipeline))
            continue
        file = read(specs[name], locate(specs[name]), pipeline, pace)
        try:
            check_fit(file.changes, modules)
            if name in {spec.id for spec in uploaded}:
                check_rank(file.changes)
            _check_weights_stay(file.changes, model)
        except AdapterUnavailable as error:
            raise AdapterUnavailable(f"adapter {name!r} does not fit {model.spec.id!r}: {error.message}") from None
        scaled.append((file.changes, scale))
        warnings += file.warnings
    try:
        changes = move(combine(scaled, modules, pace), modules, device, pace)
        return AdapterFile(changes, tuple(warnings), new_tokens.move(new_tokens.join(embeddings), modules, device))
    except torch.OutOfMemoryError:
        raise AdapterUnavailable("the adapters do not fit into the device's memory") from None


def _check_weights_stay(changes: Changes, model: LoadedModel) -> None:
    """Raise `AdapterUnavailable` for a DoRA whose layers' weights are moved while forwards run."""
    needs_weights = any(update.magnitude is not None for layers in changes.values() for update in layers.values())
    if needs_weights and model.spec.offload != "none":
        raise AdapterUnavailable(
            f'DoRA needs the weights of its layers, and offload = "{model.spec.offload}" moves them'
        )
