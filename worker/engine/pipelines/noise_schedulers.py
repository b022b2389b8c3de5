"""Noise schedulers with steps that do not wait for the device.

A diffusers scheduler keeps its timesteps on the device, and reads them back to index its tables and to compare times:
DDIM waits six times in each step of each image, and meanwhile the device runs out of work. Here timesteps stay on the
host, where the tables are, and what a step copies to the device is copied without waiting.
"""

import inspect
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from worker.engine.device import send

# Checked on a pretended device. Others keep their timesteps on the device: flow matching by Euler never reads them.
TIMESTEPS_ON_HOST = frozenset(
    {
        "CMStochasticIterativeScheduler",
        "CogVideoXDDIMScheduler",
        "CogVideoXDPMScheduler",
        "DDIMInverseScheduler",
        "DDIMParallelScheduler",
        "DDIMScheduler",
        "DDPMParallelScheduler",
        "DDPMScheduler",
        "DEISMultistepScheduler",
        "DPMSolverMultistepInverseScheduler",
        "DPMSolverMultistepScheduler",
        "DPMSolverSinglestepScheduler",
        "EDMEulerScheduler",
        "EulerAncestralDiscreteScheduler",
        "EulerDiscreteScheduler",
        "FlowMatchHeunDiscreteScheduler",
        "FlowMatchLCMScheduler",
        "HeunDiscreteScheduler",
        "IPNDMScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "KDPM2DiscreteScheduler",
        "LCMScheduler",
        "PNDMScheduler",
        "SASolverScheduler",
        "TCDScheduler",
        "UnCLIPScheduler",
        "UniPCMultistepScheduler",
    }
)
# Their pipelines join the timesteps with latents, but their steps can copy noise without waiting.
TIMESTEPS_ON_DEVICE = frozenset({"SCMScheduler", "LTXEulerAncestralRFScheduler"})

# Steps that draw noise or solve equations, besides the stochastic variants of the DPM solvers. For others the mode
# would only cost: with it DDIM's step took 147 us instead of 67.
_STEPS_THAT_COPY = TIMESTEPS_ON_DEVICE | {
    "CMStochasticIterativeScheduler",
    "CogVideoXDPMScheduler",
    "DDPMParallelScheduler",
    "DDPMScheduler",
    "EulerAncestralDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "LCMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UnCLIPScheduler",
    "UniPCMultistepScheduler",
}


def allows_host(pipeline: Any) -> bool:
    """Return whether the noise scheduler of a pipeline can have its timesteps on the host."""
    return type(getattr(pipeline, "scheduler", None)).__name__ in TIMESTEPS_ON_HOST


def avoid_waiting(scheduler: Any, *, timesteps_on_host: bool = True) -> None:
    """Change a noise scheduler in place, as far as its class allows; its images stay the same."""
    own: Any = type(scheduler)
    scheduler.__class__ = _avoiding_class(own, timesteps_on_host)


@cache
def _avoiding_class(base: Any, timesteps_on_host: bool) -> Any:
    if base.__name__ not in TIMESTEPS_ON_HOST | TIMESTEPS_ON_DEVICE:
        return base
    methods = {name: _copying_ahead(base, name) for name in ("step", "add_noise") if hasattr(base, name)}
    if timesteps_on_host and base.__name__ in TIMESTEPS_ON_HOST:
        methods["set_timesteps"] = _setting_on_host(base)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**methods, **names})


def _setting_on_host(base: Any) -> Any:
    signature = inspect.signature(base.set_timesteps)

    @wraps(base.set_timesteps)  # pipelines look for `sigmas` in its signature
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments.pop("device", None)
        base.set_timesteps(*given.args, **given.kwargs)

    return set_timesteps


def _copying_ahead(base: Any, name: str) -> Any:
    @wraps(getattr(base, name))
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(base, name).__get__(self)
        if name == "step" and not _step_copies(self):
            return method(*args, **kwargs)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if device is None:
            return method(*args, **kwargs)
        with _CopyAhead(device):
            return method(*args, **kwargs)

    return run


def _step_copies(scheduler: Any) -> bool:
    stochastic = str(scheduler.config.get("algorithm_type")).startswith("sde")
    return stochastic or type(scheduler).__name__ in _STEPS_THAT_COPY


class _CopyAhead(TorchFunctionMode):
    """While entered, host tensors are sent to `device` without waiting, and single numbers stay on the host.

    A step draws noise on the host, so that a seed gives the same noise on every device. UniPC solves a small system of
    equations, in more than a hundred operations on single numbers, which the host does faster than it queues them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func is torch.Tensor.to and args[0].device.type == "cpu" and _target(args[1:], kwargs) == self._device:
            tensor, *others = args
            dtypes = (value for value in others if isinstance(value, torch.dtype))
            tensor = tensor.to(kwargs.get("dtype") or next(dtypes, tensor.dtype))
            return send(tensor, self._device) if tensor.ndim else tensor
        if func is torch.ones and args == ((),):
            kwargs.pop("device", None)
        return func(*args, **kwargs)


def _target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device that the arguments of `Tensor.to` name, None if they name none."""
    given = kwargs.get("device", args[0] if args else None)
    if isinstance(given, torch.Tensor):
        return given.device
    return torch.device(given) if isinstance(given, str | torch.device) else None
