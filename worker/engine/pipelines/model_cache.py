"""Models in memory: loaded in the background, within a budget, the least recently used leaving first."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import torch
from diffusers import DiffusionPipeline

from shared.config.models_file import ModelSpec
from shared.errors import JobError, ModelUnavailable
from shared.job import Job, Task
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ModuleProxy, SharedMethod, Stage, shared_methods_of
from worker.engine.lora.per_row import ModelAdapters, adapter_key
from worker.engine.pipelines.call_arguments import arguments_for, make_results, scheduler_named, set_guidance
from worker.engine.pipelines.clones import Pipeline, StepCounter, clone_pipeline, make_template, remember_signatures
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.latent_previews import previewing
from worker.engine.pipelines.rng_state import seed_globally
from worker.engine.pipelines.task_pipelines import accepted_by, pipeline_for
from worker.engine.pipelines.text_cache import TextCache
from worker.engine.pipelines.token_cache import cached_tokenizers
from worker.engine.pipelines.weights import default_budget, device_bytes, folder_bytes, too_large
from worker.engine.protocol import Output

if TYPE_CHECKING:
    from worker.engine.lora.loading import AdapterLoader

log = structlog.get_logger()
T = TypeVar("T")
_LOADER: Pipeline = DiffusionPipeline
# While weights load, accelerate patches torch.nn.Module for the whole process: two loads at once leave empty ones.
_ONE_LOAD = threading.Lock()


class ModelCacheFull(ModelUnavailable):
    """A model that no job asks for yet stays out of memory."""


@dataclass
class LoadedModel:
    """A model in memory: a template pipeline for each of its tasks, and the points at which pictures meet."""

    spec: ModelSpec
    device: torch.device
    templates: dict[Task, Pipeline]
    shared_methods: list[SharedMethod]
    schedulers: dict[str, Any]
    nbytes: int
    adapters: ModelAdapters
    began_s: float = 0.0  # time.monotonic() when its load began
    text_cache: TextCache = field(default_factory=TextCache)
    last_used: float = field(default_factory=time.monotonic)

    @property
    def solo_reason(self) -> str | None:
        """Why no denoiser of this model fuses, None if one does."""
        reasons = [point.solo_reason for point in self.shared_methods if point.stage is Stage.DENOISE]
        return None if None in reasons else next(iter(reasons), "the model has no known denoiser")

    @property
    def mixes_adapters(self) -> bool:
        """Whether rows of one forward may differ in their adapters."""
        return all(point.adapters.per_row for point in self.shared_methods if point.stage is Stage.DENOISE)

    @property
    def mixes_sizes(self) -> bool:
        """Whether rows of one forward may differ in their size."""
        return all(point.takes_lists for point in self.shared_methods if point.stage is Stage.DENOISE)

    @property
    def compiled(self) -> bool:
        return any(point.compiled for point in self.shared_methods)

    def clone_for(self, job: Job, steps: StepCounter) -> Pipeline:
        """Return a pipeline of its own for one picture of `job`."""
        template = self.templates.get(job.task)
        if template is None:
            raise ModelUnavailable(f"model {self.spec.id!r} does not do {job.task.value}")
        scheduler = template.scheduler
        if job.scheduler is not None:
            scheduler = self.schedulers.get(job.scheduler)
            if scheduler is None:
                scheduler = self.schedulers[job.scheduler] = scheduler_named(job.scheduler, template.scheduler)
        return clone_pipeline(template, scheduler, steps)

    def image_task(self, job: Job, index: int, inputs: InputImages, steps: StepCounter) -> ImageTask:
        """Return picture `index` of `job`, not yet started."""

        def make() -> list[Output]:
            seed_globally(self.device, job.seed + index)
            pipeline = self.clone_for(job, steps)
            set_guidance(pipeline, job)
            arguments = arguments_for(pipeline, job, index, inputs)
            if job.previews and "callback_on_step_end" in accepted_by(pipeline):
                arguments["callback_on_step_end"] = previewing(job, steps)
            return make_results(pipeline, arguments)

        return ImageTask(make, adapter_key(job.adapters))

    def release_tensors(self) -> None:
        """Let go of what was remembered of jobs that have ended."""
        for point in self.shared_methods:
            if point.stacker is not None:
                point.stacker.release_tensors()


def locate(spec: ModelSpec) -> tuple[Path, int]:
    """Return the folder of a model's weights, fetching them if need be, and about how many bytes they are."""
    if spec.is_folder:
        folder = Path(spec.source)
    else:
        try:
            folder = Path(
                _LOADER.download(spec.source, revision=spec.revision, variant=spec.variant, use_safetensors=True)
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise _unavailable(spec, error) from error
    if not (folder / "model_index.json").is_file():
        raise ModelUnavailable(
            f"model {spec.id!r}: {spec.source} holds no diffusers pipeline (no model_index.json); check its source"
        )
    dtype: torch.dtype = getattr(torch, spec.dtype)
    parts = [part for part in folder.iterdir() if part.is_dir()]
    return folder, sum(folder_bytes(part, spec.variant, dtype.itemsize) for part in parts)


def load(spec: ModelSpec, folder: Path, device: torch.device) -> LoadedModel:
    """Load a pipeline from `folder` onto `device`; raises `ModelUnavailable` that says what is the matter."""
    started = time.monotonic()
    dtype: torch.dtype = getattr(torch, spec.dtype)
    try:
        with _ONE_LOAD:
            pipeline: Pipeline = _LOADER.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, variant=spec.variant, local_files_only=True
            )
        if not spec.safety_checker and getattr(pipeline, "safety_checker", None) is not None:
            pipeline.register_modules(safety_checker=None)
        _place(pipeline, spec, device)
        model = _assemble(pipeline, spec, device, dtype)
    except (OSError, ValueError, TypeError, AttributeError, ImportError, RuntimeError, KeyError) as error:
        raise _unavailable(spec, error) from None
    if "size" in spec.mixed_fields and not model.mixes_sizes:
        log.warning("sizes_do_not_mix", model=spec.id, remedy="remove size from its mixed_fields in the models file")
    if spec.adapter and "adapters" in spec.mixed_fields and not model.mixes_adapters:
        log.warning("adapters_do_not_mix", model=spec.id, remedy="set mixed_fields = [] in the models file")
    model.began_s = started
    log.info("model_loaded", model=spec.id, bytes=model.nbytes, seconds=round(time.monotonic() - started, 3))
    return model


