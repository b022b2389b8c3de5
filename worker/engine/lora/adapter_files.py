"""LoRA files: finding them, reading diffusers' many formats, and combining them into one low-rank update per layer.

Runs outside the engine's thread and builds no modules: while a model loads, the parameters of new modules stay empty
in the whole process. Weights that cannot be applied are an error, and those that diffusers drops a warning.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from huggingface_hub import hf_hub_download
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file

from shared.config.adapters import AdapterSpec
from shared.errors import AdapterUnavailable
from shared.inputs.adapter_check import MAX_RANK, UNSUPPORTED
from shared.signature import DENOISERS
from worker.engine.lora.traced_weights import traced, untraced, without_effect

_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
_PEFT_ALPHA = 8  # PEFT's default
_PEFT_PREFIX = "base_model.model."

State = Mapping[str, torch.Tensor]
Pace = Callable[[], None]
T = TypeVar("T")


@dataclass(frozen=True)
class LowRank:
    """Update of one layer: `up` of `down` of its input, and `bias`, are added to its output.

    `down` is [rank, in, *kernel], `up` [out, rank, *ones] including all scales, `bias` [out]. An update of the bias
    alone has neither `down` nor `up`.
    """

    down: torch.Tensor | None
    up: torch.Tensor | None
    bias: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in (self.down, self.up, self.bias) if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


Changes = Mapping[str, Mapping[str, LowRank]]  # component -> path of a layer in it -> its update


@dataclass(frozen=True)
class AdapterFile:
    """What a file changes, and what is worth a warning to whoever uses it."""

    changes: Changes
    warnings: tuple[str, ...] = ()


def locate(spec: AdapterSpec) -> Path:
    if not spec.is_local:
        if spec.weight_name is None:
            raise AdapterUnavailable(
                f"adapter {spec.id!r}: {spec.source!r} is no folder; set weight_name for a repository"
            )
        try:
            return Path(hf_hub_download(spec.source, spec.weight_name, revision=spec.revision))
        except (OSError, ValueError) as error:
            raise load_error(spec, error) from None
    source = Path(spec.source)
    if spec.weight_name is not None:
        files = [source / spec.weight_name]
    else:
        files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if len(files) != 1 or not files[0].is_file() or files[0].suffix != ".safetensors":
        held = "no safetensors file" if len(files) < 2 else "several files; name one as weight_name"
        raise AdapterUnavailable(f"adapter {spec.id!r}: {source} holds {held}")
    return files[0]


def load_error(spec: AdapterSpec, error: Exception) -> AdapterUnavailable:
    message = " ".join(str(error).split())[:400]
    if isinstance(error, KeyError):
        message = f"diffusers' reader finds no weight {message}"
    return AdapterUnavailable(f"adapter {spec.id!r} cannot be loaded from {spec.source}: {message}")


def no_pace() -> None:
    """Work without a pause."""


def _paced(items: Iterable[T], pace: Pace) -> Iterator[T]:
    """Yield the items, with a call of `pace` after the work on each."""
    for item in items:
        yield item
        pace()


def read(spec: AdapterSpec, file: Path, pipeline: Any, pace: Pace = no_pace) -> AdapterFile:
    """Read an adapter's file for the model of `pipeline`; raises `AdapterUnavailable` for unsupported weights.

    Weights that diffusers' reader leaves out are named in a warning.

    `pace` is called after the work on each layer, here and in `combine` and `move`.
    """
    try:
        weights = traced(load_file(file))
        _refuse_unsupported(weights)
        state, alphas, metadata = _read_state(weights, file, pipeline)
        warnings = tuple(_warnings(weights, state, metadata))
        state = untraced(state)
        components = sorted({name.partition(".")[0] for name in state})
        changes = {name: _component_changes(name, state, alphas, metadata, pipeline, pace) for name in components}
    except AdapterUnavailable as error:
        raise AdapterUnavailable(f"adapter {spec.id!r}: {error.message}") from None
    except Exception as error:  # diffusers' readers raise many types for a bad file
        raise load_error(spec, error) from None
    if spec.component is not None and list(changes) == ["transformer"]:
        changes = {spec.component: changes["transformer"]}
    if not any(changes.values()):
        raise AdapterUnavailable(f"adapter {spec.id!r}: {file.name} holds no LoRA weights")
    return AdapterFile(changes, tuple(f"{spec.id!r}: {warning}" for warning in warnings))


def _refuse_unsupported(names: Iterable[str]) -> None:
    for name in sorted(names):
        if any(part in name for part in UNSUPPORTED):
            raise AdapterUnavailable(f"weights such as {name} are not supported")


def _read_state(weights: State, file: Path, pipeline: Any) -> tuple[State, State, Mapping[str, Any]]:
    """Return weights, alphas and metadata, read by the pipeline's class."""
    reader = getattr(pipeline, "lora_state_dict", None)
    if reader is None:
        raise AdapterUnavailable(f"{type(pipeline).__name__} takes no LoRA")
    options = {"unet_config": pipeline.unet.config} if hasattr(pipeline, "unet") else {}
    renamed = _without_peft_prefix(weights, pipeline)
    state, *alphas, _ = reader(
        _with_alpha_of_final_layer(renamed), return_lora_metadata=True, return_alphas=True, **options
    )
    state = _with_components(state, pipeline)
    settings = _peft_settings(file) if renamed is not weights else None
    metadata = _file_metadata(file)
    if settings is not None:
        metadata = {f"{name.partition('.')[0]}.{key}": value for name in state for key, value in settings.items()}
    return state, (alphas[0] if alphas else None) or {}, metadata


