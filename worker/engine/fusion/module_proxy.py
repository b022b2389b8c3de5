"""Module proxies: stand-ins for shared modules inside an image task's pipeline.

A call at a proxy parks the image task's greenlet with the arguments. The engine runs the real module once for all
parked calls with the same batch key, and resumes each greenlet with its rows of the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from shared.architectures.registry import ARCHITECTURES
from shared.architectures.stacking_rules import Kind, StackingRules
from shared.signature import DENOISERS
from worker.engine.device import send
from worker.engine.fusion.batch_key import add_substitutes, batch_key, count_rows, exact_key, holds_objects
from worker.engine.fusion.inferred_rules import MAX_GUESSES
from worker.engine.fusion.private_changes import Change, applied
from worker.engine.fusion.stacking import Stacker, map_tensors
from worker.engine.fusion.task_greenlet import current_task, park
from worker.engine.lora.per_row import AdapterKey, RowAdapters


class Stage(IntEnum):
    """What a module does for an image task, in the order in which parked calls are served.

    Encoding is first, so that a new task reaches the denoiser while its batch mates are parked there. Decoding is
    second, so that a finished image leaves at once. Control nets are before denoisers, which get their outputs.
    """

    ENCODE = 0
    DECODE = 1
    CONTROL = 2
    DENOISE = 3


class SharedMethod:
    """One method of a shared module, and how its calls are fused.

    Floating inputs are cast to `cast`, and a denoiser's inputs that are on the host, such as timesteps, are sent to
    `device`. `adapters` are those attached to the module. Without `pads`, only calls of equal lengths share a forward.
    With `lean` a denoiser or an image decoder runs in inference mode, which saved 5% of a small UNet's forward on a CPU
    and 12% of its VAE's.
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
        self.component, self.method = component, method
        self.name = f"{component}.{method}"
        self.module = module
        self.cast = cast
        self.device: torch.device | None = None
        self.adapters = RowAdapters(module) if adapters is None else adapters
        self.architecture = type(module).__name__
        self.stage = _stage(component, method)
        self.pads = True
        self.fills_lists = False  # of its arguments, for the caller
        self._rules = ARCHITECTURES.get(self.architecture, {}).get(method)
        self.use_own_rules()
        self.lean = lean and (self.stage >= Stage.CONTROL or method == "decode")
        self.compiled = False
        self._real: Callable[..., Any] = module if method == "forward" else getattr(module, method)
        self.signature = inspect.signature(getattr(module, method))
        parameters = self.signature.parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [item.name for item in parameters if item.kind in positional]
        self._defaults = {item.name: item.default for item in parameters}

    def __str__(self) -> str:
        return f"{self.name} ({self.architecture})"

    @property
    def solo_reason(self) -> str | None:
        """Why calls are not fused, None if they are."""
        return self._unfused_reason if self.stacker is None else None

    @property
    def mixes_shapes(self) -> bool:
        """Whether each row is an entry of a list and can have its own shape."""
        if self.stacker is None:
            return False
        rules = self.stacker.rules
        return rules.arguments[rules.rows].kind is Kind.LISTED

    @property
    def exact(self) -> bool:
        """Whether rows of fused forwards can be bit-identical with any other rows; inferred rules do not promise it."""
        return self.stacker is not None and self.stacker.rules.exact and not self.inferred

    @property
    def needs_inferred_rules(self) -> bool:
        """Whether this is a denoiser of an unlisted architecture that has no inferred rules, and more can be tried."""
        unlisted = self.stage is Stage.DENOISE and self._rules is None
        return unlisted and self.stacker is None and len(self.rejected_rules) < MAX_GUESSES

    def use_own_rules(self) -> None:
        """Fuse by the rules of the architecture, if it has any; otherwise others can be inferred."""
        self.stacker = None if self._rules is None else Stacker(self._rules)
        self.inferred = self.awaits_memory = False
        self.rejected_rules: list[StackingRules] = []
        inferring = ", and no two calls matched to infer one" if self.stage is Stage.DENOISE else ""
        self._unfused_reason = f"{self.architecture} has no stacking rule{inferring}"

    def await_memory(self) -> None:
        """Stop fusing until a check for which there is memory."""
        self.disable_fusing("memory was too scarce to check fused forwards; they are checked again later")
        self.awaits_memory = True

    def use_inferred(self, rules: StackingRules) -> None:
        """Fuse by inferred rules, until `reject_inferred` or `disable_fusing`."""
        self.stacker, self.inferred = Stacker(rules), True

    def reject_inferred(self, reason: str) -> None:
        """Stop fusing by the inferred rules in use, which changed a row; others can be tried."""
        if self.stacker is not None:
            self.rejected_rules.append(self.stacker.rules)
        if len(self.rejected_rules) == 1:  # the best guess says most
            stated = "has no stacking rule, and with an inferred one failed its self-check"
            self._unfused_reason = f"{self.architecture} {stated}: {reason}"
        self.stop_fusing()

    def stop_fusing(self) -> None:
        self.stacker, self.inferred = None, False

    def disable_fusing(self, reason: str) -> None:
        self.stop_fusing()
        self._unfused_reason = reason

    def replace(self, run: Callable[..., Any] | None, *, compiled: bool = True) -> None:
        """Call `run` in place of the module from now on; None for the module itself."""
        self._real, self.compiled = self.module if run is None else run, run is not None and compiled

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name, without those at their default."""
        arguments = dict(zip(self._names, args, strict=False))
        arguments.update(kwargs)
        return {name: value for name, value in arguments.items() if value is not self._defaults.get(name, self)}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.cast is not None:
            args = tuple(_cast(value, self.cast) for value in args)
            kwargs = {name: _cast(value, self.cast) for name, value in kwargs.items()}
        if self.device is not None and self.device.type != "cpu" and self.stage >= Stage.CONTROL:
            args = tuple(_send(value, self.device) for value in args)
            kwargs = {name: _send(value, self.device) for name, value in kwargs.items()}
        if not self.lean or self._decodes_video((*args, *kwargs.values())):
            return self._real(*args, **kwargs)
        with torch.inference_mode():
            output = self._real(*args, **kwargs)
        # Pipelines can change outputs in place, which inference tensors do not allow.
        return map_tensors(output, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)

    def _decodes_video(self, values: tuple[Any, ...]) -> bool:
        """Return whether latents [rows, channels, frames, height, width] are decoded: frames are not copied."""
        return self.stage is Stage.DECODE and any(
            isinstance(value, torch.Tensor) and value.ndim > 4 for value in values
        )


_DECODERS = ("safety_checker", "shape_vae", "geo_decoder", "scorer_images")
"""Components whose `forward` is what follows the denoising, or the decoding of what it predicts."""


def _stage(component: str, method: str) -> Stage:
    if component in DENOISERS:
        return Stage.DENOISE
    if component.startswith("controlnet."):
        return Stage.CONTROL
    return Stage.DECODE if method == "decode" or component in _DECODERS else Stage.ENCODE


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _send(value: Any, device: torch.device) -> Any:
    return send(value, device) if isinstance(value, torch.Tensor) and value.device.type == "cpu" else value


class ParkedCall:
    """A call that waits at a module proxy: its arguments, its number of rows, its batch key."""

    def __init__(self, shared_method: SharedMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.shared_method = shared_method
        self.args, self.kwargs = args, kwargs
        self.autocast: tuple[str, torch.dtype] | None = None
        self.adapter: AdapterKey = ()
        self.preview = False
        self.tokens: tuple[Hashable, ...] | None = None  # of a text encoder's call, once they have been read
        self.changes: Sequence[Change] = ()
        self.changes_key: Hashable = None
        self.private = False  # with changes of the module that only its own image task makes
        self.rng_state: AbstractContextManager[None] = nullcontext()  # of its image task, for a run by itself
        self._solo = False
        self.read_rules()

    def read_rules(self) -> None:
        """Read the arguments by the rules of the method, which the self-check can change."""
        stacker = self.shared_method.stacker
        self.rows, self.arguments = 1, dict[str, Any]()
        self.batch_key: Hashable = (id(self.shared_method), id(self))
        if stacker is not None:
            self.arguments = add_substitutes(stacker.rules, self.shared_method.bind(self.args, self.kwargs))
            self.rows = count_rows(stacker.rules, self.arguments)
            if not self._solo:
                key = batch_key(stacker.rules, self.arguments)
                if not self.shared_method.pads:
                    key = (key, exact_key(stacker.rules, self.arguments))
                self.batch_key = (id(self.shared_method), key, self.autocast)
        if self.adapter and not self.shared_method.adapters.per_row:
            self.batch_key = (self.batch_key, self.adapter)
        if self.changes:
            self.batch_key = (self.batch_key, self.changes_key)

    @property
    def exact(self) -> bool:
        """Whether rows of this call can be bit-identical in fused forwards; otherwise they are in solo forwards."""
        stacker = self.shared_method.stacker
        if stacker is None or self.private or not self.shared_method.exact:
            return False
        return not holds_objects(stacker.rules, self.arguments)

    @property
    def exact_batch_key(self) -> Hashable:
        """Equal for calls that can share a forward with bit-identical rows."""
        stacker = self.shared_method.stacker
        if stacker is None or not self.exact:
            return (id(self.shared_method), id(self))
        return (self.batch_key, self.rows, exact_key(stacker.rules, self.arguments))

    def set_adapter(self, adapter: AdapterKey) -> None:
        """Apply the adapters of an image task to the rows, if they change this module."""
        adapters = self.shared_method.adapters
        if adapters.changed_by(adapter):
            self.adapter = adapter
            if not adapters.per_row:
                self.batch_key = (self.batch_key, adapter)

    def set_changes(self, changes: Sequence[Change]) -> None:
        """Run with an image task's changes of the module; by itself, unless all of them are hooks without a state."""
        self.changes = [change for change in changes if change.module is self.shared_method.module]
        keys = frozenset(change.stateless_key for change in self.changes)
        if None in keys:
            self.private = True
            self.run_solo()
        elif self.changes:
            self.changes_key = keys
            self.read_rules()

    def run_solo(self) -> None:
        """Share no forward."""
        self._solo = True
        self.read_rules()

    def finite(self) -> torch.Tensor:
        """Return, as a tensor on its device, whether all values of the call's first tensor are finite."""
        tensors = (value for value in (*self.args, *self.kwargs.values()) if isinstance(value, torch.Tensor))
        return torch.isfinite(next(tensors, torch.tensor(0.0))).all()

    def run(self) -> Any:
        """Run this call by itself, with the pipeline's own arguments; lists are copied, as some modules empty them."""
        kwargs = dict(self.kwargs)
        if not self.shared_method.fills_lists:
            kwargs = {name: list(value) if type(value) is list else value for name, value in kwargs.items()}
        with applied(self.changes), self.rng_state:
            return self.shared_method.run(*self.args, **kwargs)


