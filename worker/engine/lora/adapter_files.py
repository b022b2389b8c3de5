"""LoRA files: finding them, reading diffusers' many formats, and combining them into one low-rank update per layer.

Runs outside the engine's thread and builds no modules: while a model loads, the parameters of new modules stay empty
in the whole process. Weights that cannot be applied are an error, never ignored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from huggingface_hub import hf_hub_download
from peft.utils.other import get_pattern_key
from safetensors import safe_open

from shared.config.adapters import AdapterSpec
from shared.errors import AdapterUnavailable
from shared.inputs.adapter_check import UNSUPPORTED
from shared.signature import DENOISERS
from worker.engine.pipelines.clones import Pipeline

_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
_PEFT_ALPHA = 8  # PEFT's default

State = Mapping[str, torch.Tensor]
Pace = Callable[[], None]
T = TypeVar("T")


@dataclass(frozen=True)
class LowRank:
    """Update of one layer: `up` of `down` of its input, and `bias`, are added to its output.

    `down` is [rank, in, *kernel], `up` [out, rank, *ones] including all scales, `bias` [out].
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.down, self.up, self.bias) if tensor is not None)


Changes = Mapping[str, Mapping[str, LowRank]]  # component -> path of a layer in it -> its update


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
    return AdapterUnavailable(f"adapter {spec.id!r} cannot be loaded from {spec.source}: {message}")


def no_pace() -> None:
    """Work without a pause."""


def _paced(items: Iterable[T], pace: Pace) -> Iterator[T]:
    """Yield the items, with a call of `pace` after the work on each."""
    for item in items:
        yield item
        pace()


def read(spec: AdapterSpec, file: Path, pipeline: Pipeline, pace: Pace = no_pace) -> Changes:
    """Read an adapter's file for the model of `pipeline`; raises `AdapterUnavailable` for unsupported weights.

    `pace` is called after the work on each layer, here and in `combine` and `move`.
    """
    try:
        _refuse_unsupported(file)
        state, alphas, metadata = _read_state(file, pipeline)
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
    return changes


def _refuse_unsupported(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
    layers = {name.rsplit(".lora_", 1)[0] for name in names if ".lora_" in name}
    for name in sorted(names):
        only_bias = name.endswith(".diff_b") and name.removesuffix(".diff_b") not in layers
        if name.endswith(".diff") or only_bias or any(part in name for part in UNSUPPORTED):
            raise AdapterUnavailable(f"weights such as {name} are not supported")


def _read_state(file: Path, pipeline: Pipeline) -> tuple[State, State, Mapping[str, Any]]:
    """Return weights, alphas and metadata, read by the pipeline's class."""
    reader = getattr(pipeline, "lora_state_dict", None)
    if reader is None:
        raise AdapterUnavailable(f"{type(pipeline).__name__} takes no LoRA")
    options = {"unet_config": pipeline.unet.config} if hasattr(pipeline, "unet") else {}
    state, *alphas, metadata = reader(
        str(file.parent),
        weight_name=file.name,
        use_safetensors=True,
        local_files_only=True,
        return_lora_metadata=True,
        return_alphas=True,
        **options,
    )
    return state, (alphas[0] if alphas else None) or {}, metadata or {}


def _component_changes(
    component: str, state: State, alphas: State, metadata: Mapping[str, Any], pipeline: Pipeline, pace: Pace
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
    if down is None or up is None:
        raise AdapterUnavailable(f"{path} lacks one half of its weights")
    rank = down.shape[0]
    if settings:  # PEFT's configuration of the adapter
        patterns: dict[str, float] = settings.get("alpha_pattern") or {}
        alpha = patterns.get(get_pattern_key(list(patterns), path), settings.get("lora_alpha", _PEFT_ALPHA))
    scale = 1.0 if alpha is None else alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return _scaled(LowRank(down, up, weights.get(f"{path}.lora_B.bias")), scale)


def _scaled(change: LowRank, scale: float) -> LowRank:
    bias = None if change.bias is None else change.bias.float() * scale
    return LowRank(change.down.float(), change.up.float() * scale, bias)


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
    down, up = torch.cat([change.down for change in changes]), torch.cat([change.up for change in changes], dim=1)
    return LowRank(down, up, torch.stack(biases).sum(0) if biases else None)


def move(
    changes: Changes, modules: Mapping[str, torch.nn.Module], device: torch.device, pace: Pace = no_pace
) -> Changes:
    """Return `changes` on `device`, in the dtypes of a model's `modules`."""

    def moved(component: str, change: LowRank) -> LowRank:
        dtype: torch.dtype = getattr(modules[component], "dtype", torch.float32)
        bias = None if change.bias is None else change.bias.to(device, dtype)
        return LowRank(change.down.to(device, dtype).contiguous(), change.up.to(device, dtype).contiguous(), bias)

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


def _check_layer(name: str, change: LowRank, module: torch.nn.Module, path: str) -> None:
    try:
        layer = module.get_submodule(path)
    except AttributeError:
        raise AdapterUnavailable(f"it changes {name}, which the model does not have") from None
    rank = change.down.shape[0]
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
