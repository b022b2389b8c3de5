"""The noise schedulers that jobs choose, made from a model's own."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import diffusers
import structlog
from cachetools import LRUCache
from diffusers import SchedulerMixin

from shared.config.noise_schedulers import FLOW_OPTION, described, predicts_flow
from shared.config.scheduler_choices import SchedulerChoice, SchedulerOptions, choice_of, named_choice, option_faults
from shared.errors import InferenceFailed, ModelUnavailable

KEPT = 64
"""Schedulers of a model that are kept for the next jobs; making one takes about a millisecond."""

SHIFT_BY_SIZE_ONLY = {"DEISMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler"}
"""Classes that refuse the shift by size, which FLUX's pipelines always pass, where the model has a fixed one."""

_SIGMAS = {"karras": "use_karras_sigmas", "exponential": "use_exponential_sigmas", "beta": "use_beta_sigmas"}

log = structlog.get_logger()


class ChosenSchedulers:
    """The noise schedulers of a model by the choices of its jobs, with the errors of those that cannot be used."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.unusable: dict[str, str] = {}
        """Why those of `load` that cannot be used cannot, by name."""
        self._made: LRUCache[SchedulerChoice, Any | ModelUnavailable] = LRUCache(KEPT)

    def load(self, names: Iterable[str], own: Any) -> None:
        """Make the schedulers that requests can name; one that cannot be used is logged."""
        for name in dict.fromkeys(name for named in names for name in (named, *_without_options(named, own))):
            if isinstance(error := self._scheduler(SchedulerChoice(name=name), own), ModelUnavailable):
                remedy, reason = "remove it from `schedulers` of the model, or install what it needs", error.message
                self.unusable[name] = reason.removeprefix("scheduler: ")
                log.warning("scheduler_unusable", model=self._model, scheduler=name, reason=reason, remedy=remedy)

    def get(self, name: str | None, options: SchedulerOptions | None, own: Any) -> Any:
        """Return a job's scheduler, which is `own` if it chooses nothing, or raise why it cannot be used."""
        if name is None and options is None:
            return own
        choice = choice_of(name, options, bool(_predicts_flow(own)))
        if isinstance(scheduler := self._scheduler(choice, own), ModelUnavailable):
            raise InferenceFailed(scheduler.message, param="scheduler")
        return scheduler

    def _scheduler(self, choice: SchedulerChoice, own: Any) -> Any | ModelUnavailable:
        # The call of the pipeline gets the steps that a choice lists: schedulers for any are the same.
        listed = {"timesteps", "sigmas"} & choice.given.keys()
        key = choice.model_copy(update=dict.fromkeys(listed, (1.0,)))
        if key not in self._made:
            try:
                self._made[key] = make_scheduler(key, own)
            except ModelUnavailable as error:
                self._made[key] = error
        return self._made[key]


def _without_options(name: str, own: Any) -> Iterator[str]:
    """Yield the class that a name with options means."""
    choice = named_choice(name, bool(_predicts_flow(own)))
    if choice.given and choice.name is not None:
        yield choice.name


def unusable_options() -> dict[str, str]:
    """Return the options that no scheduler can have here, with the reasons."""
    return {} if find_spec("scipy") is not None else {"beta": "needs the package scipy"}


def _predicts_flow(own: Any) -> bool | None:
    return None if own is None else predicts_flow(own.config, type(own).__name__)


def make_scheduler(choice: SchedulerChoice, own: Any) -> Any:
    """Return the noise scheduler of a choice, otherwise configured like the model's `own`.

    Raises `ModelUnavailable` if there is no such class or option, if a package that it needs is missing, or if it does
    not fit.
    """
    if own is None:
        raise ModelUnavailable("scheduler: the model has no noise scheduler of its own", param="scheduler")
    is_flow = _predicts_flow(own)
    choice = choice_of(choice, None, bool(is_flow))  # a model that does not say it is more likely to predict noise
    name = choice.name or type(own).__name__
    scheduler_class: Any = getattr(diffusers, name, None)
    if lacking := [one for one in getattr(scheduler_class, "_backends", ()) if find_spec(one) is None]:
        raise ModelUnavailable(f"scheduler: {name} needs the package {', '.join(lacking)}", param="scheduler")
    if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, SchedulerMixin)):
        raise ModelUnavailable(f"diffusers has no scheduler {name!r}", param="scheduler")
    for fault in option_faults(choice, described(own.config, type(own).__name__)):
        raise ModelUnavailable(f"scheduler: {fault}", param="scheduler")
    accepted = inspect.signature(scheduler_class).parameters
    options = _flow_options(name, own, is_flow) | _options(choice, name, accepted)
    try:
        scheduler = scheduler_class.from_config(own.config, **options)  # type: ignore[attr-defined]
        if name in SHIFT_BY_SIZE_ONLY and not _shifts_by_size(scheduler.config):
            return _with_fixed_shift(scheduler_class).from_config(scheduler.config)
        return scheduler
    except (ImportError, TypeError, ValueError, NotImplementedError) as error:
        raise ModelUnavailable(f"scheduler: {name} cannot be used: {error}"[:400], param="scheduler") from None


def _flow_options(name: str, own: Any, is_flow: bool | None) -> dict[str, Any]:
    """Return what a class needs beside the model's own configuration to follow a flow."""
    if is_flow and name in FLOW_OPTION:
        shift = own.config.get("flow_shift", own.config.get("shift", 1.0))
        return {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": shift}
    return {"shift": own.config["flow_shift"]} if is_flow and "flow_shift" in own.config else {}


def _shifts_by_size(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_dynamic_shifting")) and config.get("time_shift_type") == "exponential"


@functools.cache
def _with_fixed_shift(scheduler_class: Any) -> Any:
    """Return the class with a `set_timesteps` that ignores the shift by size, as flow matching's own class does."""

    @functools.wraps(scheduler_class.set_timesteps)  # pipelines look at its parameters
    def set_timesteps(self: Any, *arguments: Any, mu: float | None = None, **named: Any) -> None:
        scheduler_class.set_timesteps(self, *arguments, **named)

    return type(scheduler_class.__name__, (scheduler_class,), {"set_timesteps": set_timesteps})


def _options(choice: SchedulerChoice, name: str, accepted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a class for the options of a choice; raises `ModelUnavailable` for one that it lacks."""
    options: dict[str, Any] = {}
    if sigmas := next((one for one in _SIGMAS if getattr(choice, one)), None):
        options |= {key: one == sigmas for one, key in _SIGMAS.items() if one == sigmas or key in accepted}
    if choice.sde:
        options["algorithm_type"] = "sde-dpmsolver++"
    if choice.spacing is not None:
        options["timestep_spacing"] = choice.spacing
    if choice.shift is not None:
        options["flow_shift" if "flow_shift" in accepted else "shift"] = choice.shift
        if "use_dynamic_shifting" in accepted:  # otherwise the size of the image replaces the shift
            options["use_dynamic_shifting"] = False
    for option in options:
        if option not in accepted:
            lacking = next((one for one, key in _SIGMAS.items() if key == option), option.removeprefix("timestep_"))
            raise ModelUnavailable(f"scheduler: {name} has no option {lacking!r}", param="scheduler")
    return options