def _park(shared_method: SharedMethod, *args: Any, **kwargs: Any) -> Any:
    if (task := current_task()) is None:
        return shared_method.run(*args, **kwargs)
    step_cache = task.step_cache if shared_method.stage is Stage.DENOISE else None

    def compute() -> Any:
        call = ParkedCall(shared_method, args, kwargs)
        return park(call) if step_cache is None else step_cache.answer(call, park)

    if task.record is None or shared_method.stage < Stage.CONTROL:
        return compute()
    return task.record.answer(shared_method.name, compute)


def _parking(shared_method: SharedMethod) -> Callable[..., Any]:
    """Return a function that parks calls; modular pipelines read from its signature what a module takes."""
    parking = partial(_park, shared_method)
    vars(parking)["__signature__"] = shared_method.signature
    return parking


class ModuleProxy:
    """Stand-in for a shared module inside the pipeline of one image task.

    It has the module's class and attributes, parks calls of its shared methods, and ignores a pipeline's attempts to
    move, cast or reset the module. `dtype` is the dtype that pipelines see.
    """

    def __init__(
        self, module: torch.nn.Module, methods: Mapping[str, SharedMethod], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._module = module
        self.device = device
        self.dtype = dtype
        if hasattr(module, "config"):  # pipelines read it at each step
            self.config = module.config
        for name, shared_method in methods.items():
            setattr(self, name, _parking(shared_method))

    @property  # type: ignore[misc]  # isinstance() reads it
    def __class__(self) -> type:
        return type(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def modules(self) -> Iterator[torch.nn.Module]:
        """Yield nothing: pipelines search modules for hooks and adapters, which the engine manages."""
        return iter(())

    def to(self, *_args: Any, **_kwargs: Any) -> ModuleProxy:
        return self

    half = float = cpu = cuda = eval = train = requires_grad_ = to

    @contextmanager
    def cache_context(self, _name: str, **_options: Any) -> Iterator[None]:
        """Do nothing: caches between steps assume one caller."""
        yield

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        del recurse


METHODS = ("forward", "encode", "decode")


def shared_methods_of(
    component: str,
    module: torch.nn.Module,
    *,
    cast: torch.dtype | None = None,
    lean: bool = False,
    device: torch.device | None = None,
    pads: bool = True,
) -> dict[str, SharedMethod]:
    """Return the shared methods of a module: `forward`, and `encode` and `decode` where it has them."""
    adapters = RowAdapters(module)
    shared_methods = {
        method: SharedMethod(component, method, module, cast=cast, lean=lean, adapters=adapters)
        for method in METHODS
        if hasattr(module, method)
    }
    for shared_method in shared_methods.values():
        shared_method.device, shared_method.pads = device, pads
    return shared_methods
