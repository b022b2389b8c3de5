"""LoRA files: found, read in diffusers' many formats, and added up into what they change, layer by layer.

All of it runs beside the engine's thread, and none of it builds a module: while a model loads, a module's new
parameters end up empty in the whole process. What a file holds and we cannot apply is an error, never left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from worker.engine.pipelines.clones import Pipeline

# Parts of names of weights that diffusers' readers would leave out, or that are no low-rank change.
_REFUSED = ("dora_scale", "lora_magnitude_vector", "hada_", "lokr_", "lora_mid", "oft_", "lora_embedding")
_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
_PEFT_ALPHA = 8  # of a configuration that names none

State = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one layer's output: `up` of `down` of its input, and `bias`.

    `down` is [rank, in, *kernel], `up` [out, rank, *ones] with all scales in it, `bias` [out].
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.down, self.up, self.bias) if tensor is not None)


Changes = Mapping[str, Mapping[str, LowRank]]  # component -> path of a layer in it -> what is added there


def locate(spec: AdapterSpec) -> Path:
    """Return an adapter's file, fetching it if need be."""
    if not spec.is_local:
        if spec.weight_name is None:
            raise AdapterUnavailable(f"adapter {spec.id!r}: {spec.source!r} is no folder, and names no weight_name")
        try:
            return Path(hf_hub_download(spec.source, spec.weight_name, revision=spec.revision))
        except (OSError, ValueError) as error:
            raise unavailable(spec, error) from None
    source = Path(spec.source)
    if spec.weight_name is not None:
        files = [source / spec.weight_name]
    else:
        files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if len(files) != 1 or not files[0].is_file() or files[0].suffix != ".safetensors":
        held = "no safetensors file" if len(files) < 2 else "several files; name one as weight_name"
        raise AdapterUnavailable(f"adapter {spec.id!r}: {source} holds {held}")
    return files[0]


def unavailable(spec: AdapterSpec, error: Exception) -> AdapterUnavailable:
    words = " ".join(str(error).split())[:400]
    return AdapterUnavailable(f"adapter {spec.id!r} cannot be loaded from {spec.source}: {words}")


def read(spec: AdapterSpec, file: Path, pipeline: Pipeline) -> Changes:
    """Read the file of an adapter of `pipeline`'s model; raises `AdapterUnavailable` for what cannot be applied."""
    try:
        _refuse_what_would_be_dropped(file)
        state, alphas, metadata = _as_diffusers_reads_it(file, pipeline)
        components = {name.partition(".")[0] for name in state}
        changes = {
            component: _changes_of(component, state, alphas, metadata, _is_flat(pipeline, component))
            for component in sorted(components)
        }
    except AdapterUnavailable as error:
        raise AdapterUnavailable(f"adapter {spec.id!r}: {error.message}") from None
    except Exception as error:  # whatever a reader of diffusers trips over, the file is at fault
        raise unavailable(spec, error) from None
    if spec.component is not None and list(changes) == ["transformer"]:
        changes = {spec.component: changes["transformer"]}
    if not any(changes.values()):
        raise AdapterUnavailable(f"adapter {spec.id!r}: {file.name} holds no LoRA weights")
    return changes


def _refuse_what_would_be_dropped(file: Path) -> None:
    with safe_open(file, framework="pt") as opened:
        names = set(opened.keys())
    layers = {name.rsplit(".lora_", 1)[0] for name in names if ".lora_" in name}
    for name in sorted(names):
        bias_alone = name.endswith(".diff_b") and name.removesuffix(".diff_b") not in layers
        if name.endswith(".diff") or bias_alone or any(part in name for part in _REFUSED):
            raise AdapterUnavailable(f"weights such as {name} are not supported")


def _as_diffusers_reads_it(file: Path, pipeline: Pipeline) -> tuple[State, State, Mapping[str, Any]]:
    reader = getattr(pipeline, "lora_state_dict", None)
    if reader is None:
        raise AdapterUnavailable(f"{type(pipeline).__name__} takes no LoRA")
    more = {"unet_config": pipeline.unet.config} if hasattr(pipeline, "unet") else {}
    state, *between, metadata = reader(
        str(file.parent),
        weight_name=file.name,
        use_safetensors=True,
        local_files_only=True,
        return_lora_metadata=True,
        return_alphas=True,
        **more,
    )
    return state, (between[0] if between else None) or {}, metadata or {}


def _is_flat(pipeline: Pipeline, component: str) -> bool:
    return not hasattr(getattr(pipeline, component, None), "text_model")


def _changes_of(
    component: str, state: State, alphas: State, metadata: Mapping[str, Any], flat: bool
) -> dict[str, LowRank]:
    """Return what `state` adds to each layer of `component`."""
    prefix = f"{component}."
    own = _renamed(component, _without(prefix, state), flat)
    odd = next((name for name in sorted(own) if not name.endswith(_KINDS)), None)
    if odd is not None:
        raise AdapterUnavailable(f"weights such as {prefix}{odd} are not supported")
    # An alpha's name is that of a layer or of one half of its weights.
    of_weights = {name.removesuffix(".alpha"): alpha for name, alpha in _without(prefix, alphas).items()}
    of_layers = {_layer_of(name): float(alpha) for name, alpha in _renamed(component, of_weights, flat).items()}
    settings = _without(prefix, metadata)
    return {path: _low_rank(path, own, of_layers.get(path), settings) for path in sorted({_layer_of(n) for n in own})}