def _file_metadata(file: Path) -> Mapping[str, Any]:
    """Return PEFT's configuration that diffusers writes into a file, by component and name."""
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(LORA_ADAPTER_METADATA_KEY)
    return json.loads(text) if text else {}


def _peft_settings(file: Path) -> Mapping[str, Any] | None:
    """Return PEFT's configuration beside a file that PEFT has written; None: there is none."""
    try:
        return json.loads((file.parent / "adapter_config.json").read_text("utf-8"))  # type: ignore[no-any-return]
    except FileNotFoundError:
        return None


def _denoiser(pipeline: Any) -> str:
    return next(name for name in DENOISERS if getattr(pipeline, name, None) is not None)


def _with_components(state: State, pipeline: Any) -> dict[str, torch.Tensor]:
    """Return weights with their components in their names: some of diffusers' readers leave the denoiser's out."""
    denoiser, components = _denoiser(pipeline), set(pipeline.components)  # which takes a while for each call
    roots = {name.partition(".")[0] for name in state} - components
    bare = {root for root in roots if hasattr(getattr(pipeline, denoiser), root)}
    return {f"{denoiser}.{name}" if name.partition(".")[0] in bare else name: one for name, one in state.items()}


def _without_peft_prefix(weights: State, pipeline: Any) -> State:
    """Return the weights of a file that PEFT has written with their component in place of PEFT's prefix."""
    denoiser = _denoiser(pipeline)
    if not all(name.startswith(_PEFT_PREFIX) for name in weights):
        return weights
    names = {name: name.removeprefix(_PEFT_PREFIX) for name in weights}
    roots = {name.partition(".")[0] for name in names.values()}
    if all(root in pipeline.components for root in roots):
        return {names[name]: tensor for name, tensor in weights.items()}
    if all(hasattr(getattr(pipeline, denoiser), root) for root in roots):
        return {f"{denoiser}.{names[name]}": tensor for name, tensor in weights.items()}
    return weights  # by the names of the model's authors, which diffusers reads


def _with_alpha_of_final_layer(weights: State) -> dict[str, torch.Tensor]:
    """Return weights with the alphas of FLUX' last layers multiplied in, which diffusers' reader drops."""
    result = dict(weights)
    for name in [name for name in weights if "final_layer" in name and name.endswith(".alpha")]:
        layer = name.removesuffix(".alpha")
        up, down = f"{layer}.lora_up.weight", weights.get(f"{layer}.lora_down.weight")
        if up in weights and down is not None:
            result[up] = weights[up] * (result.pop(name).item() / down.shape[0])
    return result


