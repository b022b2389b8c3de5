"""Which of diffusers' noise schedulers fit a model: those of a model that predicts a flow follow it, the others remove
noise. With one of the other kind a job fails, or succeeds with an image of noise."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

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
_FLOW = "FlowMatch"  # how the names of the others begin


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


@lru_cache(maxsize=256)
def folder_predicts_flow(source: str) -> bool | None:
    """Return whether the model in a folder predicts a flow; None if its files do not say."""
    try:
        config = json.loads((Path(source) / "scheduler" / "scheduler_config.json").read_text("utf-8"))
        return predicts_flow(config, str(config["_class_name"]))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None  # loading the model reports the error
