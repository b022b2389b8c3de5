"""The refiner of a model: a second pipeline, which makes the last steps of an image from the latents of the first one.

Its modules are loaded with the model. The VAE is that of the model, whose latents it decodes, and so is each text
encoder that its folder lacks or has the same files of. Its denoiser is one more shared method, under its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from shared.config.model_index import is_modular, read_index
from shared.config.model_spec import ModelSpec
from shared.config.refiners import TASKS
from shared.errors import InferenceFailed
from shared.job import Job
from shared.signature import REFINER_PREFIX
from shared.tasks import OutputFormat, Task
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.lora.new_tokens import Word
from worker.engine.pipelines.chosen_schedulers import ChosenSchedulers
from worker.engine.pipelines.clones import Pipeline, StepCounter, clone_pipeline, make_template
from worker.engine.pipelines.modules import modules_of
from worker.engine.pipelines.prompt_words import tokenizers_with
from worker.engine.pipelines.stand_ins import stand_in_for
from worker.engine.pipelines.task_pipelines import call_parameters, pipeline_for
from worker.engine.pipelines.text_cache import cached_tokenizers
from worker.engine.pipelines.weighted_prompts import check_syntax
from worker.engine.weights.completeness import check_folder, check_tokenizers, check_weights
from worker.engine.weights.missing_packages import check_classes
from worker.engine.weights.requirements import cached_refiner, is_shared

_LOADER: Pipeline = DiffusionPipeline


@dataclass
class Refiner:
    """The refiner of a loaded model. `modules` are those of its own, by their names among those of the model;
    `shared_parts` are the names of the parts that are the model's."""

    template: Pipeline
    modules: Mapping[str, torch.nn.Module]
    shared_methods: Sequence[SharedMethod]
    shared_parts: Collection[str]
    schedulers: ChosenSchedulers

    def clone_for(self, job: Job, steps: StepCounter, words: Sequence[Word], *, timesteps_on_host: bool) -> Pipeline:
        """Return a pipeline clone for a job; `words` stand for embeddings of text encoders that it shares."""
        scheduler = self.schedulers.get(job.scheduler, job.scheduler_options, self.template.scheduler)
        clone = clone_pipeline(self.template, scheduler, steps, timesteps_on_host=timesteps_on_host)
        tokenizers = tokenizers_with(words, self.template)
        clone.__dict__.update({name: one for name, one in tokenizers.items() if name in self.shared_parts})
        return clone


def load_refiner(spec: ModelSpec, folder: Path, pipeline: Pipeline, options: Mapping[str, Any]) -> Pipeline | None:
    """Return the pipeline of a model's refiner with the parts that it shares with `pipeline`, which is loaded from
    `folder`; None if it has none.

    `options` are those of `from_pretrained`. Raises `ValueError` for one that does not fit the model.
    """
    if spec.refiner is None:
        return None
    source = cached_refiner(spec.refiner)
    if source is None or is_modular(source):
        raise ValueError(f"refiner: {spec.refiner.source} holds no diffusers pipeline (no model_index.json)")
    _check_base(spec, pipeline)
    index = read_index(source)
    listed = {name for name, entry in index.items() if isinstance(entry, list) and entry[-1] is not None}
    shared = {
        name: one
        for name, one in pipeline.components.items()
        if name in listed and one is not None and is_shared(name, spec, folder, source)
    }
    rest = {name: entry for name, entry in index.items() if name not in shared}
    check_folder(source, rest, {})
    check_classes(rest, {})
    loaded: Pipeline = _LOADER.from_pretrained(source, **{**options, "variant": spec.refiner.variant}, **shared)
    check_weights(loaded)
    check_tokenizers(loaded)
    refining = pipeline_for(Task.IMAGE_TO_IMAGE, loaded)
    _check_refining(refining, pipeline)
    return refining


def _check_base(spec: ModelSpec, pipeline: Pipeline) -> None:
    """Raise `ValueError` for a model that leaves no steps to a refiner."""
    for task in TASKS:
        own = pipeline_for(task, pipeline) if task in spec.tasks else pipeline
        if "denoising_end" not in call_parameters(own):
            raise ValueError(f"refiner: {type(own).__name__} leaves no steps to one; remove it")


def _check_refining(refining: Pipeline, pipeline: Pipeline) -> None:
    """Raise `ValueError` for a pipeline that does not go on from the latents of another one."""
    name = type(refining).__name__
    if "denoising_start" not in call_parameters(refining):
        raise ValueError(f"refiner: {name} does not go on from latents; use Stable Diffusion XL or its refiner")
    theirs, own = (one.unet.config.in_channels for one in (refining, pipeline))
    if theirs != own:
        raise ValueError(f"refiner: its latents have {theirs} channels, and those of the model {own}")


def make_refiner(
    spec: ModelSpec, refining: Pipeline, pipeline: Pipeline, stand_ins: Mapping[str, Any], device: torch.device
) -> Refiner:
    """Return the refiner of a model; `stand_ins` are those for the parts of the model's own `pipeline`."""
    components = pipeline.components
    shared = {name for name, one in refining.components.items() if one is not None and one is components.get(name)}
    own_stand_ins: dict[str, Any] = cached_tokenizers(refining.components)
    own_stand_ins |= {name: stand_ins[name] for name in shared if name in stand_ins}
    modules, shared_methods = {}, list[SharedMethod]()
    for part, module in modules_of(refining).items():
        if part not in shared:
            name = REFINER_PREFIX + part
            own_stand_ins[part], methods = stand_in_for(name, module, spec, device)
            shared_methods += methods.values()
            modules[name] = module
    check_syntax(spec, [refining])
    schedulers = ChosenSchedulers(spec.id)
    return Refiner(make_template(refining, own_stand_ins, device), modules, shared_methods, shared, schedulers)


def first_part(job: Job, start: float) -> Job:
    """Return the job of the model's own pipeline: the steps before `start`, up to latents."""
    return job.model_copy(update={"denoising_end": start, "output_format": OutputFormat.LATENT})


def second_part(job: Job, start: float) -> Job:
    """Return the job of the refiner: the steps from `start`, from latents and without controls."""
    update = {"denoising_start": start, "task": Task.IMAGE_TO_IMAGE, "strength": None}
    return job.model_copy(update={**update, "images": (), "controls": (), "control_images": ()})


def planned_steps(job: Job) -> int:
    """Return the steps of both parts."""
    return max(1, int(job.steps * (job.strength or 1.0)))


def check_has_step(job: Job, part: str, steps: StepCounter, *, since: int) -> None:
    """Raise `InferenceFailed` if a part has had no step since another: the image would be noise."""
    if steps.step == since:
        message = f"refiner_start: {job.refiner_start} leaves the {part} none of the {job.steps} steps; use more steps"
        others = "another share" if job.strength is None else "another share, or a higher strength"
        raise InferenceFailed(f"{message}, or {others}", param="refiner_start")
