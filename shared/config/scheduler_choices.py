"""Noise schedulers as requests and models files name them: diffusers' classes, and the names that people use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from shared.config.noise_schedulers import OPTIONS, OwnScheduler, misfit

MAX_VALUES = 1000
Name = Annotated[str, Field(min_length=1, max_length=64)]
_EXCLUSIVE = ("karras", "exponential", "beta", "timesteps", "sigmas")
Spacing = Literal["leading", "linspace", "trailing"]
Values = Annotated[tuple[Annotated[float, Field(ge=0, le=1e6)], ...], Field(min_length=1, max_length=MAX_VALUES)]


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
    timesteps: Values | None = None
    sigmas: Values | None = None

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

_SUFFIXES: Mapping[str, Mapping[str, Any]] = {
    "karras": {"karras": True},
    "exponential": {"exponential": True},
    "beta": {"beta": True},
    "sgmuniform": {"spacing": "trailing"},
    "trailing": {"spacing": "trailing"},
    "normal": {},
}


def named_choice(name: str, is_flow: bool | None) -> SchedulerChoice:
    """Return what a name means, such as `DPM++ 2M Karras`, `euler_a` or `K_EULER`; others are diffusers' classes."""
    short = re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "p"))
    suffix = next((one for one in _SUFFIXES if short.endswith(one)), "")
    base = short.removesuffix(suffix).removesuffix("scheduler")
    class_name = _CLASSES.get(base) or _CLASSES.get(base.removeprefix("k"))
    if class_name is None or name in OPTIONS:
        return SchedulerChoice(name=name)
    if is_flow:
        class_name = _OF_FLOW.get(class_name, class_name)
    return SchedulerChoice(name=class_name, sde=base.endswith("sde"), **_SUFFIXES.get(suffix, {}))


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
    if class_name is None or class_name not in OPTIONS:
        return
    for option in choice.given:
        if option not in OPTIONS[class_name]:
            yield f"{class_name} has no option {option!r}"
        elif option == "shift" and own.is_flow is False:
            yield "'shift' is for models that predict a flow"
