"""A picture's own copy of a pipeline: the weights are shared, everything that a call changes is its own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from diffusers.guiders.guider_utils import BaseGuidance

Pipeline = Any  # diffusers' pipelines carry no types


class StepCounter:
    """The progress bar that a picture's pipeline is given: counts steps and tells `changed`.

    `previews` are those that wait to be handed over; `previewing` says that one is being decoded.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.step = 0
        self.total = 0
        self.previews: list[Any] = []
        self.previewing = False
        self._changed = changed

    def __call__(self, iterable: Any = None, total: int | None = None) -> Any:
        if iterable is None:
            self.total += total or 0
            return _Bar(self)
        items = list(iterable)
        self.total += len(items)
        return self._over(items)

    def _over(self, items: list[Any]) -> Iterator[Any]:
        for item in items:
            yield item
            self.advance(1)

    def advance(self, count: int) -> None:
        self.step += count
        self._changed()


class _Bar:
    """As much of tqdm as pipelines use."""

    def __init__(self, steps: StepCounter) -> None:
        self._steps = steps

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_exception: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        self._steps.advance(count)

    def set_postfix(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    set_description = refresh = close = write = set_postfix


def clone_pipeline(template: Pipeline, scheduler: Any, steps: StepCounter) -> Pipeline:
    """Return a copy of `template` whose calls leave no trace on it: scheduler and guider are its own."""
    clone = copy.copy(template)
    own = {"scheduler": _own(scheduler), "progress_bar": steps}
    if getattr(clone, "guider", None) is not None:
        own["guider"] = _own(clone.guider)
    clone.__dict__.update(own)  # not setattr, which would write the change into the shared configuration
    return clone


def _own(part: Any) -> Any:
    """Return a deep copy of a scheduler or guider; its configuration is never changed in place, and is shared.

    Tensors are cloned: torch's own deep copy of one takes ten times as long.
    """
    config = getattr(part, "_internal_dict", None)
    memo = {id(config): config}
    memo |= {id(value): value.clone() for value in vars(part).values() if isinstance(value, torch.Tensor)}
    return copy.deepcopy(part, memo)


def make_template(pipeline: Pipeline, proxies: Mapping[str, Any], device: torch.device) -> Pipeline:
    """Return a copy of `pipeline` that meets the hub at `proxies` and knows its device without a search.

    Raises `ValueError` for a guider that changes the denoiser during a step, which is not one picture's own.
    """
    guider = getattr(pipeline, "guider", None)
    if guider is not None and type(guider).cleanup_models is not BaseGuidance.cleanup_models:
        raise ValueError(
            f"its guider, {type(guider).__name__}, changes the denoiser, which jobs share; "
            "guider/guider_config.json should name another one, such as ClassifierFreeGuidance"
        )
    template = copy.copy(pipeline)
    template.__class__ = _meeting_class(pipeline.__class__, device)
    template.__dict__.update(proxies)
    if hasattr(pipeline, "maybe_convert_prompt") and not _has_tokens_in_parts(pipeline):
        template.__dict__["maybe_convert_prompt"] = _as_it_is
    return template


def _has_tokens_in_parts(pipeline: Pipeline) -> bool:
    """Return whether a tokenizer has a learned token of several vectors (textual inversion), `<token>` and `<token>_1`.

    Only then can such a prompt change. Looking for them splits every prompt into tokens once more: a fifth of what a
    picture does before its first step.
    """
    tokenizers = (part for name, part in pipeline.components.items() if name.startswith("tokenizer"))
    added = [set(getattr(tokenizer, "added_tokens_encoder", ())) for tokenizer in tokenizers]
    return any(f"{token}_1" in tokens for tokens in added for token in tokens)


def _as_it_is(prompt: Any, _tokenizer: Any) -> Any:
    return prompt


@cache
def _meeting_class(base: Any, device: torch.device) -> Any:
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        # As properties these walk every parameter at each read: 0.1 of a small batch's time.
        "_execution_device": device,
        "device": device,
        "maybe_free_model_hooks": _nothing,
    }
    if hasattr(base, "upcast_vae"):
        namespace["upcast_vae"] = _nothing
    step_kwargs = getattr(base, "prepare_extra_step_kwargs", None)
    if step_kwargs is not None and list(inspect.signature(step_kwargs).parameters) == ["self", "generator", "eta"]:
        namespace["prepare_extra_step_kwargs"] = _remembering_step_kwargs(base)
    return type(base.__name__, (base,), namespace)


def cache_signatures(module: torch.nn.Module) -> None:
    """Have the signatures of a model's attention processors at hand.

    Attention layers of diffusers ask for `inspect.signature(processor.__call__)` at each call, and working it out took
    0.02 ms a layer: what they ask about has it as an attribute. A call itself is looked up in the class, as ever.
    """
    for part in module.modules():
        processor = getattr(part, "processor", None)
        call = getattr(processor, "__call__", None)  # noqa: B004  # the method, not whether there is one
        if inspect.ismethod(call):
            vars(processor)["__call__"] = _signed(call)


def _signed(call: Callable[..., Any]) -> Callable[..., Any]:
    def signed(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    signed.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    return signed


def _nothing(_self: Any) -> None:
    """Do nothing: it would change modules that others use."""


def _remembering_step_kwargs(base: Any) -> Callable[..., dict[str, Any]]:
    """Return `prepare_extra_step_kwargs` that inspects a scheduler class's signature once, not at every call."""
    inspected: dict[type, set[str]] = {}

    def prepare(self: Any, generator: Any, eta: float) -> dict[str, Any]:
        names = inspected.get(type(self.scheduler))
        if names is None:
            names = set(base.prepare_extra_step_kwargs(self, generator, eta))
            inspected[type(self.scheduler)] = names
        values = {"generator": generator, "eta": eta}
        return {name: values[name] for name in names}

    return prepare
