"""Control nets, T2I-Adapters among them: modules that turn a control image into tensors for the denoiser. They are
loaded with their model.

A job with controls runs diffusers' control pipeline, built of the modules of its task's pipeline; its control nets are
module proxies, so that rows with different control images and scales share their forwards.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.controlnets.controlnet_z_image import SEQ_MULTI_OF
from PIL import Image

from shared.architectures.family import ControlNet
from shared.architectures.registry import CONTROL_NETS, CONTROL_PIPELINES
from shared.config.controls import Control, ControlSpec
from shared.config.model_spec import ModelSpec
from worker.engine.fusion.module_proxy import ModuleProxy, SharedMethod, shared_methods_of
from worker.engine.fusion.stacking import map_tensors
from worker.engine.pipelines.clones import Pipeline, cache_signatures
from worker.engine.weights.completeness import check_tensors
from worker.engine.weights.requirements import cached_folder

# Keys of the configurations of a denoiser and its control nets that are equal if they were made for each other.
_COMMON_KEYS = ("cross_attention_dim", "joint_attention_dim")
_NETS = {net.name: net for nets in CONTROL_NETS.values() for net in nets}
_PATCH = 2  # values of latents on each side of a token of Z-Image


def control_pipeline_class(pipeline: Pipeline, net: Any) -> Any | None:
    """Return diffusers' class for the task of `pipeline` with nets like `net`, None if there is none."""
    name = (_NETS[type(net).__name__].pipelines or CONTROL_PIPELINES).get(type(pipeline).__name__)
    return None if name is None else getattr(diffusers, name)


def as_part(net: Any) -> dict[str, Any]:
    """Return a net, or the stand-in of several, under the name that control pipelines have for it."""
    part = next(one.part for one in _NETS.values() if net.__class__.__name__ in (one.name, one.several))
    return {part: net}


