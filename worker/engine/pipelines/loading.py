"""Loading a diffusers pipeline: the weights' files, their size in memory, and the loaded model."""

import copy
import math
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from diffusers import DiffusionPipeline

from shared.config.controls import Control
from shared.config.model_facts import ModelFacts
from shared.config.model_index import CLASSIC, MODULAR, Index, index_file, is_modular, read_index
from shared.config.model_spec import ModelSpec
from shared.config.shape_folder import is_shape_folder
from shared.errors import InferenceFailed, JobError, LoadPostponed, ModelUnavailable, UnusableInput
from shared.job import FieldWarning, Job
from shared.job_fields import OutputFormat, Task
from shared.signature import DENOISERS
from worker.engine.checkpoints.identity import model_fingerprint
from worker.engine.checkpoints.task_record import TaskRecord
from worker.engine.errors import is_out_of_memory, text_of
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import SharedMethod, Stage
from worker.engine.fusion.private_changes import ModuleWatch
from worker.engine.fusion.rng_state import seed_globally
from worker.engine.fusion.step_caching import StepCache
from worker.engine.lora.per_row import ModelAdapters, adapter_key
from worker.engine.parallel.context_parallel import check_divisible
from worker.engine.parallel.rank_group import RankGroup
from worker.engine.pipelines.call_arguments import (
    LATENT,
    arguments_for,
    check_gives_latents,
    check_part_has_steps,
    ignored_fields,
    inputs_refused,
    make_results,
    rounded_sides,
    set_guidance,
)
from worker.engine.pipelines.candidate_marks import add_marks
from worker.engine.pipelines.chosen_schedulers import ChosenSchedulers
from worker.engine.pipelines.clones import (
    Pipeline,
    StepCounter,
    clone_pipeline,
    make_template,
)
from worker.engine.pipelines.control_nets import (
    ControlNets,
    as_part,
    borrow_modules,
    control_pipeline_class,
    load_control_nets,
)
from worker.engine.pipelines.decode_pieces import decode_limit, decoder_pieces, divide_decodes
from worker.engine.pipelines.extra_inputs import describe_inputs
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.ip_adapter import ImageAdapter, load_ip_adapter
from worker.engine.pipelines.latent_previews import add_previews
from worker.engine.pipelines.model_facts import facts_of
from worker.engine.pipelines.modules import modules_of, vae_cast_of
from worker.engine.pipelines.prompt_lengths import cut_prompts, cut_weighted_prompts
from worker.engine.pipelines.prompt_words import tokenizers_with, unused_words
from worker.engine.pipelines.redux import Redux, load_redux, make_redux
from worker.engine.pipelines.refiner import (
    Refiner,
    check_has_step,
    first_part,
    load_refiner,
    make_refiner,
    planned_steps,
    second_part,
)
from worker.engine.pipelines.scoring import Scorer, load_scorer, make_scorer
from worker.engine.pipelines.shape_pipeline import ShapePipeline
from worker.engine.pipelines.sounds import cut_to
from worker.engine.pipelines.stand_ins import stand_in_for
from worker.engine.pipelines.task_pipelines import check_structure, pipeline_for, rebuild
from worker.engine.pipelines.text_cache import TextCache, cached_tokenizers
from worker.engine.pipelines.weighted_prompts import check_syntax, with_embeddings
from worker.engine.protocol import Audio, Latents, Mesh, Output
from worker.engine.weights.checkpoint import checkpoint_parts
from worker.engine.weights.completeness import all_weights_found, check_folder, check_tokenizers, check_weights
from worker.engine.weights.downloads import fetch
from worker.engine.weights.load_failures import is_unmounted, passing_cause
from worker.engine.weights.memory import offload_groups, save_memory
from worker.engine.weights.missing_packages import check_classes, lacking_package, unwanted_parts
from worker.engine.weights.modular_parts import load_modular
from worker.engine.weights.quantization import quantized_parts
from worker.engine.weights.requirements import model_bytes, tensors_bytes
from worker.engine.weights.shape_parts import load_shape_parts

log = structlog.get_logger()