def _warnings(weights: State, state: State, metadata: Mapping[str, Any]) -> Iterator[str]:
    left_out = without_effect(weights, state)
    if left_out:
        yield f"{len(left_out)} of its weights, such as {left_out[0]}, are left out: diffusers' reader drops them"
    if not metadata and all(name.startswith(_PEFT_PREFIX) for name in weights):
        yield "its alpha is not known, as PEFT keeps it in adapter_config.json; the rank of each layer is used"


def _component_changes(
    component: str, state: State, alphas: State, metadata: Mapping[str, Any], pipeline: Any, pace: Pace
) -> dict[str, LowRank]:
    prefix = f"{component}."
    # A module: what a loaded model adds for `clip_skip` is none.
    flat = not isinstance(getattr(getattr(pipeline, component, None), "text_model", None), torch.nn.Module)
    weights = _to_peft_names(component, _without(prefix, state), flat)
    unknown = next((name for name in sorted(weights) if not name.endswith(_KINDS)), None)
    if unknown is not None:
        raise AdapterUnavailable(f"weights such as {prefix}{unknown} are not supported")
    # An alpha has the name of a layer or of one half of its weights.
    by_weight = {name.removesuffix(".alpha"): alpha for name, alpha in _without(prefix, alphas).items()}
    by_layer = {_layer_of(name): float(alpha) for name, alpha in _to_peft_names(component, by_weight, flat).items()}
    settings = _without(prefix, metadata)
    paths = sorted({_layer_of(name) for name in weights})
    return {path: _low_rank(path, weights, by_layer.get(path), settings) for path in _paced(paths, pace)}


def _layer_of(name: str) -> str:
    return name.rsplit(".lora_", 1)[0]


def _to_peft_names(component: str, state: Mapping[str, Any], flat: bool) -> Mapping[str, Any]:
    if not state:
        return state
    if not component.startswith("text_encoder"):
        has_peft_names = any("lora_A" in name for name in state)
        weights: Mapping[str, Any] = state if has_peft_names else convert_unet_state_dict_to_peft(state)
        return weights
    renamed: Mapping[str, Any] = convert_state_dict_to_peft(convert_state_dict_to_diffusers(state))
    if flat:  # older files name CLIP's layers with a level that no longer exists
        renamed = {name.removeprefix("text_model."): tensor for name, tensor in renamed.items()}
    return renamed


def _without(prefix: str, items: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): item for name, item in items.items() if name.startswith(prefix)}


def _low_rank(path: str, weights: State, alpha: float | None, settings: Mapping[str, Any]) -> LowRank:
    down, up = weights.get(f"{path}.lora_A.weight"), weights.get(f"{path}.lora_B.weight")
    bias = weights.get(f"{path}.lora_B.bias")
    if down is None and up is None:
        return LowRank(None, None, None if bias is None else bias.float())
    if down is None or up is None:
        raise AdapterUnavailable(f"{path} lacks one half of its weights")
    rank = down.shape[0]
    if settings:  # PEFT's configuration of the adapter
        patterns: dict[str, float] = settings.get("alpha_pattern") or {}
        alpha = patterns.get(get_pattern_key(list(patterns), path), settings.get("lora_alpha", _PEFT_ALPHA))
    scale = 1.0 if alpha is None else alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return _scaled(LowRank(down, up, bias), scale)


def _scaled(change: LowRank, scale: float) -> LowRank:
    down = None if change.down is None else change.down.float()
    up, bias = (None if tensor is None else tensor.float() * scale for tensor in (change.up, change.bias))
    return LowRank(down, up, bias)


