"""Pipeline clones: shared weights, and a private copy of everything that a call changes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from transformers import PreTrainedModel
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from shared.architectures.registry import TILED
from worker.engine.checkpoints.task_record import record_steps
from worker.engine.pipelines.modular import is_modular, private_blocks
from worker.engine.pipelines.noise_schedulers import avoid_waiting

Pipeline = Any  # diffusers' pipelines have no types

_CHANGED_BY_CALLS = (SchedulerMixin, BaseGuidance)


class StepCounter:
    """The progress bar of an image task's pipeline: counts steps and calls `on_change`.

    It has the part of tqdm's interface that pipelines use. A pipeline can have several loops over steps: the present
    one began at step `loop_start` and has `loop_steps`; `planned` are the steps of all loops, where that is known
    before they begin. `previews` are not yet delivered; `previewing` is True while
    one is decoded. `last_mark` is the step after which the job's candidates were compared last.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.step = 0
        self.planned = 0
        self._begun = 0
        self.loop_start = self.loop_steps = 0
        self.previews: list[Any] = []
        self.previewing = False
        self.last_mark = 0
        self._on_change = on_change

    @property
    def total(self) -> int:
        """The steps of all loops that are planned or have begun."""
        return max(self.planned, self._begun)

    def restart(self) -> None:
        """Count from 0 again: the pipeline's call is repeated."""
        self.step = self._begun = self.loop_start = self.loop_steps = 0
        self.previews.clear()

    def __call__(self, iterable: Any = None, total: int | None = None) -> Any:
        items = None if iterable is None else list(iterable)
        self.loop_start, self.loop_steps = self.step, (total or 0) if items is None else len(items)
        self._begun += self.loop_steps
        return self if items is None else self._iterate(items)

    def begin_loop(self, count: int) -> None:
        """Begin another loop of `count` steps, which the progress bar has counted before."""
        self.loop_start, self.loop_steps = self.step, count

    def _iterate(self, items: list[Any]) -> Iterator[Any]:
        for item in items:
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        self.step += count
        self._on_change()

    def __enter__(self) -> StepCounter:
        return self

    def _ignore(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    __exit__ = set_postfix = set_description = refresh = close = write = _ignore


def clone_pipeline(
    template: Pipeline, scheduler: Any, steps: StepCounter, *, timesteps_on_host: bool = True
) -> Pipeline:
    """Return a copy of `template` with its own noise schedulers and guiders; so have the pipelines inside it."""
    clone = copy.copy(template)
    own = {name: _copy_component(part) for name, part in vars(clone).items() if isinstance(part, _CHANGED_BY_CALLS)}
    own["progress_bar"] = steps
    if scheduler is not None:
        own["scheduler"] = _copy_component(scheduler)
        avoid_waiting(own["scheduler"], timesteps_on_host=timesteps_on_host)
    for part in own.values():
        if isinstance(part, SchedulerMixin):
            record_steps(part)
            if type(template).__name__ in TILED:
                _report_loops(part, steps)
    if is_modular(template):
        own["_blocks"] = private_blocks(template._blocks, steps)
    for name, inner in nested_pipelines(template).items():
        shares = inner.scheduler is template.scheduler
        own[name] = clone_pipeline(inner, inner.scheduler, steps, timesteps_on_host=timesteps_on_host)
        if shares:
            own[name].__dict__["scheduler"] = own["scheduler"]
    clone.__dict__.update(own)  # setattr would change the shared configuration
    return clone


def _report_loops(scheduler: Any, steps: StepCounter) -> None:
    """Let a noise scheduler begin a loop over steps wherever a pipeline sets its timesteps."""
    plain = scheduler.set_timesteps

    @wraps(plain)  # pipelines look for `sigmas` in its signature
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        steps.begin_loop(len(scheduler.timesteps))

    scheduler.__dict__["set_timesteps"] = set_timesteps


def nested_pipelines(pipeline: Pipeline) -> dict[str, Pipeline]:
    """Return the pipelines that a combined pipeline calls, such as Kandinsky's prior and decoder, by attribute."""
    return {name: value for name, value in vars(pipeline).items() if isinstance(value, DiffusionPipeline)}


def _copy_component(component: Any) -> Any:
    """Return a deep copy of a scheduler or guider that shares the configuration, which never changes in place.

    Tensors are cloned: torch's own deep copy of a tensor takes ten times as long.
    """
    config = getattr(component, "_internal_dict", None)
    memo = {id(config): config}
    memo |= {id(value): value.clone() for value in vars(component).values() if isinstance(value, torch.Tensor)}
    return copy.deepcopy(component, memo)


def make_template(pipeline: Pipeline, stand_ins: Mapping[str, Any], device: torch.device) -> Pipeline:
    """Return a copy of `pipeline` with `stand_ins` for its components and a constant device.

    The pipelines inside it get the same stand-ins, under their own names. Raises `ValueError` for a guider that changes
    the denoiser during a step, as image tasks share the denoiser.
    """
    for name, guider in vars(pipeline).items():
        if isinstance(guider, BaseGuidance) and type(guider).cleanup_models is not BaseGuidance.cleanup_models:
            raise ValueError(
                f"its {name}, {type(guider).__name__}, changes the denoiser, which jobs share; "
                f"name another one in {name}/guider_config.json, such as ClassifierFreeGuidance"
            )
    template = copy.copy(pipeline)
    template.__class__ = _template_class(pipeline.__class__, device)
    template.__dict__.update(stand_ins)
    own = {id(pipeline.components[name]): stand_in for name, stand_in in stand_ins.items()}
    for attribute, inner in nested_pipelines(pipeline).items():
        parts = {name: own[id(part)] for name, part in inner.components.items() if id(part) in own}
        template.__dict__[attribute] = make_template(inner, parts, device)
    if hasattr(pipeline, "maybe_convert_prompt") and not _has_multi_vector_tokens(pipeline):
        template.__dict__["maybe_convert_prompt"] = lambda prompt, _tokenizer: prompt
    return template


def _has_multi_vector_tokens(pipeline: Pipeline) -> bool:
    """Return whether a tokenizer has a learned token of several vectors (textual inversion), `<token>` and `<token>_1`.

    Only such a token changes a prompt. The pipeline tokenizes every prompt once more to find it: a fifth of the time
    before an image's first step.
    """
    tokenizers = (component for name, component in pipeline.components.items() if name.startswith("tokenizer"))
    added = [set(getattr(tokenizer, "added_tokens_encoder", ())) for tokenizer in tokenizers]
    return any(f"{token}_1" in tokens for tokens in added for token in tokens)


@cache
def _template_class(base: Any, device: torch.device) -> Any:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        # The properties walk all parameters at each read: 10% of a small batch's time.
        "_execution_device": device,
        "device": device,
        "maybe_free_model_hooks": _do_nothing,
    }
    if hasattr(base, "upcast_vae"):
        namespace["upcast_vae"] = _do_nothing
    step_kwargs = getattr(base, "prepare_extra_step_kwargs", None)
    if step_kwargs is not None and list(inspect.signature(step_kwargs).parameters) == ["self", "generator", "eta"]:
        namespace["prepare_extra_step_kwargs"] = _cached_step_kwargs(base)
    return type(base.__name__, (base,), namespace)


