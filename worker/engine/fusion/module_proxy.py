"""Meeting points: where the greenlets of several pictures wait for each other.

A picture's pipeline sees a `Proxy` in the place of each module. Calling it parks the picture's greenlet with its
arguments; the hub runs the real module for all that fit together and resumes each with its own rows.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any

import greenlet
import torch

from worker.engine.fusion.architectures import ARCHITECTURES, DENOISERS, Kind, StackingRules
from worker.engine.fusion.batch_key import batch_key, complete, count_rows, exact_key
from worker.engine.fusion.stacking import Stacker, mapped
from worker.engine.lora.per_row import AdapterKey, RowAdapters


class Stage(IntEnum):
    """What a module does for a picture, in the order in which the hub serves those who wait.

    Encoding goes first, so that a newcomer reaches the denoiser while its companions wait there; decoding next,
    so that a finished picture leaves at once, unless it is patient.
    """

    ENCODE = 0
    DECODE = 1
    DENOISE = 2


class SharedMethod:
    """One method of one shared module, and how calls of it are fused.

    `solo_reason` says why they are not, None if they are. `cast` is the dtype that floating inputs are brought to.
    `adapters` are those attached to the module. A `lean` denoiser or decoder of pictures runs in inference mode, which
    saved 5% of a small UNet's forward on a CPU, and 12% of its VAE's.
    """

    def __init__(
        self,
        component: str,
        method: str,
        module: torch.nn.Module,
        *,
        cast: torch.dtype | None = None,
        lean: bool = False,
        adapters: RowAdapters | None = None,
    ) -> None:
        self.component = component
        self.method = method
        self.name = f"{component}.{method}"
        self.module = module
        self.cast = cast
        self.adapters = RowAdapters(module) if adapters is None else adapters
        self.architecture = type(module).__name__
        self.stage = _stage(component, method)
        self._rules = ARCHITECTURES.get(self.architecture, {}).get(method)
        self.stacker = None if self._rules is None else Stacker(self._rules)
        self.inferred = False
        self.lean = lean and (self.stage is Stage.DENOISE or method == "decode")
        self.solo_reason = None if self._rules else f"{self.architecture} has no stacking rule"
        self.compiled = False
        self._real: Callable[..., Any] = module if method == "forward" else getattr(module, method)
        parameters = inspect.signature(getattr(module, method)).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [item.name for item in parameters if item.kind in positional]
        self._defaults = {item.name: item.default for item in parameters}

    @property
    def takes_lists(self) -> bool:
        """Whether each row is an entry of a list, and may have a shape of its own."""
        if self.stacker is None:
            return False
        rules = self.stacker.rules
        return rules.arguments[rules.rows].kind is Kind.LISTED

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})"

    @property
    def unruled(self) -> bool:
        """Whether this is a denoiser of an architecture that has no rules, and that were not tried without."""
        return self.stage is Stage.DENOISE and self.stacker is None and not self.inferred and self._rules is None

    def adopt(self, rules: StackingRules) -> None:
        """Fuse by rules that were inferred, until they are refused."""
        self.stacker, self.inferred, self.solo_reason = Stacker(rules), True, None

    def compile(self, backend: str) -> None:
        """Run the module as torch compiles it, at its first calls, from now on."""
        if self.method == "forward":
            self._real = torch.compile(self.module, backend=backend)
            self.compiled = True

    def uncompile(self) -> None:
        """Run the module as it is."""
        if self.compiled:
            self._real, self.compiled = self.module, False

    def refuse(self, reason: str) -> None:
        """Run the calls of this point one by one from now on."""
        self.stacker = None
        self.solo_reason = reason

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name, without those that are at their default."""
        arguments = dict(zip(self._names, args, strict=False))
        arguments.update(kwargs)
        return {name: value for name, value in arguments.items() if value is not self._defaults.get(name, self)}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the real module."""
        if self.cast is not None:
            args = tuple(_cast(value, self.cast) for value in args)
            kwargs = {name: _cast(value, self.cast) for name, value in kwargs.items()}
        if not self.lean or self._makes_videos((*args, *kwargs.values())):
            return self._real(*args, **kwargs)
        with torch.inference_mode():
            output = self._real(*args, **kwargs)
        return _plain(output)

    def _makes_videos(self, given: tuple[Any, ...]) -> bool:
        """Tell whether latents [rows, channels, frames, height, width] are decoded: frames are not held twice."""
        return self.stage is Stage.DECODE and any(isinstance(value, torch.Tensor) and value.ndim > 4 for value in given)


def _stage(component: str, method: str) -> Stage:
    if component in DENOISERS:
        return Stage.DENOISE
    return Stage.DECODE if method == "decode" or component == "safety_checker" else Stage.ENCODE


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _plain(tree: Any) -> Any:
    """Return a copy that pipelines may change in place, as they may not with what inference mode made."""
    return mapped(tree, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


class ParkedCall:
    """A parked call: the arguments as the pipeline gave them, how many rows they are, whom they fit with.

    `since_s` is `time.monotonic()` of when it was parked.
    """

    def __init__(self, point: SharedMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.shared_method = point
        self.args = args
        self.kwargs = kwargs
        self.autocast: tuple[str, torch.dtype] | None = None
        self.adapter: AdapterKey = ()
        self.preview = False
        self.since_s = time.monotonic()
        self.rows = 1
        self.arguments: dict[str, Any] = {}
        self.batch_key: Hashable = (id(point), id(self))
        self.read_rules()

    def read_rules(self) -> None:
        """Work out, by the rules of its point, how many rows the call has and whom it fits with."""
        stacker = self.shared_method.stacker
        if stacker is not None:
            self.arguments = complete(stacker.rules, self.shared_method.named(self.args, self.kwargs))
            self.rows = count_rows(stacker.rules, self.arguments)
            self.batch_key = (id(self.shared_method), batch_key(stacker.rules, self.arguments), self.autocast)

    @property
    def exact_batch_key(self) -> Hashable:
        """Equal for calls that may share a forward whose rows come out the same to the last bit."""
        exact = (
            None if self.shared_method.stacker is None else exact_key(self.shared_method.stacker.rules, self.arguments)
        )
        return (self.batch_key, self.rows, exact)

    def wear(self, adapter: AdapterKey) -> None:
        """Have the rows take the adapters of a picture, as far as they change this module."""
        adapters = self.shared_method.adapters
        if adapters.changed_by(adapter):
            self.adapter = adapter
            if not adapters.per_row:
                self.batch_key = (self.batch_key, adapter)

    def finite(self) -> torch.Tensor:
        """Return, on its device, whether the first tensor of the call holds finite values alone."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, torch.Tensor):
                return torch.isfinite(value).all()
        return torch.tensor(True)

    def run(self) -> Any:
        """Run this call by itself, exactly as the pipeline made it."""
        return self.shared_method.run(*self.args, **self.kwargs)