def load_control_nets(
    spec: ModelSpec, denoisers: Sequence[Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the control nets of a model by control; raises `ValueError` for one that does not fit its denoiser."""
    nets = [control for control in spec.control if control.kind == "controlnet"]
    if not nets:
        return {}
    known = [CONTROL_NETS.get(type(one).__name__, ()) for one in denoisers]
    if len(known) != 1 or not known[0]:
        names = " and ".join(type(one).__name__ for one in denoisers)
        raise ValueError(f"control nets are not supported with {names}; remove its controls")
    configs = {control.id: _config(control, known[0], denoisers[0]) for control in nets}
    classes = sorted({config["_class_name"] for config in configs.values()})
    if len(classes) > 1:
        raise ValueError(f"its controls are a {' and a '.join(classes)}; a model has those of one class")
    declared = _NETS[classes[0]]
    if declared.several is None and spec.limits.max_controls > 1:
        raise ValueError(f"limits.max_controls: {declared.name} takes one control of a job")
    if declared.borrowing and spec.offload != "none":
        raise ValueError(f"offload: a {declared.name} uses weights of the denoiser, which must stay on the device")
    for control in nets:
        _check_fits(control, configs[control.id], denoisers[0])
    loaded: dict[tuple[Any, ...], Any] = {}  # one that several controls use, with other modes, is loaded once
    for control in nets:
        files = (control.source, control.revision, control.variant)
        if files not in loaded:
            loaded[files] = _load(control, declared, device, dtype)
    return {control.id: loaded[control.source, control.revision, control.variant] for control in nets}


def _config(control: ControlSpec, known: Sequence[ControlNet], denoiser: Any) -> Mapping[str, Any]:
    """Return the configuration of a net; raises `ValueError` for one of another denoiser's classes, and for none."""
    folder = cached_folder(control)
    if folder is None:
        raise ValueError(f"control {control.id!r}: no control net (no config.json) at {control.source}")
    net_class: Any = getattr(diffusers, known[0].name)
    config: Mapping[str, Any] = net_class.load_config(folder, local_files_only=True)
    if config.get("_class_name") not in (names := [one.name for one in known]):
        held, needed = config.get("_class_name"), f"{type(denoiser).__name__} needs a {' or a '.join(names)}"
        raise ValueError(f"control {control.id!r}: {control.source} holds a {held}; {needed}")
    return config


def _check_fits(control: ControlSpec, config: Mapping[str, Any], denoiser: Any) -> None:
    """Raise `ValueError` for a net that was made for another denoiser of the same class."""
    for key in _COMMON_KEYS:
        own, other = config.get(key), denoiser.config.get(key)
        if None not in (own, other) and own != other:
            raise ValueError(f"control {control.id!r}: its {key} is {own}, that of the model {other}: made for another")
    modes = config.get("num_control_type") or config.get("num_mode")
    if modes and (control.mode is None or control.mode >= modes):
        raise ValueError(f"control {control.id!r}: it is a union, and needs a mode of 0 to {modes - 1}")
    if not modes and control.mode is not None:
        raise ValueError(f"control {control.id!r}: it is no union; remove its mode")
    made = config.get("adapter_type")
    if made is not None and (made == "full_adapter_xl") != (denoiser.config.down_block_types[0] == "DownBlock2D"):
        raise ValueError(f"control {control.id!r}: its adapter_type is {made}: made for another denoiser")


def _load(control: ControlSpec, declared: ControlNet, device: torch.device, dtype: torch.dtype) -> Any:
    folder, net_class = cached_folder(control), getattr(diffusers, declared.name)
    options = {"dtype": dtype, "use_safetensors": True, "variant": control.variant, "local_files_only": True}
    net = net_class.from_pretrained(folder, **options)
    check_tensors(f"control {control.id!r}", net)
    cache_signatures(net)
    return net.to(device)


def as_read(pipeline: Pipeline, images: Sequence[Image.Image]) -> list[Image.Image]:
    """Return control images as the nets of a job's pipeline read them: some T2I-Adapters read greys."""
    adapter = getattr(pipeline, "adapter", None)
    nets = getattr(adapter, "adapters", [adapter] * len(images))
    greys = [getattr(net, "config", {}).get("in_channels") == 1 for net in nets]
    return [image.convert("L") if grey else image for image, grey in zip(images, greys, strict=True)]


def modes_of(pipeline: Pipeline) -> list[int]:
    """Return the modes of the nets of a job's pipeline, if they are unions."""
    net = getattr(pipeline, "controlnet", None)
    nets = getattr(net, "nets", [net])
    return [one.mode for one in nets if isinstance(getattr(one, "mode", None), int)]


def borrow_modules(net: Any, denoiser: Any) -> None:
    """Give a net that has no embedders of its own those of its denoiser, without counting their weights as its own."""
    if not _NETS[type(net).__name__].borrowing:
        return
    type(net).from_transformer(net, denoiser)
    for held in (net._modules, net._parameters):
        borrowed = [name for name, one in held.items() if one is not None and one is getattr(denoiser, name, None)]
        for name in borrowed:
            vars(net)[name] = held.pop(name)


class ControlNets:
    """The control nets of one model, as job's pipelines use them."""

    def __init__(self, spec: ModelSpec, nets: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._nets = nets
        self._modes = {control.id: control.mode for control in spec.control}
        names = {id(net): name for name, net in nets.items()}
        of_nets = {
            name: shared_methods_of(f"controlnet.{name}", nets[name], lean=True, device=device)
            for name in names.values()
        }
        self._methods = {name: of_nets[names[id(net)]] for name, net in nets.items()}

    @property
    def shared_methods(self) -> list[SharedMethod]:
        unique = {id(methods): methods for methods in self._methods.values()}
        return [method for methods in unique.values() for method in methods.values()]

    def stand_in(self, controls: Sequence[Control]) -> Any:
        """Return what a job's pipeline uses as its control net."""
        proxies = [self._proxy(control.id, skips_zero=len(controls) == 1) for control in controls]
        if len(proxies) == 1:
            return proxies[0]
        several = _NETS[type(next(iter(self._nets.values()))).__name__].several
        return getattr(diffusers.models, str(several))(proxies)

    def _proxy(self, name: str, *, skips_zero: bool) -> "ControlProxy":
        proxy = ControlProxy(self._nets[name], self._methods[name], self._device, self._dtype)
        proxy.skips_zero, proxy.mode = skips_zero, self._modes[name]
        return proxy


class ControlProxy(ModuleProxy):
    """Stand-in for a control net in one job's pipeline.

    The scale is applied to the rows of its own call, so calls with different ones share a forward. A call with scale
    zero, as outside of the job's range of steps, runs no forward: nothing is added, unless it is one of several.
    """

    skips_zero = True
    mode: int | None = None

    def __call__(self, *args: Any, conditioning_scale: float | list[float] = 1.0, **kwargs: Any) -> Any:
        declared = _NETS[type(self._module).__name__]
        if isinstance(conditioning_scale, list):  # of a union, one for each image of its call
            (conditioning_scale,) = conditioning_scale
        if conditioning_scale == 0 and self.skips_zero:
            return declared.nothing
        if declared.borrowing:
            outputs = super().__call__(*args, conditioning_scale=conditioning_scale, **kwargs)
            return own_tokens(outputs, args[0], args[2])
        outputs = super().__call__(*args, **kwargs)
        return outputs if conditioning_scale == 1 else map_tensors(outputs, lambda rows: rows * conditioning_scale)


def own_tokens(outputs: Any, images: Sequence[torch.Tensor], captions: Sequence[torch.Tensor]) -> Any:
    """Return the outputs of a call of Z-Image's net without the padding to longer calls of its forward.

    The forward of the denoiser can have other calls, and pads to the longest of these.
    """
    longest = max(
        _padded(image[0].numel() // (_PATCH * _PATCH)) + _padded(len(caption))
        for image, caption in zip(images, captions, strict=True)
    )
    return map_tensors(outputs, lambda rows: rows[:, :longest])


def _padded(length: int) -> int:
    group = int(SEQ_MULTI_OF)
    return -(-length // group) * group
