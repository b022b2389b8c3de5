"""Noise schedulers as requests and models files name them: diffusers' classes, and the names that people use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shared.config.noise_schedulers import FLOW_OPTION, OPTIONS, OwnScheduler, misfit

MAX_VALUES = 1000
MAX_NAME = 64
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
_EXCLUSIVE = ("karras", "exponential", "beta", "timesteps", "sigmas")
Spacing = Literal["leading", "linspace", "trailing"]
Timestep = Annotated[float, Field(strict=True, ge=0, le=1e6)]
Sigma = Annotated[float, Field(strict=True, gt=0, le=1e6)]


class SchedulerOptions(BaseModel):
    """Options of a noise scheduler.

    `sde` adds noise at each step. `timesteps` or `sigmas` are the steps themselves, from noise to image, without the
    final 0; `shift` of models that predict a flow moves them towards noise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    karras: Annotated[bool, Field(strict=True)] = False
    exponential: Annotated[bool, Field(strict=True)] = False
    beta: Annotated[bool, Field(strict=True)] = False
    sde: Annotated[bool, Field(strict=True)] = False
    shift: Annotated[float | None, Field(strict=True, gt=0, le=100)] = None
    spacing: Spacing | None = None
    timesteps: Annotated[tuple[Timestep, ...] | None, Field(min_length=1, max_length=MAX_VALUES)] = None
    sigmas: Annotated[tuple[Sigma, ...] | None, Field(min_length=1, max_length=MAX_VALUES)] = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if len(given := [name for name in _EXCLUSIVE if name in self.given]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other")
        if any(value <= following for value, following in pairwise(self.values or ())):
            raise ValueError(f"{given[0]} must become smaller from step to step")
        return self

    @property
    def values(self) -> tuple[float, ...] | None:
        """The steps, if they are listed."""
        return self.timesteps if self.timesteps is not None else self.sigmas

    @property
    def given(self) -> Mapping[str, Any]:
        """The options that are given."""
        return self.model_dump(exclude={"name"}, exclude_defaults=True)


class SchedulerChoice(SchedulerOptions):
    """A noise scheduler with options. `name` unset: the model's own."""

    name: Name | None = None

    @property
    def options(self) -> SchedulerOptions | None:
        return SchedulerOptions(**self.given) if self.given else None

    def with_options(self, options: SchedulerOptions | None) -> SchedulerChoice:
        """Return a choice with `options` in place of those that they exclude."""
        if options is None:
            return self
        excluded = _EXCLUSIVE if any(name in options.given for name in _EXCLUSIVE) else ()
        kept = {name: value for name, value in self.given.items() if name not in excluded}
        return SchedulerChoice(name=self.name, **{**kept, **options.given})


def _read(value: Any) -> Any:
    """Return a name or a choice; the error is one, not that of each form."""
    if isinstance(value, str) and not 1 <= len(value) <= MAX_NAME:
        raise PydanticCustomError("scheduler", "a name has 1 to {most} characters", {"most": MAX_NAME})
    if value is None or isinstance(value, SchedulerChoice | str):
        return value
    if not isinstance(value, dict):
        message = 'it must be a name or an object such as {"name": "euler", "karras": true}'
        raise PydanticCustomError("scheduler", "{message}", {"message": message})
    try:
        return SchedulerChoice.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        reason = "there is no such field" if first["type"] == "extra_forbidden" else first["msg"]
        reason = f"{where}{reason.removeprefix('Value error, ')}"
        raise PydanticCustomError("scheduler", "{reason}", {"reason": reason}) from None


Scheduler = Annotated[Name | SchedulerChoice | None, BeforeValidator(_read)]

_CLASSES = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "deis": "DEISMultistepScheduler",
    "dpm2": "KDPM2DiscreteScheduler",
    "dpm2a": "KDPM2AncestralDiscreteScheduler",
    "dpm2ancestral": "KDPM2AncestralDiscreteScheduler",
    "dpmpp2m": "DPMSolverMultistepScheduler",
    "dpmpp2msde": "DPMSolverMultistepScheduler",
    "dpmpp2s": "DPMSolverSinglestepScheduler",
    "dpmppsde": "DPMSolverSinglestepScheduler",
    "dpmsolvermultistep": "DPMSolverMultistepScheduler",
    "dpmsolversinglestep": "DPMSolverSinglestepScheduler",
    "euler": "EulerDiscreteScheduler",
    "eulera": "EulerAncestralDiscreteScheduler",
    "eulerancestral": "EulerAncestralDiscreteScheduler",
    "flowmatcheuler": "FlowMatchEulerDiscreteScheduler",
    "flowmatchheun": "FlowMatchHeunDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "heundiscrete": "HeunDiscreteScheduler",
    "lcm": "LCMScheduler",
    "lms": "LMSDiscreteScheduler",
    "plms": "PNDMScheduler",
    "pndm": "PNDMScheduler",
    "sasolver": "SASolverScheduler",
    "tcd": "TCDScheduler",
    "unipc": "UniPCMultistepScheduler",
}
"""By name in small letters, without spaces and signs, `+` as `p`, and without the suffixes below."""

