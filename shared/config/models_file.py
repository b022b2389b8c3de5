"""The models file: which models there are, where they come from, what they allow.

A `models.toml` holds one `[[model]]` table per model; `models.toml` at the top of the repository shows every key.
Unknown keys are errors, so that a misspelt limit does not go unnoticed.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from shared.config import batch_rules
from shared.config.adapters import MOST_ADAPTERS, AdapterSpec
from shared.config.batch_rules import BatchRules
from shared.errors import ConfigurationError, UnknownModel
from shared.job import Task
from shared.signature import Mixable, denoisers_of, mixable_fields

ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
MAX_INPUT_IMAGES = 16
MAX_FPS = 120
Dimension = Annotated[int, Field(ge=16, le=8192)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Defaults(_Table):
    """What a job gets where its client is silent.

    `guidance_scale_2` is that of a second denoiser, for the less noisy steps: only models that have one name it.
    `frames` of a video are as many as the limits allow, unless told.
    """

    width: Dimension = 512
    height: Dimension = 512
    steps: Annotated[int, Field(ge=1)] = 30
    guidance_scale: Annotated[float, Field(ge=0)] = 5.0
    strength: Annotated[float, Field(gt=0, le=1)] = 0.6
    negative_prompt: str = ""
    guidance_scale_2: Annotated[float | None, Field(ge=0)] = None
    frames: Annotated[int | None, Field(ge=1)] = None
    fps: Annotated[int, Field(ge=1, le=MAX_FPS)] = 24
    layers: Annotated[int, Field(ge=0)] = 0


class Limits(_Table):
    """What a client may ask for. `multiple_of` binds both sides; prompts are counted in characters.

    Frames are a multiple of `frames_multiple` and one more, as a video's first frame is encoded by itself. `last_image`
    tells whether a video from a picture may, or must, be told its last one too.
    """

    min_side: Dimension = 64
    max_side: Dimension = 2048
    max_pixels: Annotated[int, Field(gt=0)] = 2048 * 2048
    multiple_of: Annotated[int, Field(gt=0)] = 8
    min_steps: Annotated[int, Field(ge=1)] = 1
    max_steps: Annotated[int, Field(ge=1)] = 150
    max_guidance_scale: Annotated[float, Field(ge=0)] = 30.0
    max_frames: Annotated[int, Field(ge=1)] = 1
    frames_multiple: Annotated[int, Field(ge=1)] = 1
    last_image: Literal["refused", "allowed", "needed"] = "refused"
    max_layers: Annotated[int, Field(ge=0, le=32)] = 0
    max_input_images: Annotated[int, Field(ge=1, le=MAX_INPUT_IMAGES)] = 1
    max_images: Annotated[int, Field(ge=1, le=64)] = 8
    max_prompt_chars: Annotated[int, Field(ge=1)] = 4000
    max_adapters: Annotated[int, Field(ge=1, le=MOST_ADAPTERS)] = 4

    @model_validator(mode="after")
    def _ordered(self) -> Limits:
        if self.min_side > self.max_side:
            raise ValueError("min_side is above max_side")
        if self.min_steps > self.max_steps:
            raise ValueError("min_steps is above max_steps")
        return self

    def allows_size(self, width: int, height: int) -> bool:
        sides = (width, height)
        fitting = all(self.min_side <= side <= self.max_side and side % self.multiple_of == 0 for side in sides)
        return fitting and width * height <= self.max_pixels

    @property
    def most_frames(self) -> int:
        return (self.max_frames - 1) // self.frames_multiple * self.frames_multiple + 1

    def allows_frames(self, frames: int) -> bool:
        return 1 <= frames <= self.max_frames and (frames - 1) % self.frames_multiple == 0


class References(_Table):
    """How pictures to edit are brought to a size: each becomes tokens of the forward, so that jobs whose pictures
    end up alike share one.

    A picture keeps its proportions, as far as sides that are multiples of `multiple_of` can, and has about `pixels`
    pixels; a smaller one stays smaller, unless `enlarge`.
    """

    pixels: Annotated[int, Field(ge=256, le=4096 * 4096)] = 1024 * 1024
    multiple_of: Annotated[int, Field(ge=1, le=256)] = 32
    enlarge: bool = False

    def size_for(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that a picture is brought to."""
        scale = math.sqrt(self.pixels / (width * height))
        if not self.enlarge:
            scale = min(scale, 1.0)
        step, most = self.multiple_of, max(1, self.pixels // self.multiple_of**2)
        columns, rows = (min(most, max(1, round(side * scale / step))) for side in (width, height))
        return columns * step, rows * step


class ModelSpec(_Table):
    """One model. `source` is a hub id or a folder; `window_ms` is how long a job may wait for company, counted
    from its arrival; `max_batch` bounds the rows of a fused forward. `mixed_fields` names the fields in which jobs may
    differ and be claimed together all the same; where `source` is a folder, its architecture says so unless told.
    """

    id: ModelId
    source: str
    revision: str | None = None
    variant: str | None = None
    tasks: Annotated[tuple[Task, ...], Field(min_length=1)] = (Task.TEXT_TO_IMAGE,)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    offload: Literal["none", "group"] = "none"
    compile: bool = False
    window_ms: Annotated[int, Field(ge=0, le=60_000)] = 50
    max_batch: Annotated[int, Field(ge=1, le=256)] = 8
    safety_checker: bool = True
    schedulers: tuple[str, ...] = ()
    mixed_fields: tuple[Mixable, ...] = ("adapters",)
    adapter: tuple[AdapterSpec, ...] = ()
    defaults: Defaults = Defaults()
    limits: Limits = Limits()
    references: References = References()

    @model_validator(mode="after")
    def _images_fit(self) -> ModelSpec:
        if self.limits.max_images > self.max_batch:
            raise ValueError(f"limits.max_images {self.limits.max_images} is above max_batch {self.max_batch}")
        return self

    @model_validator(mode="after")
    def _defaults_are_allowed(self) -> ModelSpec:
        frames, layers = self.usual_frames, self.defaults.layers
        if self.limits.max_frames == 1 and any(task.makes_video for task in self.tasks):
            raise ValueError("a model that makes videos needs limits.max_frames")
        if not self.limits.allows_frames(frames):
            raise ValueError(
                f"defaults.frames {frames} is not a multiple of limits.frames_multiple {self.limits.frames_multiple} "
                f"and one more, of at most limits.max_frames {self.limits.max_frames}"
            )
        if layers > self.limits.max_layers or (self.limits.max_layers and not layers):
            raise ValueError(f"defaults.layers {layers} is not 1 to limits.max_layers {self.limits.max_layers}")
        return self

    @model_validator(mode="after")
    def _can_be_compiled(self) -> ModelSpec:
        if self.compile and (self.offload != "none" or self.adapter):
            raise ValueError('compile goes with offload = "none" and without adapters: both change what a forward runs')
        return self

    @model_validator(mode="after")
    def _adapters_have_names(self) -> ModelSpec:
        names = [adapter.id for adapter in self.adapter]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"adapter ids appear twice: {', '.join(twice)}")
        return self

    @property
    def usual_frames(self) -> int:
        """Frames of a video whose client does not say how many."""
        return self.defaults.frames or self.limits.most_frames

    @property
    def is_folder(self) -> bool:
        return Path(self.source).is_absolute()


