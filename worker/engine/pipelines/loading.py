"""Loading a diffusers pipeline: its files, its parts, and the loaded model that they make."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from diffusers import DiffusionPipeline

from shared.config.model_index import CLASSIC, MODULAR, Index, index_file, is_modular, read_index
from shared.config.model_spec import ModelSpec
from shared.config.shape_folder import is_shape_folder
from shared.errors import LoadPostponed, ModelUnavailable
from shared.signature import DENOISERS
from shared.tasks import Task
from worker.engine.checkpoints.identity import model_fingerprint
from worker.engine.errors import is_out_of_memory, text_of
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.fusion.private_changes import ModuleWatch
from worker.engine.lora.per_row import ModelAdapters
from worker.engine.parallel.context_parallel import check_divisible
from worker.engine.parallel.rank_group import RankGroup
from worker.engine.pipelines.chosen_schedulers import ChosenSchedulers
from worker.engine.pipelines.clones import Pipeline, make_template
from worker.engine.pipelines.control_nets import (
    ControlNets,
    as_part,
    borrow_modules,
    control_pipeline_class,
    load_control_nets,
)
from worker.engine.pipelines.decode_pieces import decoder_pieces
from worker.engine.pipelines.extra_inputs import describe_inputs
from worker.engine.pipelines.ip_adapter import load_ip_adapter
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.model_facts import facts_of
from worker.engine.pipelines.modules import modules_of, vae_cast_of
from worker.engine.pipelines.redux import Redux, load_redux, make_redux
from worker.engine.pipelines.refiner import load_refiner, make_refiner
from worker.engine.pipelines.scoring import Scorer, load_scorer, make_scorer
from worker.engine.pipelines.shape_pipeline import ShapePipeline
from worker.engine.pipelines.stand_ins import stand_in_for
from worker.engine.pipelines.task_pipelines import check_structure, pipeline_for, rebuild
from worker.engine.pipelines.text_cache import cached_tokenizers
from worker.engine.pipelines.upscaling import check_upsampler
from worker.engine.pipelines.weighted_prompts import check_syntax
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
    _warn_of_unused(spec, model)
    model.load_started_s = started
    model.facts = facts_of(folder, model.templates.values(), model.schedulers.unusable)
    log.info("model_loaded", model=spec.id, bytes=model.nbytes, seconds=round(time.monotonic() - started, 3))
    return model


def _warn_of_unused(spec: ModelSpec, model: LoadedModel) -> None:
    """Log the keys of a model's entry that have no effect on what was loaded."""
    if "size" in spec.mixed_fields and not all(denoiser.mixes_shapes for denoiser in model.denoisers):
        log.warning("sizes_do_not_mix", model=spec.id, remedy="remove size from its mixed_fields in the models file")
    per_row = all(denoiser.adapters.per_row for denoiser in model.denoisers)
    if spec.adapter and "adapters" in spec.mixed_fields and not per_row:
        log.warning("adapters_do_not_mix", model=spec.id, remedy="set mixed_fields = [] in the models file")
    unknown = set(spec.extra) - {one.name for one in describe_inputs(model.templates)}
    if unknown:
        log.warning("extra_inputs_unknown", model=spec.id, inputs=sorted(unknown), remedy="remove them from its extra")


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
    check_upsampler(pipelines.values())
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