def combine(adapters: Sequence[tuple[Changes, float]], pace: Pace = no_pace) -> Changes:
    """Return the sum of `adapters`, each multiplied by its scale; their ranks add up."""
    summands: dict[str, dict[str, list[LowRank]]] = {}
    for changes, scale in adapters:
        for component, layers in changes.items():
            for path, change in _paced(layers.items(), pace):
                summands.setdefault(component, {}).setdefault(path, []).append(_scaled(change, scale))
    return {
        component: {path: _sum(each) for path, each in _paced(layers.items(), pace)}
        for component, layers in summands.items()
    }


def _sum(changes: Sequence[LowRank]) -> LowRank:
    biases = [change.bias for change in changes if change.bias is not None]
    downs = [change.down for change in changes if change.down is not None]
    ups = [change.up for change in changes if change.up is not None]
    return LowRank(
        torch.cat(downs) if downs else None,
        torch.cat(ups, dim=1) if ups else None,
        torch.stack(biases).sum(0) if biases else None,
    )


def move(
    changes: Changes, modules: Mapping[str, torch.nn.Module], device: torch.device, pace: Pace = no_pace
) -> Changes:
    """Return `changes` on `device`, in the dtypes of a model's `modules`."""

    def moved(component: str, change: LowRank) -> LowRank:
        dtype: torch.dtype = getattr(modules[component], "dtype", torch.float32)
        down, up, bias = (
            None if tensor is None else tensor.to(device, dtype).contiguous()
            for tensor in (change.down, change.up, change.bias)
        )
        return LowRank(down, up, bias)

    return {
        name: {path: moved(name, change) for path, change in _paced(layers.items(), pace)}
        for name, layers in changes.items()
    }


def adaptable_layers(modules: Mapping[str, torch.nn.Module]) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the layers of the denoisers that adapters can change, by component and path."""
    layers = {}
    for component in DENOISERS:
        for path, layer in modules[component].named_modules() if component in modules else ():
            if isinstance(layer, torch.nn.Linear):
                layers[f"{component}.{path}"] = layer.in_features, layer.out_features
            elif isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d) and layer.groups == 1:
                layers[f"{component}.{path}"] = layer.in_channels, layer.out_channels
    return layers


def check_fit(changes: Changes, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise `AdapterUnavailable` for the first change of a layer that `modules` lack, or of another shape."""
    for component, layers in changes.items():
        module = modules.get(component)
        if module is None:
            raise AdapterUnavailable(f"it changes {component}, which the model does not have")
        for path, change in layers.items():
            _check_layer(f"{component}.{path}", change, module, path)


def check_rank(changes: Changes) -> None:
    """Raise `AdapterUnavailable` for a change of a higher rank than uploads may have: rows of a forward share its time.

    The names of an upload do not tell: diffusers' readers make low-rank weights of others too.
    """
    for component, layers in changes.items():
        for path, change in layers.items():
            if change.down is not None and change.down.shape[0] > MAX_RANK:
                rank = change.down.shape[0]
                raise AdapterUnavailable(f"its rank for {component}.{path} is {rank}; at most {MAX_RANK} is allowed")


def _check_layer(name: str, change: LowRank, module: torch.nn.Module, path: str) -> None:
    try:
        layer = module.get_submodule(path)
    except AttributeError:
        raise AdapterUnavailable(f"it changes {name}, which the model does not have") from None
    rank = 0 if change.down is None else change.down.shape[0]
    if isinstance(layer, torch.nn.Linear):
        down, up = [rank, layer.in_features], [layer.out_features, rank]
    elif isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d) and layer.groups == 1 and layer.padding_mode == "zeros":
        down = [rank, layer.in_channels, *layer.kernel_size]
        up = [layer.out_channels, rank, *(1 for _ in layer.kernel_size)]
    else:
        raise AdapterUnavailable(
            f"it changes {name}, a {type(layer).__name__}: only linear layers and convolutions can be"
        )
    for tensor, shape in ((change.down, down), (change.up, up), (change.bias, up[:1])):
        if tensor is not None and list(tensor.shape) != shape:
            raise AdapterUnavailable(f"its weights for {name} are {list(tensor.shape)}, but the layer takes {shape}")