class Catalog:
    """The models of one deployment, by id, and the rules that bound their batches further."""

    def __init__(self, specs: tuple[ModelSpec, ...], rules: BatchRules | None = None) -> None:
        self._specs = {spec.id: spec for spec in specs}
        self._rules = rules or BatchRules()

    def __iter__(self) -> Iterator[ModelSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def get(self, model: str) -> ModelSpec:
        """Return the model called `model`, or raise `UnknownModel` naming those there are."""
        try:
            return self._specs[model]
        except KeyError:
            known = ", ".join(sorted(self._specs))
            raise UnknownModel(f"model {model!r} is not served here; there are: {known}", param="model") from None

    def for_size(self, model: str, width: int, height: int) -> ModelSpec:
        """Return the model as it is for pictures of a size: a batch rule may lower its `max_batch`."""
        spec = self.get(model)
        most = self._rules.cap((spec.id, spec.source), width, height, spec.max_batch)
        return spec if most == spec.max_batch else spec.model_copy(update={"max_batch": most})


class _File(_Table):
    model: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]


def load(path: Path, rules: Path | None = None) -> Catalog:
    """Read a models file, and a rules file where there is one.

    A relative `source` that exists beside the models file is taken as that folder. Raises `ConfigurationError` that
    names the file and the key.
    """
    bounds = batch_rules.load(rules)
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; set FUSEQUEUE_MODELS to a models file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    try:
        specs = _File.model_validate(tables).model
    except ValidationError as error:
        # Where a model is at fault, that there are too few of them says nothing more.
        faults = [fault for fault in error.errors() if fault["loc"] != ("model",)] or error.errors()
        raise ConfigurationError(f"{path}: {'; '.join(map(_told, faults))}") from error
    ids = [spec.id for spec in specs]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ConfigurationError(f"{path}: model ids appear twice: {', '.join(twice)}")
    try:
        return Catalog(tuple(_rooted(spec, path.parent) for spec in specs), bounds)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _told(fault: ErrorDetails) -> str:
    said = "there is no such key" if fault["type"] == "extra_forbidden" else fault["msg"]
    return f"{'.'.join(map(str, fault['loc']))}: {said}"


def _rooted(spec: ModelSpec, folder: Path) -> ModelSpec:
    adapters = tuple(adapter.rooted(folder) for adapter in spec.adapter)
    beside = (folder / spec.source).resolve()
    if not beside.is_dir():
        return spec.model_copy(update={"adapter": adapters})
    known = None if "mixed_fields" in spec.model_fields_set else denoisers_of(beside)
    mixed = spec.mixed_fields if known is None else mixable_fields(known)
    return spec.model_copy(update={"source": str(beside), "adapter": adapters, "mixed_fields": mixed})
