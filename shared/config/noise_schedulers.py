"""Which of diffusers' noise schedulers fit a model: those of a model that predicts a flow follow it, the others remove
noise. With one of the other kind a job fails, or succeeds with an image of noise."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

FLOW_OPTION = frozenset(
    {
        "DEISMultistepScheduler",
        "DPMSolverMultistepInverseScheduler",
        "DPMSolverMultistepScheduler",
        "DPMSolverSinglestepScheduler",
        "SASolverScheduler",
        "UniPCMultistepScheduler",
    }
)
"""Classes that do both, by their option `use_flow_sigmas`."""

NOISE_ONLY = frozenset(
    {
        "CogVideoXDDIMScheduler",
        "CogVideoXDPMScheduler",
        "CosineDPMSolverMultistepScheduler",
        "DDIMInverseScheduler",
        "DDIMParallelScheduler",
        "DDIMScheduler",
        "DDPMParallelScheduler",
        "DDPMScheduler",
        "DPMSolverSDEScheduler",
        "EDMDPMSolverMultistepScheduler",
        "EDMEulerScheduler",
        "EulerAncestralDiscreteScheduler",
        "EulerDiscreteScheduler",
        "HeunDiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "LCMScheduler",
        "LMSDiscreteScheduler",
        "PNDMScheduler",
        "TCDScheduler",
        "UnCLIPScheduler",
    }
)
LEVELS = frozenset(
    {
        "CogVideoXDDIMScheduler",
        "CogVideoXDPMScheduler",
        "DDIMInverseScheduler",
        "DDIMParallelScheduler",
        "DDIMScheduler",
        "DDPMParallelScheduler",
        "DDPMScheduler",
        "PNDMScheduler",
    }
)
"""Classes whose steps are noise levels of the training, spaced "leading" by default; the others compute theirs."""

DISTILLED = frozenset({"LCMScheduler", "TCDScheduler"})
"""Classes whose steps are some of the few that the distilled model was trained with."""

_FLOW = "FlowMatch"  # how the names of the others begin

_SPACINGS = {"spacing"}
_SIGMAS = {"karras", "exponential", "beta"}
OPTIONS: Mapping[str, frozenset[str]] = {
    name: frozenset(options)
    for options, names in (
        ({"shift"}, ("FlowMatchHeunDiscreteScheduler",)),
        ({"timesteps", *_SPACINGS}, ("DDPMParallelScheduler", "DDPMScheduler", "LCMScheduler", "TCDScheduler")),
        ({*_SIGMAS, *_SPACINGS}, ("KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "LMSDiscreteScheduler")),
        ({"timesteps", *_SIGMAS, *_SPACINGS}, ("HeunDiscreteScheduler",)),
        ({"timesteps", "sigmas", *_SIGMAS, *_SPACINGS}, ("EulerDiscreteScheduler",)),
        ({"shift", *_SIGMAS, *_SPACINGS}, ("DEISMultistepScheduler", "SASolverScheduler", "UniPCMultistepScheduler")),
        ({"shift", "timesteps", "sde", *_SIGMAS, *_SPACINGS}, ("DPMSolverMultistepScheduler",)),
        ({"shift", "timesteps", "sde", *_SIGMAS}, ("DPMSolverSinglestepScheduler",)),
        (
            {"shift", "timesteps", "sigmas", *_SIGMAS},
            ("FlowMatchEulerDiscreteScheduler", "FlowMatchLCMScheduler"),
        ),
        (
            _SPACINGS,
            (
                "DDIMParallelScheduler",
                "DDIMScheduler",
                "EulerAncestralDiscreteScheduler",
                "PNDMScheduler",
            ),
        ),
    )
    for name in names
}
"""The options of a request that each class has; those of other classes are seen when the model is loaded."""


def predicts_flow(config: Mapping[str, Any], class_name: str) -> bool | None:
    """Return whether a model predicts a flow, by the configuration of its own scheduler; None if it does not say."""
    if class_name.startswith(_FLOW) or config.get("prediction_type") == "flow_prediction":
        return True
    return False if class_name in NOISE_ONLY | FLOW_OPTION and not config.get("use_flow_sigmas") else None


def misfit(name: str, is_flow: bool | None) -> str | None:
    """Return why scheduler `name` does not fit a model that predicts a flow, or does not; None if it can fit."""
    if is_flow and name in NOISE_ONLY:
        return f"{name} removes noise, and the model predicts a flow"
    if is_flow is False and name.startswith(_FLOW):
        return f"{name} follows a flow, and the model predicts noise"
    return None


class OwnScheduler(NamedTuple):
    """What a model's files say of its own noise scheduler; None where they do not.

    `train_steps` are the noise levels of the model's training; steps with the `spacing` "leading" are `steps_offset`
    levels higher. `distilled_steps` are those of which `DISTILLED` take some.
    """

    class_name: str | None = None
    is_flow: bool | None = None
    shifts_by_size: bool = False
    train_steps: int | None = None
    spacing: str | None = None
    steps_offset: int = 0
    distilled_steps: int = 50


def described(config: Mapping[str, Any], class_name: str) -> OwnScheduler:
    """Return what a configuration says of a model's own noise scheduler."""
    return OwnScheduler(
        class_name,
        predicts_flow(config, class_name),
        shifts_by_size=bool(config.get("use_dynamic_shifting")),
        train_steps=config.get("num_train_timesteps"),
        spacing=config.get("timestep_spacing"),
        steps_offset=config.get("steps_offset") or 0,
        distilled_steps=config.get("original_inference_steps") or 50,
    )


def most_steps(name: str | None, own: OwnScheduler, spacing: str | None = None) -> int | None:
    """Return the most steps that a scheduler has on a model: more fail. None: any, or it is not known."""
    if name in DISTILLED:
        return own.distilled_steps
    if name not in LEVELS or own.train_steps is None:
        return None
    is_leading = (spacing or own.spacing or "leading") == "leading"
    return own.train_steps - own.steps_offset if is_leading else own.train_steps


@lru_cache(maxsize=256)
def own_scheduler(source: str) -> OwnScheduler:
    """Return the noise scheduler of the model in a folder."""
    try:
        config = json.loads((Path(source) / "scheduler" / "scheduler_config.json").read_text("utf-8"))
        class_name = str(config["_class_name"])
        return described(config, class_name)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return OwnScheduler()  # loading the model reports the error