def _unavailable(spec: ModelSpec, error: Exception) -> ModelUnavailable:
    words = " ".join(str(error).split())[:400]
    return ModelUnavailable(f"model {spec.id!r} cannot be loaded from {spec.source}: {words}")


def _place(pipeline: Pipeline, spec: ModelSpec, device: torch.device) -> None:
    if spec.offload == "group" and device.type != "cpu":
        pipeline.enable_group_offload(
            onload_device=device, offload_type="block_level", num_blocks_per_group=1, use_stream=True
        )
    else:
        pipeline.to(device)


def _assemble(pipeline: Pipeline, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    full_precision = _wants_full_precision_vae(pipeline, dtype)
    points: list[SharedMethod] = []
    proxies: dict[str, ModuleProxy] = {}
    for name, module in modules.items():
        if not spec.compile:
            remember_signatures(module)
        own_dtype: torch.dtype = getattr(module, "dtype", dtype)
        cast = torch.float32 if name == "vae" and full_precision else None
        if cast is not None:
            module.to(cast)
        # Offloading swaps weights inside forwards; made in inference mode, they could not be swapped outside.
        met = shared_methods_of(name, module, cast=cast, lean=spec.offload == "none")
        points.extend(met.values())
        proxies[name] = ModuleProxy(module, met, device, own_dtype)
    stand_ins: dict[str, Any] = {**proxies, **cached_tokenizers(pipeline.components)}
    templates = {task: make_template(pipeline_for(task, pipeline), stand_ins, device) for task in spec.tasks}
    nbytes = sum(_module_bytes(module) for module in modules.values())
    schedulers = {name: scheduler_named(name, pipeline.scheduler) for name in spec.schedulers}
    return LoadedModel(
        spec,
        device,
        templates,
        points,
        schedulers,
        nbytes,
        ModelAdapters({point.component: point.adapters for point in points}),
    )


def _wants_full_precision_vae(pipeline: Pipeline, dtype: torch.dtype) -> bool:
    """Tell whether the pipeline would cast its VAE to float32 and back at every call.

    XL does so. It is shared here, so it stays float32, and what goes into it is cast.
    """
    vae = getattr(pipeline, "vae", None)
    forced = getattr(getattr(vae, "config", None), "force_upcast", False)
    return bool(forced) and dtype is not torch.float32 and hasattr(pipeline, "upcast_vae")


def _module_bytes(module: torch.nn.Module) -> int:
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


Outcome = LoadedModel | JobError


@dataclass(frozen=True)
class _Located:
    spec: ModelSpec
    folder: Path
    nbytes: int


class ModelCache:
    """The models of one device. All methods run on the engine's thread; loading runs on one of its own.

    `post` runs a function on the engine's thread, soon; `arrived` is told there how each load ended.
    A model above the default budget is loaded when it has the device to itself; one above a budget that was set, or
    above the device's memory, is refused.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int | None,
        post: Callable[[Callable[[], None]], None],
        arrived: Callable[[str, Outcome], None],
        adapters: AdapterLoader,
    ) -> None:
        self.device = device
        self.budget_bytes = default_budget(device) if budget_bytes is None else budget_bytes
        self.device_bytes = device_bytes(device)
        self._room_bytes = self.device_bytes if budget_bytes is None else budget_bytes
        self.loaded: dict[str, LoadedModel] = {}
        self._post = post
        self._arrived = arrived
        self.adapters = adapters
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load-model")
        self._wanted: dict[str, bool] = {}  # whether others may be pushed out for it
        self._located: list[_Located] = []
        self._placing = False

    def get(self, model: str) -> LoadedModel | None:
        """Return a model that is in memory, and note that it is used."""
        found = self.loaded.get(model)
        if found is not None:
            found.last_used = time.monotonic()
        return found

    @property
    def loading(self) -> bool:
        return bool(self._wanted) or self.adapters.loading

    def request(self, spec: ModelSpec, *, evict_others: bool = True) -> None:
        """Start loading a model, unless that is under way; without `evict_others` only if there is room for it."""
        known = spec.id in self._wanted
        self._wanted[spec.id] = evict_others or self._wanted.get(spec.id, False)
        if not known:
            self._in_background(spec, lambda: _Located(spec, *locate(spec)), self._located.append)

    def start_next_load(self, busy: set[str]) -> None:
        """Start the next load if it fits by now, pushing out models that are not `busy`, oldest use first."""
        if self._placing or not self._located:
            return
        spec, folder, nbytes = self._located[0].spec, self._located[0].folder, self._located[0].nbytes
        if error := too_large(spec, nbytes, self._room_bytes):
            self._located.pop(0)
            return self._settle(spec, error)
        while self.loaded and self.used_bytes() + nbytes > self.budget_bytes:
            if not self._wanted[spec.id]:
                self._located.pop(0)
                return self._settle(spec, ModelCacheFull(f"model {spec.id!r}: no room beside those in memory"))
            if not self.evict_one(busy):
                return None
        self._located.pop(0)
        self._placing = True
        self._in_background(spec, lambda: load(spec, folder, self.device), lambda model: self._settle(spec, model))
        return None

    def _in_background(self, spec: ModelSpec, work: Callable[[], T], done: Callable[[T], None]) -> None:
        def run() -> None:
            try:
                with torch.no_grad():
                    result = work()
            except JobError as error:
                failure: JobError = error
            except Exception as error:  # the top of the loader's thread: whatever happens, the jobs are told
                log.exception("model_load_failed", model=spec.id)
                failure = _unavailable(spec, error)
            else:
                self._post(lambda: done(result))
                return
            self._post(lambda: self._settle(spec, failure))

        self._loader.submit(run)

    def _settle(self, spec: ModelSpec, outcome: Outcome) -> None:
        self._wanted.pop(spec.id, None)
        self._placing = False
        if isinstance(outcome, LoadedModel):
            self.loaded[spec.id] = outcome
        self._arrived(spec.id, outcome)

    def used_bytes(self) -> int:
        """Return what is in memory; any thread may ask."""
        return sum(model.nbytes + model.adapters.nbytes for model in tuple(self.loaded.values()))

    def evict_one(self, busy: set[str]) -> bool:
        """Push out the least recently used model that has no jobs; False if there is none."""
        idle = [model for model in self.loaded.values() if model.spec.id not in busy]
        if not idle:
            return False
        oldest = min(idle, key=lambda model: model.last_used)
        del self.loaded[oldest.spec.id]
        log.info("model_evicted", model=oldest.spec.id, bytes=oldest.nbytes)
        del oldest, idle
        _collect()
        empty_cache(self.device)
        return True

    def close(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)
        self.adapters.close()


def _collect() -> None:
    """Collect garbage, also among what was set apart from that (`gc.freeze`), and set apart what is left of it."""
    apart = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    if apart:
        gc.freeze()


def empty_cache(device: torch.device) -> None:
    """Give memory that torch holds in reserve back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
