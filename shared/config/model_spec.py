"""A model of the models file, with what its folder says, or a worker that has loaded it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from shared.config.adapters import AdapterSpec
from shared.config.candidates import Scorer
from shared.config.controls import ControlSpec
from shared.config.model_facts import ModelFacts
from shared.config.model_spec_faults import faults_of
from shared.config.noise_schedulers import OwnScheduler, misfit, own_scheduler
from shared.config.partial_denoising import takes_part
from shared.config.refiners import TASKS, RefinerSpec
from shared.config.request_limits import Defaults, Limits, References, Table
from shared.config.scheduler_choices import choice_of, named_choice
from shared.config.size_steps import XL_SCALE, upscale_factors, vae_scale
from shared.config.step_schedules import StepCaching
from shared.config.upscaling import rounded_side, upscaled_side
from shared.config.weight_formats import Quantization, StorageDtype
from shared.signature import Mixable
from shared.tasks import Task

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
PromptSyntax = Literal["plain", "weights"]
MAX_DEVICES = 16
USUAL_UPSCALE_FACTOR = 4  # of Stable Diffusion's upscaler
USUAL_VIDEO_FACTOR = 2  # of LTX's upscalers


class ModelSpec(Table):
    """One model. `source` is a hub id or a folder; `max_batch` limits the rows of a fused forward.

    Requests can name it by one of its `aliases` too, and give inputs of its pipeline that are in `extra`. `checkpoint`
    is a file whose weights replace those of `source`, and `vae` a file or folder that replaces its VAE.
    `window_ms` is the longest time a job waits for batch mates, from its submission. `mixed_fields` are the fields of
    a job that may differ within a batch of this model; for a folder they default to those of its architecture.
    `attention` is diffusers' name of a backend. `layerwise_casting` is the dtype that holds the denoisers' weights.
    `devices` run each forward of its denoisers together. With the `prompt_syntax` of weights prompts have any length.
    `expected_image_s` are the GPU-seconds of one image or video, for autoscaling until a first job has ended.
    `checkpoint_s` are the GPU-seconds of a job that a killed worker may cost; 0: its jobs have no checkpoints.
    A batch that has run for `slice_s` is put aside for overdue jobs of other models; 0: it runs to its end.
    """

    id: Identifier
    aliases: tuple[Identifier, ...] = ()
    source: str = ""
    checkpoint: str | None = None
    vae: str | None = None
    revision: str | None = None
    variant: str | None = None
    tasks: Annotated[tuple[Task, ...], Field(min_length=1)] = (Task.TEXT_TO_IMAGE,)
    extra: tuple[str, ...] = ()
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1
    offload: Literal["none", "group"] = "none"
    compile: bool | Literal["blocks"] = False
    attention: str | None = None
    quantization: Quantization | None = None
    layerwise_casting: StorageDtype | None = None
    vae_tiling: bool = False
    vae_slicing: bool = False
    window_ms: Annotated[int, Field(ge=0, le=60_000)] = 50
    max_batch: Annotated[int, Field(ge=1, le=256)] = 8
    expected_image_s: Annotated[float | None, Field(gt=0, le=86_400)] = None
    checkpoint_s: Annotated[float, Field(ge=0)] = 20.0
    slice_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    safety_checker: bool = True
    prompt_syntax: PromptSyntax = "plain"
    schedulers: tuple[str, ...] = ()
    mixed_fields: tuple[Mixable, ...] = ("adapters",)
    adapter: tuple[AdapterSpec, ...] = ()
    control: tuple[ControlSpec, ...] = ()
    refiner: RefinerSpec | None = None
    scorer: Scorer = None
    defaults: Defaults = Defaults()
    limits: Annotated[Limits, Field(validate_default=True)] = Limits()
    references: References = References()
    step_cache: StepCaching = StepCaching()
    _facts: ModelFacts = PrivateAttr(ModelFacts())

    @field_validator("limits")
    @classmethod
    def _no_more_images_than_rows(cls, limits: Limits, info: ValidationInfo) -> Limits:
        """Lower a limit of images that the file does not set to the rows of a batch."""
        most = info.data.get("max_batch", limits.max_images)
        if "max_images" in limits.model_fields_set or limits.max_images <= most:
            return limits
        return limits.model_copy(update={"max_images": most})

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelSpec:
        if fault := next(faults_of(self), None):
            raise ValueError(fault)
        return self

    @property
    def makes_meshes(self) -> bool:
        return any(task.makes_mesh for task in self.tasks)

    @property
    def upscales(self) -> bool:
        """Whether it is an upscaler, whose pipelines do nothing else."""
        return any(task.upscales for task in self.tasks)

    @property
    def adapters_refused(self) -> str | None:
        """Why its jobs can use no uploaded adapters, None if they can."""
        if self.makes_meshes:
            return "it makes meshes"
        if self.devices > 1:
            return "it runs on several devices"
        if self.compile is True or (self.compile == "blocks" and not self.adapter):
            return 'its forwards are compiled without adapters; compile = "blocks" with a [[model.adapter]] takes them'
        return None

    @property
    def usual_frames(self) -> int:
        return self.defaults.frames or self.limits.most_frames

    @property
    def usual_duration_s(self) -> float:
        return self.defaults.duration_s or self.limits.max_duration_s or self.limits.min_duration_s

    @property
    def is_folder(self) -> bool:
        return Path(self.source).is_absolute()

    @property
    def file_names(self) -> tuple[str, ...]:
        """The names of `checkpoint`, `vae`, the refiner and the scorer; folders can have different paths on different
        machines."""
        names = [f"{key}={Path(path).name}" for key in ("checkpoint", "vae") if (path := getattr(self, key))]
        refiner = [] if self.refiner is None else [f"refiner={self.refiner.name}"]
        scorer = [] if self.scorer is None else [f"scorer={self.scorer.name}"]
        return (*names, *refiner, *scorer)

    @property
    def own_scheduler(self) -> OwnScheduler:
        """Its own noise scheduler, as far as its folder says it, or a worker that has loaded it."""
        return own_scheduler(self.source) if self.is_folder else self._facts.own_scheduler

    @property
    def named_schedulers(self) -> tuple[str, ...]:
        """The names of `schedulers` and of the default, if it has one."""
        default = choice_of(self.defaults.scheduler, None, None).name
        return self.schedulers if default in {None, *self.schedulers} else (*self.schedulers, str(default))

    @property
    def facts(self) -> ModelFacts:
        """What a worker that has loaded it knows."""
        return self._facts

    @property
    def usable_schedulers(self) -> Mapping[str, str]:
        """Those of `fitting_schedulers` that a worker can make, as far as one has loaded the model."""
        unusable = self._facts.unusable_schedulers
        return {name: class_name for name, class_name in self.fitting_schedulers.items() if name not in unusable}

    @property
    def fitting_schedulers(self) -> Mapping[str, str]:
        """Those of `schedulers` that fit what the model predicts, with the classes that they name."""
        is_flow = self.own_scheduler.is_flow
        named = {name: named_choice(name, is_flow).name or name for name in self.schedulers}
        return {name: class_name for name, class_name in named.items() if misfit(class_name, is_flow) is None}

    def takes_part(self, field: str, task: Task, *, with_nets: bool = False) -> bool:
        """Return whether it takes a field of `PARTS` for a task, as far as its folder says it."""
        return not self.is_folder or takes_part(field, Path(self.source), task, with_nets=with_nets)

    def refines(self, task: Task, *, with_nets: bool = False) -> bool:
        """Return whether it has a refiner for images of a task, as far as its folder says it."""
        return (
            self.refiner is not None and task in TASKS and self.takes_part("denoising_end", task, with_nets=with_nets)
        )

    @property
    def upscale_factors(self) -> tuple[float, ...]:
        """How many times as long it can make the sides of an image or a video, the default first; none if no folder
        says it, and no worker has loaded it."""
        if not self.upscales:
            return ()
        return upscale_factors(self.source) if self.is_folder else self._facts.upscale_factors

    @property
    def _usual_factor(self) -> float:
        """The default of the upscale factors, or what most models of its task have.

        A worker scales the image so that the result has the size of the job.
        """
        usual = USUAL_VIDEO_FACTOR if Task.UPSCALE_VIDEO in self.tasks else USUAL_UPSCALE_FACTOR
        return next(iter(self.upscale_factors), usual)

    @property
    def _source_cell(self) -> int:
        """The pixels of the side of an image or a video that one step of the result's side stands for."""
        whole = int(self._usual_factor)
        return math.lcm(self.limits.multiple_of, whole) // whole

    def rounded_side(self, side: int, factor: float | None) -> int:
        """Return the longest side up to `side` that it can make of an image or a video, by its default factor unless
        there is another one."""
        return rounded_side(side, factor or self._usual_factor, self._source_cell)

    @property
    def latent_scale(self) -> int:
        """The pixels of a side for each value of the latents' side; those of XL if no folder says it."""
        return (vae_scale(self.source) if self.is_folder else None) or XL_SCALE

    def with_facts(self, facts: ModelFacts) -> ModelSpec:
        """Return the model with what a worker that has loaded it knows; folders say the sides themselves."""
        learned = self.model_copy(update={} if self.is_folder else self.changes_for_step(facts.size_step))
        learned = learned.model_copy(update=learned.changes_for_rate(facts.fps))
        learned._facts = facts
        return learned

    def changes_for_step(self, step: int) -> dict[str, object]:
        """Return the keys that change if sides are multiples of `step` only; a default is rounded as pipelines do."""
        step = math.lcm(self.limits.multiple_of, step)
        if step == self.limits.multiple_of:
            return {}
        sides = {"width": self.defaults.width, "height": self.defaults.height}
        rounded = {name: max(step, side // step * step) for name, side in sides.items()}
        limits = self.limits.model_copy(update={"multiple_of": step})
        return {"limits": limits, "defaults": self.defaults.model_copy(update=rounded)}

    def changes_for_rate(self, fps: int | None) -> dict[str, object]:
        """Return the keys that change if all videos have the rate `fps`."""
        if fps is None:
            return {}
        return {name: getattr(self, name).model_copy(update={"fps": fps}) for name in ("limits", "defaults")}

    def size_like(self, task: Task, width: int, height: int, factor: float | None = None) -> tuple[int, int] | None:
        """Return width and height of a result that follows from an image, None for the model's default.

        One that is upscaled gets longer sides, by `factor` or the model's default, which the limits may not allow. An
        image or video that is changed or extended keeps its size. An image that is edited or animated gives its
        proportions, with about the default's pixels.
        """
        pixels = self.defaults.width * self.defaults.height
        if task.upscales:
            factor = factor or self._usual_factor
            columns, rows = (upscaled_side(side, factor, self._source_cell) for side in (width, height))
            return columns, rows
        if task.has_strength or task is Task.EXTEND_VIDEO:
            return self.limits.size_like(width, height, pixels)
        if task not in (Task.EDIT, Task.ANIMATE):
            return None
        area = References(pixels=pixels, multiple_of=self.limits.multiple_of, enlarge=True)
        size = area.size_for(width, height)
        return size if self.limits.allows_size(*size) else None

    def is_loaded_like(self, other: ModelSpec) -> bool:
        """Return whether a model that is loaded for this entry serves the other as it is."""
        if (self.named_schedulers, self.limits.max_controls) != (other.named_schedulers, other.limits.max_controls):
            return False
        return self.model_copy(update={key: getattr(other, key) for key in _OF_JOBS}) == other

    @property
    def is_on_hub(self) -> bool:
        """Whether its source, or that of a control, its refiner or its scorer, is on the hub."""
        others = (one for one in (self.refiner, self.scorer) if one is not None)
        return (
            any(not one.is_folder for one in others)
            or not self.is_folder
            or any(control.is_on_hub for control in self.control)
        )


# Keys that are read when a job is created, claimed or batched.
_OF_JOBS = ("aliases", "defaults", "limits", "window_ms", "max_batch", "expected_image_s", "checkpoint_s", "slice_s")
