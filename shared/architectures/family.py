"""What the class names of a model family decide.

Plain data, without torch, as the API needs it. Tests prove every entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.architectures.stacking_rules import Methods
from shared.tasks import Task


@dataclass(frozen=True)
class ControlNet:
    """The control nets of a denoiser: `nothing` is what one returns for no control.

    `several` is diffusers' class of several together; without one, a job takes one control. One that is `borrowing`
    uses embedders of its denoiser, and applies its scale inside of its forward. `pipelines` (by pipeline) have it as
    their `part`, if they are not the control pipelines of the family.
    """

    name: str
    methods: Methods
    nothing: tuple[object, ...] | None = None
    several: str | None = None
    borrowing: bool = False
    pipelines: Mapping[str, str] = field(default_factory=dict)
    part: str = "controlnet"


@dataclass(frozen=True)
class Denoiser:
    """A class of denoisers. Without stacking rules for its `methods`, inferred ones are tried."""

    methods: Methods = field(default_factory=dict)
    # Gets the latents in patches of 2 x 2, or its sides are rounded as if it did.
    packed: bool = False
    # Dim 0 of every adapted layer holds the rows of a forward, in order; `zero_cond_t` repeats them.
    adapters_per_row: bool = False
    # Rows with any control, and without, share forwards: all controls add tensors of the same shapes.
    controls_per_row: bool = False
    # diffusers has a plan that splits it over devices, and a test compares the results with those of one device. The
    # plans of LTX-Video, LTX-2 and Helios fail.
    split: bool = False
    # Its pipelines can have the states of CLIP for prompts with weights.
    weighted_prompts: bool = False
    # What the names in a checkpoint's denoiser have: those of the original code, or of diffusers.
    checkpoint_marks: tuple[str, ...] = ()
    control_net: ControlNet | None = None
    other_nets: tuple[ControlNet, ...] = ()


@dataclass(frozen=True)
class Encoder:
    """A class of text encoders, VAEs or other parts. Without stacking rules it is called once per job.

    A `divisible` VAE has a decoder that gets what it keeps between two pieces as arguments, or keeps nothing. Others,
    such as that of EasyAnimate, keep frames in their layers, which the pieces of two videos would mix.
    """

    methods: Methods = field(default_factory=dict)
    adapters_per_row: bool = False
    divisible: bool = False


class KnownCheckpoint(NamedTuple):
    """What the names in the checkpoints of some models begin with, and a repository with their configurations."""

    mark: str
    name: str
    source: str


@dataclass(frozen=True)
class Family:
    """A family of models. Names are those of diffusers' and transformers' classes.

    `siblings` do a task with the modules of another pipeline, where diffusers' automatic pipelines do not know them or
    would import all families; `control_pipelines` (by pipeline) take control nets. `denoising_parts` names pipelines
    that denoise an image in parts, `listed_images` those that take a list even of one image, `fixed_rates` those that
    make the sound of a video for one rate, and take none. `upscalers` make the sides of an image or a video so many
    times as long, by the first factor unless a job names another one. `tiled` pipelines denoise one tile after the
    other, each in all steps, and count the steps of all tiles on one progress bar.
    """

    denoisers: Mapping[str, Denoiser] = field(default_factory=dict)
    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    siblings: Mapping[tuple[str, Task], str] = field(default_factory=dict)
    control_pipelines: Mapping[str, str] = field(default_factory=dict)
    denoising_parts: frozenset[str] = frozenset()
    listed_images: frozenset[str] = frozenset()
    fixed_rates: Mapping[str, int] = field(default_factory=dict)
    upscalers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    tiled: frozenset[str] = frozenset()
    checkpoints: tuple[KnownCheckpoint, ...] = ()  # the first whose mark a file has counts