_OF_FLOW = {
    "EulerDiscreteScheduler": "FlowMatchEulerDiscreteScheduler",
    "HeunDiscreteScheduler": "FlowMatchHeunDiscreteScheduler",
    "LCMScheduler": "FlowMatchLCMScheduler",
}
"""What the same name means for models that predict a flow."""

_OF_NOISE = frozenset({"karras", "exponential", "beta", "timesteps"})
"""Options with which diffusers' classes for both kinds compute the noise levels of a model that predicts noise."""

_SUFFIXES: Mapping[str, Mapping[str, Any]] = {
    "karras": {"karras": True},
    "exponential": {"exponential": True},
    "beta": {"beta": True},
    "sgmuniform": {"spacing": "trailing"},
    "trailing": {"spacing": "trailing"},
    "normal": {},
}


def named_choice(name: str, is_flow: bool | None) -> SchedulerChoice:
    """Return what a name means, such as `DPM++ 2M Karras`, `euler_a` or `K_EULER`; others are diffusers' classes.

    Where the kind of the model is not known, a name with two meanings stays, in its short form.
    """
    short = re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "p"))
    suffix = next((one for one in _SUFFIXES if short.endswith(one)), "")
    base = short.removesuffix(suffix).removesuffix("scheduler")
    base = base if base in _CLASSES else base.removeprefix("k")
    class_name = _CLASSES.get(base)
    if class_name is None or name in OPTIONS:
        return SchedulerChoice(name=name)
    if class_name in _OF_FLOW and is_flow is not False:
        class_name = _OF_FLOW[class_name] if is_flow else base
    return SchedulerChoice(name=class_name, sde=base.endswith("sde"), **_SUFFIXES.get(suffix, {}))


def meanings(name: str) -> frozenset[str]:
    """Return the classes that a name can mean, and itself."""
    class_name = _CLASSES.get(name, name)
    return frozenset({name, class_name, _OF_FLOW.get(class_name, name) if name in _CLASSES else name})


def choice_of(
    scheduler: str | SchedulerChoice | None, options: SchedulerOptions | None, is_flow: bool | None
) -> SchedulerChoice:
    """Return a choice with the class that it names. Options beside a name replace those of the name."""
    if isinstance(scheduler, SchedulerChoice):
        name, options = scheduler.name, scheduler.with_options(options).options
    else:
        name = scheduler
    return (SchedulerChoice() if name is None else named_choice(name, is_flow)).with_options(options)


def option_faults(choice: SchedulerChoice, own: OwnScheduler) -> Iterator[str]:
    """Yield why a choice cannot be used with a model, as far as its files say it."""
    class_name = choice.name or own.class_name
    if choice.name is not None and (reason := misfit(choice.name, own.is_flow)):
        yield reason
    if class_name is None:
        return
    for option in choice.given:
        if class_name in OPTIONS and option not in OPTIONS[class_name]:
            yield f"{class_name} has no option {option!r}"
        elif own.is_flow is False and option == "shift":
            yield "'shift' is for models that predict a flow"
        elif own.is_flow and class_name in FLOW_OPTION and option in _OF_NOISE:
            yield f"{class_name} has no option {option!r} for models that predict a flow"
        elif own.shifts_by_size and class_name in FLOW_OPTION and option == "shift":
            yield f"{class_name} has no option 'shift' for models that shift by the image's size"
