"""A model in memory: the pipeline clone, the arguments and the image task of each image."""

import copy
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog
import torch

from shared.config.controls import Control
from shared.config.model_facts import ModelFacts
from shared.config.model_spec import ModelSpec
from shared.errors import InferenceFailed, JobError, ModelUnavailable, UnusableInput
from shared.job import Job
from shared.job_record import FieldWarning
from shared.tasks import OutputFormat, Task
from worker.engine.checkpoints.task_record import TaskRecord
from worker.engine.errors import text_of
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import SharedMethod, Stage
from worker.engine.fusion.private_changes import ModuleWatch
from worker.engine.fusion.rng_state import seed_globally
from worker.engine.fusion.step_caching import StepCache
from worker.engine.lora.per_row import ModelAdapters, adapter_key
from worker.engine.outputs import Audio, Latents, Mesh, Output
from worker.engine.parallel.rank_group import RankGroup
from worker.engine.pipelines.call_arguments import arguments_for, set_guidance
from worker.engine.pipelines.call_checks import check_gives_latents, check_part_has_steps, inputs_refused
from worker.engine.pipelines.call_results import LATENT, make_results
from worker.engine.pipelines.candidate_marks import add_marks
from worker.engine.pipelines.chosen_schedulers import ChosenSchedulers
from worker.engine.pipelines.clones import Pipeline, StepCounter, clone_pipeline
from worker.engine.pipelines.control_nets import ControlNets, as_part
from worker.engine.pipelines.decode_pieces import decode_limit, divide_decodes
from worker.engine.pipelines.ignored_fields import ignored_fields, rounded_sides
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.ip_adapter import ImageAdapter
from worker.engine.pipelines.latent_previews import add_previews
from worker.engine.pipelines.prompt_lengths import cut_prompts, cut_weighted_prompts
from worker.engine.pipelines.prompt_words import tokenizers_with, unused_words
from worker.engine.pipelines.redux import Redux
from worker.engine.pipelines.refiner import Refiner, check_has_step, first_part, planned_steps, second_part
from worker.engine.pipelines.scoring import Scorer
from worker.engine.pipelines.sounds import cut_to
from worker.engine.pipelines.text_cache import TextCache
from worker.engine.pipelines.weighted_prompts import with_embeddings

log = structlog.get_logger()

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
            if job.task is Task.UPSCALE_VIDEO:
                results = [replace(one, audio=inputs.audio) for one in results if isinstance(one, Output)]
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
