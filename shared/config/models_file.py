"""Models file: the models of a deployment, their sources, defaults and limits.

`models.toml` has one `[[model]]` table per model; the one at the top of the repository shows every key. Unknown keys
are errors.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from shared.architectures.registry import FIXED_RATES
from shared.config.adapters import MAX_ADAPTERS, AdapterSpec
from shared.config.batch_rules import BatchRules, load_batch_rules
from shared.config.candidates import Scorer
from shared.config.checkpoints import source_hint
from shared.config.controls import MAX_CONTROLS, ControlSpec, controls_fault
from shared.config.model_facts import ModelFacts
from shared.config.models_file_faults import faults_text
from shared.config.noise_schedulers import OwnScheduler, misfit, own_scheduler
from shared.config.partial_denoising import pipeline_class, takes_part
from shared.config.refiners import TASKS, RefinerSpec, refiner_fault
from shared.config.scheduler_choices import Scheduler, choice_of, named_choice, option_faults
from shared.config.size_steps import XL_SCALE, size_step, upscale_factor, vae_scale
from shared.config.step_schedules import StepCaching
from shared.config.weight_formats import Quantization, StorageDtype, casting_fault
from shared.errors import ConfigurationError, UnknownModel
from shared.job_fields import MAX_DURATION_S, MAX_FPS, Extra, Medium, Task
from shared.signature import Mixable, denoisers_of, mixable_fields

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
PromptSyntax = Literal["plain", "weights"]
MAX_INPUT_IMAGES = 16
MAX_DEVICES = 16
USUAL_UPSCALE_FACTOR = 4  # of Stable Diffusion's upscaler
Dimension = Annotated[int, Field(ge=16, le=8192)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Defaults(_Table):
    """Defaults of request fields.

    `guidance_scale_2` is for the less noisy steps of models with two denoisers. `frames` and `duration_s`
    default to the maximum.
    """

    width: Dimension = 512
    height: Dimension = 512
    steps: Annotated[int, Field(ge=1)] = 30
    guidance_scale: Annotated[float, Field(ge=0)] = 5.0
    strength: Annotated[float, Field(gt=0, le=1)] = 0.6
    negative_prompt: str | None = None
    guidance_scale_2: Annotated[float | None, Field(ge=0)] = None
    scheduler: Scheduler = None
    frames: Annotated[int | None, Field(ge=1)] = None
    duration_s: Annotated[float | None, Field(gt=0)] = None
    fps: Annotated[int, Field(ge=1, le=MAX_FPS)] = 24
    layers: Annotated[int, Field(ge=0)] = 0
    extra: Extra = {}


class Limits(_Table):
    """Limits of request fields. `multiple_of` applies to both sides, beside what the model's files need; prompts
    are limited in characters.

    Frames are k * `frames_multiple` + 1, as a video's first frame is encoded separately. `last_image`: whether
    image-to-video requests can or must have a last image. `max_input_frames`, `_video_pixels` of a frame and
    `_video_bytes` limit the video that a job starts from; it uses at most `max_frames` of its frames. `fps` is the rate
    of all videos, where a model has one. Seconds of sounds are at most `max_duration_s`.
    """

    min_side: Dimension = 64
    max_side: Dimension = 2048
    max_pixels: Annotated[int, Field(gt=0)] = 2048 * 2048
    multiple_of: Annotated[int, Field(gt=0)] = 8
    min_steps: Annotated[int, Field(ge=1)] = 1
    max_steps: Annotated[int, Field(ge=1)] = 150
    max_guidance_scale: Annotated[float, Field(ge=0)] = 30.0
    min_frames: Annotated[int, Field(ge=1)] = 1
    max_frames: Annotated[int, Field(ge=1)] = 1
    frames_multiple: Annotated[int, Field(ge=1)] = 1
    fps: Annotated[int | None, Field(ge=1, le=MAX_FPS)] = None
    min_duration_s: Annotated[float, Field(gt=0, le=MAX_DURATION_S)] = 1.0
    max_duration_s: Annotated[float | None, Field(gt=0, le=MAX_DURATION_S)] = None
    last_image: Literal["refused", "allowed", "needed"] = "refused"
    max_layers: Annotated[int, Field(ge=0, le=32)] = 0
    max_input_images: Annotated[int, Field(ge=1, le=MAX_INPUT_IMAGES)] = 1
    max_input_frames: Annotated[int, Field(ge=1)] = 3000
    max_input_video_pixels: Annotated[int, Field(gt=0)] = 4096 * 2304
    max_input_video_bytes: Annotated[int | None, Field(gt=0)] = None
    max_images: Annotated[int, Field(ge=1, le=64)] = 8
    max_prompt_chars: Annotated[int, Field(ge=1)] = 4000
    max_sequence_length: Annotated[int, Field(ge=1)] = 512
    max_adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] = 4
    max_controls: Annotated[int, Field(ge=1, le=MAX_CONTROLS)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Limits:
        if self.min_side > self.max_side:
            raise ValueError("min_side is above max_side")
        if self.min_steps > self.max_steps:
            raise ValueError("min_steps is above max_steps")
        if self.min_frames > self.max_frames:
            raise ValueError("min_frames is above max_frames")
        if (self.min_frames - 1) % self.frames_multiple:
            raise ValueError("min_frames is not a multiple of frames_multiple plus one")
        if self.min_duration_s > (self.max_duration_s or MAX_DURATION_S):
            raise ValueError("min_duration_s is above max_duration_s")
        return self

    def allows_size(self, width: int, height: int) -> bool:
        sides = (width, height)
        valid = all(self.min_side <= side <= self.max_side and side % self.multiple_of == 0 for side in sides)
        return valid and width * height <= self.max_pixels

    def size_like(self, width: int, height: int, usual_pixels: int) -> tuple[int, int] | None:
        """Return the allowed size nearest to an image's, in its proportions; None if there is none.

        It has a quarter to four times the `usual_pixels`: with others, models fail or take too long. Sides are rounded
        down, as in diffusers.
        """
        pixels, least_side = width * height, math.ceil(self.min_side / self.multiple_of) * self.multiple_of
        scale = min(max(1.0, math.sqrt(usual_pixels / 4 / pixels)), math.sqrt(4 * usual_pixels / pixels))
        scale = min(scale, self.max_side / max(width, height), math.sqrt(self.max_pixels / pixels))
        scale = max(scale, least_side / min(width, height))
        # A side that is a multiple already is not to lose one by rounding errors.
        columns, rows = (int(side * scale / self.multiple_of + 1e-6) * self.multiple_of for side in (width, height))
        return (columns, rows) if self.allows_size(columns, rows) else None

    @property
    def most_frames(self) -> int:
        return (self.max_frames - 1) // self.frames_multiple * self.frames_multiple + 1

    def most_frames_of(self, frames: int) -> int:
        """Return the most frames of a video of `frames` that are allowed."""
        return (min(frames, self.max_frames) - 1) // self.frames_multiple * self.frames_multiple + 1

    def allows_frames(self, frames: int) -> bool:
        return self.min_frames <= frames <= self.max_frames and (frames - 1) % self.frames_multiple == 0


class References(_Table):
    """How images to edit are resized. They become tokens of the forward, so jobs with equal sizes can share one.

    The result has about `pixels` pixels and sides that are multiples of `multiple_of`, with nearly the same
    proportions. Smaller images are enlarged only with `enlarge`.
    """

    pixels: Annotated[int, Field(ge=256, le=4096 * 4096)] = 1024 * 1024
    multiple_of: Annotated[int, Field(ge=1, le=256)] = 32
    enlarge: bool = False

    def size_for(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the resized image."""
        scale = math.sqrt(self.pixels / (width * height))
        if not self.enlarge:
            scale = min(scale, 1.0)
        step, limit = self.multiple_of, max(1, self.pixels // self.multiple_of**2)
        columns, rows = (min(limit, max(1, round(side * scale / step))) for side in (width, height))
        return columns * step, rows * step


class ModelSpec(_Table):
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
    limits: Limits = Limits()
    references: References = References()
    step_cache: StepCaching = StepCaching()
    _facts: ModelFacts = PrivateAttr(ModelFacts())

    @model_validator(mode="after")
    def _is_consistent(self) -> ModelSpec:
        limits, frames, layers = self.limits, self.usual_frames, self.defaults.layers
        if not self.source and self.checkpoint is None:
            raise ValueError("source is missing: set it to a folder or a hub id")
        if self.quantization is not None and self.checkpoint is not None:
            raise ValueError("quantization excludes checkpoint: it quantizes the weights of source only")
        if limits.max_images > self.max_batch:
            raise ValueError(f"limits.max_images {limits.max_images} is above max_batch {self.max_batch}")
        if self.slice_s and not self.checkpoint_s:
            raise ValueError("slice_s needs checkpoint_s: jobs without checkpoints are not put aside")
        if self.makes_meshes and (fault := self._mesh_fault):
            raise ValueError(fault)
        if limits.max_frames == 1 and any(task.makes_video for task in self.tasks):
            raise ValueError("a video model needs limits.max_frames")
        if limits.max_duration_s is None and any(task.makes_audio for task in self.tasks):
            raise ValueError("a model of sounds needs limits.max_duration_s")
        if not limits.min_duration_s <= self.usual_duration_s <= (limits.max_duration_s or MAX_DURATION_S):
            raise ValueError(
                f"defaults.duration_s {self.usual_duration_s:g} is not limits.min_duration_s {limits.min_duration_s:g} "
                f"to limits.max_duration_s {limits.max_duration_s}"
            )
        if not limits.allows_frames(frames):
            raise ValueError(
                f"defaults.frames {frames} is not a multiple of limits.frames_multiple {limits.frames_multiple} "
                f"plus one, from limits.min_frames {limits.min_frames} to limits.max_frames {limits.max_frames}"
            )
        if unlisted := self.defaults.extra.keys() - set(self.extra):
            raise ValueError(f"defaults.extra has inputs that extra does not list: {', '.join(sorted(unlisted))}")
        if layers > limits.max_layers or (limits.max_layers and not layers):
            raise ValueError(f"defaults.layers {layers} is not 1 to limits.max_layers {limits.max_layers}")
        if self.compile and self.offload != "none":
            raise ValueError('compile needs offload = "none": offloading changes the compiled forward')
        if self.compile is True and self.adapter:
            raise ValueError('compile = true needs no adapters, which change the compiled forward; use "blocks"')
        if self.compile is True and self.prompt_syntax == "weights":
            raise ValueError(
                'compile = true needs prompt_syntax = "plain", as new lengths would be compiled: use "blocks"'
            )
        if self.quantization is not None and (self.offload != "none" or self.compile):
            raise ValueError('quantization needs offload = "none" and compile = false: it is not tested with them')
        if self.layerwise_casting and (fault := casting_fault(self.quantization, self.offload, self.compile)):
            raise ValueError(f"layerwise_casting {fault}")
        if self.devices > 1 and (excluding := self._keys_without_devices):
            raise ValueError(f"devices = {self.devices} excludes {', '.join(excluding)}: remove it, or set devices = 1")
        if duplicates := _duplicates([adapter.id for adapter in self.adapter]):
            raise ValueError(f"duplicate adapter ids: {duplicates}")
        if fault := controls_fault(self.control, as_loaded=not self.compile and self.quantization is None):
            raise ValueError(fault)
        if self.refiner is not None and (fault := refiner_fault(self)):
            raise ValueError(fault)
        if self.scorer is not None and not any(task.medium is Medium.IMAGE for task in self.tasks):
            raise ValueError("scorer: none of its tasks makes images; remove it")
        return self

    @property
    def makes_meshes(self) -> bool:
        return any(task.makes_mesh for task in self.tasks)

    @property
    def upscales(self) -> bool:
        """Whether it is an upscaler, whose pipelines do nothing else."""
        return Task.UPSCALE in self.tasks

    @property
    def _mesh_fault(self) -> str | None:
        """What a model of meshes, which is no diffusers folder, cannot have."""
        if len(self.tasks) > 1:
            return "tasks: a model of meshes does image_to_mesh only"
        used = {
            "checkpoint": self.checkpoint is not None,
            "vae": self.vae is not None,
            "quantization": self.quantization is not None,
            "layerwise_casting": self.layerwise_casting is not None,
            "offload": self.offload != "none",
            "devices": self.devices > 1,
            "control": bool(self.control),
            "adapter": bool(self.adapter),
            "schedulers": bool(self.schedulers),
            "defaults.scheduler": self.defaults.scheduler is not None,
            "prompt_syntax": self.prompt_syntax != "plain",
        }
        return next((f"{key}: a model of meshes takes none" for key, is_used in used.items() if is_used), None)

    @property
    def _keys_without_devices(self) -> list[str]:
        """The keys in use that exclude several devices: they change weights or forwards in one process only."""
        used = {
            "adapter": bool(self.adapter),
            "control": bool(self.control),
            "compile": bool(self.compile),
            "quantization": self.quantization is not None,
            "layerwise_casting": self.layerwise_casting is not None,
            "offload": self.offload != "none",
            "checkpoint": self.checkpoint is not None,
        }
        return [key for key, is_used in used.items() if is_used]

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
    def upscale_factor(self) -> int:
        """How many times as long it makes the sides of an image; 4 if no folder says it, and no worker has loaded it.

        A worker scales the image so that the result has the size of the job.
        """
        known = upscale_factor(self.source) if self.is_folder else self._facts.upscale_factor
        return known or USUAL_UPSCALE_FACTOR

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

    def size_like(self, task: Task, width: int, height: int) -> tuple[int, int] | None:
        """Return width and height of a result that follows from an image, None for the model's default.

        An image that is upscaled gets longer sides, which the limits may not allow. An image or video that is changed
        or extended keeps its size. An image that is edited or animated gives its
        proportions, with about the default's pixels.
        """
        pixels = self.defaults.width * self.defaults.height
        if task is Task.UPSCALE:
            step = self.limits.multiple_of
            columns, rows = (side * self.upscale_factor // step * step for side in (width, height))
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


class Catalog:
    """The models of a deployment by id, and its batch rules."""

    def __init__(self, specs: tuple[ModelSpec, ...], rules: BatchRules | None = None) -> None:
        self._of_file = {spec.id: spec for spec in specs}
        self._specs = dict(self._of_file)
        self._names = {name: spec for spec in specs for name in (*spec.aliases, spec.id)}
        self._facts: dict[str, ModelFacts] = {}
        self.version = 0
        """Grows when what is known of a model changes."""
        self._rules = rules or BatchRules(schema_version=1, rules=())

    def replace(self, other: Catalog) -> bool:
        """Take over the models and rules of another one; return whether that changes anything.

        What is known of unchanged models stays.
        """
        if list(self._of_file.items()) == list(other._of_file.items()) and self._rules == other._rules:
            return False
        changed, facts = self.changed_in(other), self._facts
        self._of_file, self._rules, self._facts = other._of_file, other._rules, {}
        self._specs, self._names = dict(other._of_file), dict(other._names)
        self.version += 1
        self.learn({model: one for model, one in facts.items() if model not in changed})
        return True

    def changed_in(self, other: Catalog) -> frozenset[str]:
        """Return the models that another one lacks, or whose weights or code must be loaded anew for it."""
        return frozenset(
            model
            for model, spec in self._of_file.items()
            if model not in other._of_file or not spec.is_loaded_like(other._of_file[model])
        )

    def learn(self, facts: Mapping[str, ModelFacts]) -> None:
        """Replace what is known of models by what workers know of those that they have loaded, by id."""
        for model in {**self._facts, **facts}:
            one = facts.get(model)
            if self._facts.get(model) != one:
                of_file = self._of_file[model]
                self._specs[model] = learned = of_file if one is None else of_file.with_facts(one)
                self._names |= dict.fromkeys((*learned.aliases, model), learned)
                self.version += 1
        self._facts = dict(facts)

    def __iter__(self) -> Iterator[ModelSpec]:
        return iter(self._specs.values())

    @property
    def expected_s(self) -> dict[str, float]:
        """Return the expected GPU-seconds of one image or video by model, where the file has them."""
        return {spec.id: spec.expected_image_s for spec in self if spec.expected_image_s is not None}

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def devices(self) -> int:
        """The devices of a worker: as many as the model with the most uses."""
        return max((spec.devices for spec in self), default=1)

    def get(self, model: str) -> ModelSpec:
        """Return a model by id or alias, or raise `UnknownModel` listing all ids."""
        try:
            return self._names[model]
        except KeyError:
            known = ", ".join(sorted(self._specs))
            raise UnknownModel(f"unknown model: {model!r}; available: {known}", param="model") from None

    def find(self, model: object) -> ModelSpec | None:
        """Return a model by id or alias, None for any other value."""
        return self._names.get(model) if isinstance(model, str) else None

    def id_of(self, name: str) -> str:
        """Return the id of the model that a name means; a name of none is returned as it is."""
        spec = self._names.get(name)
        return name if spec is None else spec.id

    def for_size(self, model: str, width: int, height: int) -> ModelSpec:
        """Return a model with the `max_batch` of an image size."""
        spec = self.get(model)
        max_batch = self._rules.max_batch((spec.id, spec.source), spec.max_batch, width, height)
        return spec if max_batch == spec.max_batch else spec.model_copy(update={"max_batch": max_batch})


class _File(_Table):
    model: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]


def load(path: Path, rules: Path | None = None) -> Catalog:
    """Read a models file and, if given, batch rules; `ConfigurationError` names the file and the key.

    A relative `source` that exists next to the models file is that folder.
    """
    batch_rules = None if rules is None else load_batch_rules(rules)
    document: dict[str, object] = {}
    try:
        document = tomllib.loads(path.read_text("utf-8"))
        specs = _File.model_validate(document).model
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; set FUSEQUEUE_MODELS to a models file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {faults_text(error, document)}") from error
    if duplicates := _duplicates([name for spec in specs for name in (spec.id, *spec.aliases)]):
        raise ConfigurationError(f"{path}: duplicate model ids or aliases: {duplicates}")
    if len(spread := [spec.id for spec in specs if spec.devices > 1]) > 1:
        raise ConfigurationError(f"{path}: only one model of a file can have devices above 1: {', '.join(spread)}")
    try:
        return Catalog(tuple(resolve_paths(spec, path.parent) for spec in specs), batch_rules)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _duplicates(names: list[str]) -> str:
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def _rate_of(spec: ModelSpec, source: Path) -> int | None:
    """Return the rate of all videos of a model, if it has one; raises `ValueError` for another one in its tables."""
    rate = FIXED_RATES.get(pipeline_class(str(source)) or "", spec.limits.fps)
    for name, table in (("limits", spec.limits), ("defaults", spec.defaults)):
        if rate is not None and "fps" in table.model_fields_set and table.fps != rate:
            raise ValueError(f"{name}.fps of model {spec.id!r} is {table.fps}, but its videos have {rate}")
    return rate


def resolve_paths(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return a model whose paths are relative to `folder` with absolute ones, and with what its files say of it.

    Raises `ValueError` for what does not fit its files.
    """
    update: dict[str, object] = {"adapter": tuple(adapter.resolve_path(folder) for adapter in spec.adapter)}
    update["control"] = tuple(control.resolve_path(folder) for control in spec.control)
    if spec.refiner is not None:
        update["refiner"] = spec.refiner.resolve_path(folder)
    if spec.scorer is not None:
        update["scorer"] = spec.scorer.resolve_path(folder)
    if spec.quantization is not None:
        update["quantization"] = spec.quantization.resolve_paths(folder)
    if spec.checkpoint is not None:
        update["checkpoint"] = str((folder / spec.checkpoint).resolve())
    if spec.vae is not None:
        update["vae"] = str((folder / spec.vae).resolve())
    if not spec.source:
        raise ValueError(f"model {spec.id!r} has no source: {source_hint(Path(str(update['checkpoint'])))}")
    source = (folder / spec.source).resolve()
    if source.is_file():
        raise ValueError(
            f"source of model {spec.id!r} is a file: {spec.source}; it must be a diffusers folder, beside `checkpoint`"
        )
    if source.is_dir():
        update["source"] = str(source)
        update |= spec.changes_for_step(size_step(source))
        denoisers = None if "mixed_fields" in spec.model_fields_set else denoisers_of(source)
        if denoisers is not None:
            update["mixed_fields"] = mixable_fields(denoisers, has_controls=bool(spec.control))
    resolved = spec.model_copy(update=update)
    resolved = resolved.model_copy(update=resolved.changes_for_rate(_rate_of(spec, source)))
    own = resolved.own_scheduler
    choice = choice_of(spec.defaults.scheduler, None, own.is_flow)
    if choice.values is not None:
        raise ValueError(f"defaults.scheduler of model {spec.id!r}: only requests can list steps")
    for fault in option_faults(choice, own):
        raise ValueError(f"defaults.scheduler of model {spec.id!r}: {fault}")
    return resolved