def _do_nothing(_self: Any) -> None:
    """Replace a method that would change shared modules."""


def _cached_step_kwargs(base: Any) -> Callable[..., dict[str, Any]]:
    """Return a `prepare_extra_step_kwargs` that inspects each scheduler class once, not at every call."""
    accepted: dict[type, set[str]] = {}

    def prepare(self: Any, generator: Any, eta: float) -> dict[str, Any]:
        names = accepted.get(type(self.scheduler))
        if names is None:
            names = accepted[type(self.scheduler)] = set(base.prepare_extra_step_kwargs(self, generator, eta))
        values = {"generator": generator, "eta": eta}
        return {name: values[name] for name in names}

    return prepare


def cache_signatures(module: torch.nn.Module) -> None:
    """Cache the signatures of a model's attention processors.

    diffusers' attention layers call `inspect.signature(processor.__call__)` at each forward, which took 0.02 ms per
    layer; an attribute of that name holds it. The call itself is looked up in the class.
    """
    for part in module.modules():
        processor = getattr(part, "processor", None)
        call = getattr(processor, "__call__", None)  # noqa: B004  # the method, not whether there is one
        if inspect.ismethod(call):
            vars(processor)["__call__"] = _with_signature(call)


def install_capturing_hooks(module: torch.nn.Module) -> None:
    """Install the hooks by which transformers collects hidden states, of a text encoder and the models inside it.

    It installs them once, at the first call that asks for states. If that is a pipeline's own call of an inner model,
    as MiniMax-H3's, they would count as a change of one image task, and the calls of others would collect nothing.
    """
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and getattr(part, "_can_record_outputs", None):
            maybe_install_capturing_hooks(part)


def _with_signature(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    wrapper.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    return wrapper