def _meet(point: SharedMethod, *args: Any, **kwargs: Any) -> Any:
    hub = greenlet.getcurrent().parent
    if hub is None:  # not inside a picture: nobody to meet
        return point.run(*args, **kwargs)
    return hub.switch(ParkedCall(point, args, kwargs))


class ModuleProxy:
    """Stands for a shared module inside one picture's pipeline.

    It passes for the module's class, gives out its attributes, meets the others at its methods, and does not let
    a pipeline move, cast or reset what others use. `dtype` is what pipelines take for the module's.
    """

    def __init__(
        self, module: torch.nn.Module, points: Mapping[str, SharedMethod], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._module = module
        self.device = device
        self.dtype = dtype
        if hasattr(module, "config"):  # pipelines ask for it at each step
            self.config = module.config
        for name, point in points.items():
            setattr(self, name, partial(_meet, point))

    @property  # type: ignore[misc]  # isinstance() asks for it
    def __class__(self) -> type:
        return type(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def modules(self) -> Iterator[torch.nn.Module]:
        """Show none: pipelines walk them to find hooks and adapters, which are the engine's affair."""
        return iter(())

    def to(self, *_args: Any, **_kwargs: Any) -> ModuleProxy:
        return self

    half = float = cpu = cuda = eval = train = requires_grad_ = to

    @contextmanager
    def cache_context(self, _name: str, **_facts: Any) -> Iterator[None]:
        """Do nothing: caches between steps assume one caller."""
        yield

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        del recurse


METHODS = ("forward", "encode", "decode")


def shared_methods_of(
    component: str, module: torch.nn.Module, *, cast: torch.dtype | None = None, lean: bool = False
) -> dict[str, SharedMethod]:
    """Return the meeting points of a module: its forward, and encode and decode where it has them."""
    methods = [method for method in METHODS if hasattr(module, method)]
    adapters = RowAdapters(module)
    return {
        method: SharedMethod(component, method, module, cast=cast, lean=lean, adapters=adapters) for method in methods
    }