def _layer_of(name: str) -> str:
    return name.rsplit(".lora_", 1)[0]


def _renamed(component: str, state: Mapping[str, Any], flat: bool) -> Mapping[str, Any]:
    """Return `state` by PEFT's names."""
    if not state:
        return state
    if not component.startswith("text_encoder"):
        known = any("lora_A" in name for name in state)
        kept: Mapping[str, Any] = state if known else convert_unet_state_dict_to_peft(state)
        return kept
    renamed: Mapping[str, Any] = convert_state_dict_to_peft(convert_state_dict_to_diffusers(state))
    if flat:  # older files name CLIP's layers by a level that is gone
        renamed = {name.removeprefix("text_model."): tensor for name, tensor in renamed.items()}
    return renamed


def _without(prefix: str, items: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): item for name, item in items.items() if name.startswith(prefix)}


def _low_rank(path: str, own: State, alpha: float | None, settings: Mapping[str, Any]) -> LowRank:
    down, up = own.get(f"{path}.lora_A.weight"), own.get(f"{path}.lora_B.weight")
    if down is None or up is None:
        raise AdapterUnavailable(f"{path} lacks one half of its weights")
    rank = down.shape[0]
    if settings:  # PEFT's configuration of the adapter
        patterns: dict[str, float] = settings.get("alpha_pattern") or {}
        alpha = patterns.get(get_pattern_key(list(patterns), path), settings.get("lora_alpha", _PEFT_ALPHA))
    scale = 1.0 if alpha is None else alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    bias = own.get(f"{path}.lora_B.bias")
    return _scaled(LowRank(down, up, bias), scale)


def _scaled(change: LowRank, scale: float) -> LowRank:
    bias = None if change.bias is None else change.bias.float() * scale
    return LowRank(change.down.float(), change.up.float() * scale, bias)


def check_fit(changes: Changes, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise `AdapterUnavailable` for the first change that has no place in a model's `modules`."""
    for component, layers in changes.items():
        module = modules.get(component)
        if module is None:
            raise AdapterUnavailable(f"it changes {component}, which the model does not have")
        for path, change in layers.items():
            _check_layer(f"{component}.{path}", change, module, path)


def combine(parts: Sequence[tuple[Changes, float]]) -> Changes:
    """Return the sum of `parts`, each times its scale, all of which fit one model: their ranks add up."""
    components = sorted({component for changes, _ in parts for component in changes})
    return {name: _sum([(changes.get(name, {}), scale) for changes, scale in parts]) for name in components}


def _sum(parts: Sequence[tuple[Mapping[str, LowRank], float]]) -> dict[str, LowRank]:
    summed: dict[str, LowRank] = {}
    for path in sorted({path for layers, _ in parts for path in layers}):
        each = [_scaled(layers[path], scale) for layers, scale in parts if path in layers]
        biases = [one.bias for one in each if one.bias is not None]
        down, up = torch.cat([one.down for one in each]), torch.cat([one.up for one in each], dim=1)
        summed[path] = LowRank(down, up, torch.stack(biases).sum(0) if biases else None)
    return summed


def place(changes: Changes, modules: Mapping[str, torch.nn.Module], device: torch.device) -> Changes:
    """Return `changes` on `device`, in the dtypes of a model's `modules`."""
    return {
        component: {path: _moved(change, device, modules[component]) for path, change in layers.items()}
        for component, layers in changes.items()
    }


def _moved(change: LowRank, device: torch.device, module: torch.nn.Module) -> LowRank:
    dtype: Any = getattr(module, "dtype", torch.float32)
    bias = None if change.bias is None else change.bias.to(device, dtype)
    return LowRank(change.down.to(device, dtype).contiguous(), change.up.to(device, dtype).contiguous(), bias)


def _check_layer(name: str, change: LowRank, module: torch.nn.Module, path: str) -> None:
    try:
        layer = module.get_submodule(path)
    except AttributeError:
        raise AdapterUnavailable(f"it changes {name}, which the model does not have") from None
    rank = change.down.shape[0]
    if isinstance(layer, torch.nn.Linear):
        down, up = [rank, layer.in_features], [layer.out_features, rank]
    elif isinstance(layer, torch.nn.Conv2d | torch.nn.Conv3d) and layer.groups == 1 and layer.padding_mode == "zeros":
        ones: Iterable[int] = (1 for _ in layer.kernel_size)
        down, up = [rank, layer.in_channels, *layer.kernel_size], [layer.out_channels, rank, *ones]
    else:
        raise AdapterUnavailable(
            f"it changes {name}, a {type(layer).__name__}: only linear layers and convolutions can be"
        )
    for wanted, given in ((down, change.down), (up, change.up)):
        if list(given.shape) != wanted:
            raise AdapterUnavailable(
                f"its weights for {name} are {list(given.shape)}, and the model's layer takes {wanted}"
            )
    if change.bias is not None and list(change.bias.shape) != up[:1]:
        raise AdapterUnavailable(
            f"its bias for {name} is {list(change.bias.shape)}, and the model's layer takes {up[:1]}"
        )
