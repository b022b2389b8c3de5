"""Files of LoRA by the names of a model's layers: diffusers' readers of many formats, and what those leave to do."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
)
from safetensors import safe_open

from shared.errors import AdapterUnavailable
from shared.signature import DENOISERS
from worker.engine.lora.layer_update import LayerUpdate
from worker.engine.lora.pacing import Pace, paced
from worker.engine.lora.peft_patterns import value_of

PEFT_PREFIX = "base_model.model."

_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias")
_PEFT_ALPHA = 8  # PEFT's default

State = Mapping[str, torch.Tensor]


def read_state(weights: State, file: Path, pipeline: Any) -> tuple[State, State, Mapping[str, Any]]:
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


def denoiser_of(pipeline: Any) -> str:
    return next(name for name in DENOISERS if getattr(pipeline, name, None) is not None)


def _with_components(state: State, pipeline: Any) -> dict[str, torch.Tensor]:
    """Return weights with their components in their names: some of diffusers' readers leave the denoiser's out."""
    denoiser, components = denoiser_of(pipeline), set(pipeline.components)  # which takes a while for each call
    roots = {name.partition(".")[0] for name in state} - components
    bare = {root for root in roots if hasattr(getattr(pipeline, denoiser), root)}
    return {f"{denoiser}.{name}" if name.partition(".")[0] in bare else name: one for name, one in state.items()}


def _without_peft_prefix(weights: State, pipeline: Any) -> State:
    """Return the weights of a file that PEFT has written with their component in place of PEFT's prefix."""
    denoiser = denoiser_of(pipeline)
    if not all(name.startswith(PEFT_PREFIX) for name in weights):
        return weights
    names = {name: name.removeprefix(PEFT_PREFIX) for name in weights}
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


def component_changes(
    component: str, state: State, alphas: State, metadata: Mapping[str, Any], pipeline: Any, pace: Pace
) -> dict[str, LayerUpdate]:
    prefix = f"{component}."
    # A module: what a loaded model adds for `clip_skip` is none.
    flat = not isinstance(getattr(getattr(pipeline, component, None), "text_model", None), torch.nn.Module)
    weights = _to_peft_names(component, without_prefix(prefix, state), flat)
    unknown = next((name for name in sorted(weights) if not name.endswith(_KINDS)), None)
    if unknown is not None:
        raise AdapterUnavailable(f"weights such as {prefix}{unknown} are not supported")
    # An alpha has the name of a layer or of one half of its weights.
    by_weight = {name.removesuffix(".alpha"): alpha for name, alpha in without_prefix(prefix, alphas).items()}
    by_layer = {_layer_of(name): float(alpha) for name, alpha in _to_peft_names(component, by_weight, flat).items()}
    settings = without_prefix(prefix, metadata)
    paths = sorted({_layer_of(name) for name in weights})
    return {path: _low_rank(path, weights, by_layer.get(path), settings) for path in paced(paths, pace)}


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


def without_prefix(prefix: str, items: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): item for name, item in items.items() if name.startswith(prefix)}


def _low_rank(path: str, weights: State, alpha: float | None, settings: Mapping[str, Any]) -> LayerUpdate:
    down, up = weights.get(f"{path}.lora_A.weight"), weights.get(f"{path}.lora_B.weight")
    bias = weights.get(f"{path}.lora_B.bias")
    if down is None and up is None:
        return LayerUpdate(None, None, None if bias is None else bias.float())
    if down is None or up is None:
        raise AdapterUnavailable(f"{path} lacks one half of its weights")
    rank = down.shape[0]
    if settings:  # PEFT's configuration of the adapter
        alpha = value_of(settings, "alpha_pattern", path, settings.get("lora_alpha", _PEFT_ALPHA))
    scale = 1.0 if alpha is None else alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return LayerUpdate(down.float(), up.float() * scale, None if bias is None else bias.float() * scale)