_LOADER: Pipeline = DiffusionPipeline
# While weights load, accelerate patches torch.nn.Module for the whole process: two loads at once leave empty weights.
_ONE_LOAD = threading.Lock()
_LOAD_ERRORS = (OSError, ValueError, TypeError, AttributeError, ImportError, RuntimeError, KeyError)
# Between self-checks without memory, which take about a second of a large GPU.
FIRST_RECHECK_S = 10.0
LONGEST_RECHECK_S = 300.0


@dataclass
class LoadedModel:
    """A model in memory: one template pipeline per task, and the shared methods of its modules."""

    spec: ModelSpec
    device: torch.device
    templates: dict[Task, Pipeline]
    shared_methods: list[SharedMethod]
    schedulers: ChosenSchedulers
    nbytes: int
    adapters: ModelAdapters
    watch: ModuleWatch
    controls: ControlNets | None = None
    image_adapter: ImageAdapter | None = None
    redux: Redux | None = None
    refiner: Refiner | None = None
    scorer: Scorer | None = None
    controlled_templates: dict[Task, Pipeline] = field(default_factory=dict)  # of jobs with controls
    decoder_pieces: SharedMethod | None = None  # of the VAE, if it can decode large videos piece by piece
    output_types: dict[Task, str] = field(default_factory=dict)  # tensors ("pt") by default
    fingerprint: str = ""  # of its weights
    # Why jobs cannot continue from checkpoints, None if they can; of those that have been checked, by `resume_key`.
    resume_faults: dict[Hashable, str | None] = field(default_factory=dict)
    resume_rechecks_s: dict[Hashable, float] = field(default_factory=dict)  # time.monotonic() of the next such check
    timesteps_on_host: bool = True  # of noise schedulers that allow it
    load_started_s: float = 0.0  # time.monotonic() at the start of its load
    text_cache: TextCache = field(default_factory=TextCache)
    facts: ModelFacts = field(default_factory=ModelFacts)
    last_used: float = field(default_factory=time.monotonic)
    ranks: RankGroup | None = None  # of a model over several devices
    verified: set[SharedMethod] = field(default_factory=set)
    next_check_s: float = math.inf  # time.monotonic() of the next self-check
    _check_interval_s: float = FIRST_RECHECK_S

    @property
    def denoisers(self) -> list[SharedMethod]:
        return [method for method in self.shared_methods if method.stage is Stage.DENOISE]

    @property
    def solo_reason(self) -> str | None:
        """Why no denoiser of this model fuses, None if one does."""
        reasons = [denoiser.solo_reason for denoiser in self.denoisers]
        return None if None in reasons else next(iter(reasons), "the model has no known denoiser")

    @property
    def exact(self) -> bool:
        """Whether reproducible jobs can share all denoiser forwards."""
        return all(denoiser.exact for denoiser in self.denoisers)

    @property
    def awaits_memory(self) -> bool:
        """Whether a method runs unfused until there is memory for its self-check."""
        return any(method.awaits_memory for method in self.shared_methods)

    def plan_next_check(self) -> None:
        """Set the time of the next self-check, later after each one for which there was no memory."""
        self.next_check_s = time.monotonic() + self._check_interval_s if self.awaits_memory else math.inf
        self._check_interval_s = min(LONGEST_RECHECK_S, 2 * self._check_interval_s)

    @property
    def compiled(self) -> bool:
        return any(method.compiled for method in self.shared_methods)

    def _template_for(self, job: Job, nets: Sequence[Control]) -> Pipeline | None:
        return (self.controlled_templates if nets else self.templates).get(job.task)

    def warnings(self, job: Job) -> tuple[FieldWarning, ...]:
        """Return warnings about fields of `job`, and ends of its prompts, that its pipeline does not use."""
        template = self._template_for(job, _nets_of(job))
        if template is None:
            return ()
        words = self.adapters.words(adapter_key(job.adapters))
        reader = copy.copy(template)
        reader.__dict__.update(tokenizers_with(words, template))
        ignored = ignored_fields(template, job, self.spec.defaults)
        cut = cut_weighted_prompts if self.spec.prompt_syntax == "weights" else cut_prompts
        return *ignored, *rounded_sides(template, job, self.spec), *cut(reader, job), *unused_words(words, job)

    def clone_for(self, job: Job, steps: StepCounter) -> Pipeline:
        nets = _nets_of(job)
        template = self._template_for(job, nets)
        if template is None:
            if nets and job.task in self.templates:
                raise UnusableInput(f"model {self.spec.id!r} takes no controls for {job.task.value}", param="controls")
            raise ModelUnavailable(f"model {self.spec.id!r} does not do {job.task.value}")
        own = getattr(template, "scheduler", None)
        scheduler = self.schedulers.get(job.scheduler, job.scheduler_options, own)
        clone = clone_pipeline(template, scheduler, steps, timesteps_on_host=self.timesteps_on_host)
        clone.__dict__.update(tokenizers_with(self.adapters.words(adapter_key(job.adapters)), template))
        if self.controls is not None and nets:
            clone.__dict__.update(as_part(self.controls.stand_in(nets)))
        if self.image_adapter is not None:
            scale = sum(control.scale for control in job.controls if control.kind == "ip_adapter")
            clone.__dict__["unet"] = self.image_adapter.stand_in(template.unet, scale)
        if self.decoder_pieces is not None and job.frames > 1 and decode_limit(job) == 1:
            clone.__dict__["vae"] = divide_decodes(clone.vae, self.decoder_pieces)
        return clone

    def image_task(
        self, job: Job, index: int, inputs: InputImages, steps: StepCounter, record: TaskRecord | None = None
    ) -> ImageTask:
        """Return the task of image `index` of `job`, not yet started; it continues from the checkpoint of `record`."""

        def call() -> list[Output] | list[Audio] | list[Mesh] | list[Latents]:
            if job.refiner_start is not None:
                return self._make_refined(job, job.refiner_start, index, inputs, steps)
            pipeline, arguments = self.prepare_call(job, index, inputs, steps)
            if record is not None:
                record.use_generator(arguments.get("generator"))
            add_previews(pipeline, arguments, job, steps, lambda: record is not None and record.replaying)
            add_marks(pipeline, arguments, job, steps, self.scorer)
            with inputs_refused(job, steps):
                results = make_results(pipeline, arguments, inputs.paste)
            check_part_has_steps(job, steps)
            if job.duration_s is not None:
                results = [cut_to(one, job.duration_s) for one in results if isinstance(one, Audio)]
            return results

        def body() -> list[Output] | list[Audio] | list[Mesh] | list[Latents]:
            try:
                return call()
            except Exception as error:
                if record is None or not record.replaying or isinstance(error, JobError):
                    raise
                log.warning("image_restarted", model=job.model, error=type(error).__name__, reason=text_of(error)[:200])
            record.restart()
            steps.restart()
            return call()

        return ImageTask(body, adapter_key(job.adapters), self.watch, self._step_cache(job, steps), record)

    def resume_fault(self, job: Job) -> str | None:
        """Return why a job can have no checkpoint, None if it can."""
        if job.refiner_start is not None:
            return "its refiner makes the last steps in a call of its own"
        if job.task.makes_mesh:
            return "meshes have none"
        if job.reproducible and job.step_cache is not None:
            return "step caching computes its first steps after a checkpoint again, which reproducible jobs must not"
        changed = {id(module) for module in self.watch.changed_modules}
        if any(id(denoiser.module) in changed for denoiser in self.denoisers):
            return "its pipeline changes the denoiser, and reads more from a forward than the output"
        return self.resume_faults.get(self.resume_key(job))

    def resume_key(self, job: Job) -> Hashable:
        """Return what decides whether a job can continue from a checkpoint."""
        return job.task, bool(_nets_of(job))

    def _make_refined(
        self, job: Job, start: float, index: int, inputs: InputImages, steps: StepCounter
    ) -> list[Output] | list[Audio] | list[Mesh] | list[Latents]:
        """Make an image by the model's pipeline up to latents, and from these by its refiner."""
        if self.refiner is None:
            raise InferenceFailed(f"refiner_start: model {self.spec.id!r} has no refiner", param="refiner_start")
        first, second = first_part(job, start), second_part(job, start)
        steps.planned = planned_steps(job)
        pipeline, arguments = self.prepare_call(first, index, inputs, steps)
        add_previews(pipeline, arguments, job, steps)
        latents = pipeline(**arguments).images
        check_has_step(job, "model", steps, since=0)
        done = steps.step
        seed_globally(self.device, job.seed + index)
        words = self.adapters.words(adapter_key(job.adapters))
        pipeline = self.refiner.clone_for(second, steps, words, timesteps_on_host=self.timesteps_on_host)
        arguments = self._arguments(pipeline, second, index, InputImages(latents=latents), job.task)
        add_previews(pipeline, arguments, job, steps)
        results = make_results(pipeline, arguments)
        check_has_step(job, "refiner", steps, since=done)
        return results

    def _step_cache(self, job: Job, steps: StepCounter) -> StepCache | None:
        """Return the step cache of an image; None if every step is computed."""
        changed = {id(module) for module in self.watch.changed_modules}
        if job.step_cache is None or any(id(denoiser.module) in changed for denoiser in self.denoisers):
            return None  # a pipeline that changes its denoiser reads more from a forward than the output
        return StepCache(job.step_cache, steps)

    def prepare_call(
        self, job: Job, index: int, inputs: InputImages, steps: StepCounter, output_type: str | None = None
    ) -> tuple[Pipeline, dict[str, Any]]:
        """Return the pipeline clone for image `index` of `job`, and the arguments of its call.

        The output type is that of the job's task by default.
        """
        seed_globally(self.device, job.seed + index)
        pipeline = self.clone_for(job, steps)
        set_guidance(pipeline, job)
        return pipeline, self._arguments(pipeline, job, index, inputs, job.task, output_type)

    def _arguments(
        self,
        pipeline: Pipeline,
        job: Job,
        index: int,
        inputs: InputImages,
        task: Task,
        output_type: str | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of a clone's call; the output type is that of `task` by default."""
        arguments = arguments_for(pipeline, job, index, inputs)
        if job.output_format is OutputFormat.LATENT:
            check_gives_latents(pipeline, job)
            output_type = LATENT
        if "output_type" in arguments:
            arguments["output_type"] = output_type or self.output_types.get(task, arguments["output_type"])
        if self.spec.prompt_syntax == "weights":
            arguments = with_embeddings(pipeline, job, arguments)
        return arguments if self.redux is None else self.redux.with_image(pipeline, job, inputs, arguments)

    def spread_over(self, ranks: RankGroup) -> None:
        """Run the forwards of the denoisers on all ranks from now on."""
        self.ranks = ranks
        for method in self.denoisers:
            if method.method == "forward":
                method.replace(partial(ranks.run, method.component, method.module), compiled=False)

    def close(self) -> None:
        """End the other ranks."""
        if self.ranks is not None:
            self.ranks.close()

    def release_tensors(self) -> None:
        for method in self.shared_methods:
            if method.stacker is not None:
                method.stacker.release_tensors()


def _nets_of(job: Job) -> list[Control]:
    return [control for control in job.controls if control.kind == "controlnet"]


def locate(spec: ModelSpec) -> tuple[Path, int]:
    """Return the folder of a model's weights, downloaded if needed, and their approximate size in memory."""
    try:
        folder = Path(spec.source) if spec.is_folder else fetch(spec)
        for control in spec.control:
            if control.is_on_hub:
                fetch(control)
        if spec.refiner is not None and not spec.refiner.is_folder:
            fetch(spec.refiner)
        if spec.scorer is not None and not spec.scorer.is_folder:
            fetch(spec.scorer)
        found = index_file(folder) is not None or is_shape_folder(folder)
        unmounted = not found and is_unmounted(folder)
        lost = next((path for path in _other_paths(spec) if is_unmounted(path)), None)
    except Exception as error:  # of the hub's libraries too, which share no base class
        raise load_error(spec, error, downloading=spec.is_on_hub) from None
    if unmounted or lost is not None:
        place = f"{spec.source}, nor beside it (no {CLASSIC})" if unmounted else f"{lost}, nor beside it"
        raise LoadPostponed(f"model {spec.id!r}: nothing is at {place}; is its file system mounted?")
    if not found:
        raise ModelUnavailable(
            f"model {spec.id!r}: {spec.source} holds no diffusers pipeline (no {CLASSIC}, nor {MODULAR}); "
            "check its source"
        )
    return folder, model_bytes(spec, folder)


def _other_paths(spec: ModelSpec) -> list[Path]:
    """Return the files and folders of a model beside its source, other than controls."""
    folders = [one.source for one in (spec.refiner, spec.scorer) if one is not None and one.is_folder]
    head = None if spec.scorer is None else spec.scorer.head
    return [Path(path) for path in (spec.checkpoint, spec.vae, head, *folders) if path is not None]


def load(spec: ModelSpec, folder: Path, device: torch.device) -> LoadedModel:
    """Load a pipeline from `folder` onto `device`; raises `ModelUnavailable`, also as `LoadPostponed`."""
    started = time.monotonic()
    dtype: torch.dtype = getattr(torch, spec.dtype)
    ranks: RankGroup | None = None
    try:
        index = {} if is_shape_folder(folder) else read_index(folder)
        unwanted = unwanted_parts(spec, index)
        if not is_modular(folder):
            check_folder(folder, index, unwanted)
        check_classes(index, unwanted)
        if spec.devices > 1:
            check_divisible(folder, spec.devices)
            ranks = RankGroup(spec, folder, device)
        with _ONE_LOAD, all_weights_found():
            options = {"dtype": dtype, "use_safetensors": True, "variant": spec.variant, "local_files_only": True}
            parts = unwanted | quantized_parts(spec, folder, index, device) | checkpoint_parts(spec, folder, index)
            pipeline = _load_pipeline(spec, folder, index, options, parts)
            denoisers = {name: part for name, part in modules_of(pipeline).items() if name in DENOISERS}
            nets = load_control_nets(spec, list(denoisers.values()), device, dtype)
            image_adapter = load_ip_adapter(spec, pipeline)
            prior = load_redux(spec, pipeline, options)
            refining = load_refiner(spec, folder, pipeline, options)
            scoring = load_scorer(spec, pipeline)
        check_weights(pipeline)
        check_tokenizers(pipeline)
        save_memory(modules_of(pipeline), spec, dtype)
        if spec.offload == "group" and device.type != "cpu":
            offload_groups(pipeline, device)
        else:
            pipeline.to(device)
        if refining is not None:
            save_memory(modules_of(refining), spec, dtype)
            refining.to(device)
        scorer = None if scoring is None else make_scorer(scoring, spec, device)
        redux = None if prior is None else make_redux(prior, spec, device)
        model = _assemble(pipeline, _Beside(refining, nets, scorer, redux), spec, device, dtype)
        model.image_adapter = image_adapter
        model.fingerprint = model_fingerprint(spec, folder)
        if ranks is not None:
            ranks.join(denoisers)
            model.spread_over(ranks)
    except BaseException as error:
        if ranks is not None:
            ranks.close()
        if isinstance(error, _LOAD_ERRORS):
            raise load_error(spec, error) from None
        raise
    if "size" in spec.mixed_fields and not all(denoiser.mixes_shapes for denoiser in model.denoisers):
        log.warning("sizes_do_not_mix", model=spec.id, remedy="remove size from its mixed_fields in the models file")
    per_row = all(denoiser.adapters.per_row for denoiser in model.denoisers)
    if spec.adapter and "adapters" in spec.mixed_fields and not per_row:
        log.warning("adapters_do_not_mix", model=spec.id, remedy="set mixed_fields = [] in the models file")
    unknown = set(spec.extra) - {one.name for one in describe_inputs(model.templates)}
    if unknown:
        log.warning("extra_inputs_unknown", model=spec.id, inputs=sorted(unknown), remedy="remove them from its extra")
    model.load_started_s = started
    model.facts = facts_of(folder, model.templates.values(), model.schedulers.unusable)
    log.info("model_loaded", model=spec.id, bytes=model.nbytes, seconds=round(time.monotonic() - started, 3))
    return model


def _load_pipeline(
    spec: ModelSpec, folder: Path, index: Index, options: Mapping[str, Any], parts: Mapping[str, Any]
) -> Pipeline:
    if is_shape_folder(folder):
        return ShapePipeline(load_shape_parts(folder, spec.variant, options["dtype"]), options["dtype"])
    if is_modular(folder):
        return load_modular(folder, index, options, parts)
    return _LOADER.from_pretrained(folder, **options, **parts)


def load_error(spec: ModelSpec, error: BaseException, *, downloading: bool = False) -> ModelUnavailable:
    """Return the error of a load that raised `error`: `LoadPostponed` if its cause will pass."""
    passing = passing_cause(error, downloading=downloading)
    lacking = lacking_package(error) if passing is None else None
    message = " ".join((lacking or text_of(passing or error)).split())[:400] or type(error).__name__
    if passing is not None:
        postponed = LoadPostponed(f"model {spec.id!r} cannot be loaded from {spec.source} now: {message}")
        postponed.lacks_memory = is_out_of_memory(passing)
        return postponed
    return ModelUnavailable(f"model {spec.id!r} cannot be loaded from {spec.source}: {message}")


class _Beside(NamedTuple):
    """What is loaded beside the pipeline of a model."""

    refining: Pipeline | None
    nets: Mapping[str, Any]
    scorer: Scorer | None
    redux: Redux | None


def _assemble(
    pipeline: Pipeline, beside: _Beside, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    refining, nets, scorer, redux = beside
    modules = modules_of(pipeline)
    vae_cast = vae_cast_of(pipeline, dtype)
    shared_methods: list[SharedMethod] = []
    stand_ins: dict[str, Any] = dict(cached_tokenizers(pipeline.components))
    for name, module in modules.items():
        stand_ins[name], methods = stand_in_for(name, module, spec, device, vae_cast if name == "vae" else None)
        shared_methods.extend(methods.values())
    controls = ControlNets(spec, nets, device, dtype) if nets else None
    shared_methods += controls.shared_methods if controls else []
    modules |= dict({id(net): (name, net) for name, net in nets.items()}.values())  # one of several controls once
    adapters = ModelAdapters({method.component: method.adapters for method in shared_methods})
    refiner = None if refining is None else make_refiner(spec, refining, pipeline, stand_ins, device)
    for part in (refiner, scorer, redux):
        if part is not None:  # its modules have no adapters
            shared_methods += part.shared_methods
            modules |= part.modules
    tensors = [tensor for module in modules.values() for tensor in (*module.parameters(), *module.buffers())]
    pipelines = {task: pipeline_for(task, pipeline) for task in spec.tasks}
    check_structure(spec, pipelines)
    check_syntax(spec, pipelines.values())
    schedulers = ChosenSchedulers(spec.id)
    schedulers.load(spec.named_schedulers, getattr(pipeline, "scheduler", None))
    return LoadedModel(
        spec,
        device,
        templates={task: make_template(one, stand_ins, device) for task, one in pipelines.items()},
        shared_methods=shared_methods,
        schedulers=schedulers,
        nbytes=tensors_bytes(tensors),
        adapters=adapters,
        watch=ModuleWatch(modules),
        controls=controls,
        refiner=refiner,
        scorer=scorer,
        redux=redux,
        controlled_templates=_controlled(pipelines, nets, stand_ins, device),
        decoder_pieces=decoder_pieces(modules.get("vae")),
    )


def _controlled(
    pipelines: Mapping[Task, Pipeline], nets: Mapping[str, Any], stand_ins: Mapping[str, Any], device: torch.device
) -> dict[Task, Pipeline]:
    """Return the template of each task that takes controls; its control net is that of no job."""
    templates, faults = {}, list[ValueError]()
    for task, pipeline in pipelines.items():
        net = next(iter(nets.values()), None)
        controlled_class = None if net is None else control_pipeline_class(pipeline, net)
        if controlled_class is not None:
            try:
                rebuilt = rebuild(pipeline, controlled_class, **as_part(net))
            except ValueError as error:  # Z-Image's first nets do not repaint
                faults.append(error)
                continue
            templates[task] = make_template(rebuilt, stand_ins, device)
    if nets and not templates:
        raise faults[0] if faults else ValueError("none of its tasks takes controls; remove them")
    for net in nets.values():
        borrow_modules(net, getattr(next(iter(pipelines.values())), "transformer", None))
    return templates
