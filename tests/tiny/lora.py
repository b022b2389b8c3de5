"""LoRA files with random weights for tiny pipelines, in all formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import convert_state_dict_to_diffusers
from safetensors.torch import save_file

State = dict[str, torch.Tensor]

RANK = 3
STRENGTH = 0.5  # how much an adapter adds to a layer's output, about


def everywhere(_path: str) -> bool:
    return True


def attention(path: str) -> bool:
    """Return whether most LoRA files change the layer `path`."""
    return path.endswith((".to_q", ".to_k", ".to_v", ".to_out.0"))


def weights(module: torch.nn.Module, seed: int, wanted: Callable[[str], bool] = everywhere, rank: int = RANK) -> State:
    """Return weights by PEFT's names for the linear layers and convolutions of `module` for which `wanted` is true."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for path, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d) or not wanted(path):
            continue
        down = (rank, *layer.weight.shape[1:])
        up = (layer.weight.shape[0], rank, *(1 for _ in layer.weight.shape[2:]))
        inputs = layer.weight[0].numel()
        state[f"{path}.lora_A.weight"] = torch.randn(down, generator=generator) * inputs**-0.5
        state[f"{path}.lora_B.weight"] = torch.randn(up, generator=generator) * STRENGTH * rank**-0.5
    return state


def save(
    pipeline: Any,
    file: Path,
    seed: int,
    components: Sequence[str] = ("transformer",),
    wanted: Callable[[str], bool] = everywhere,
) -> Path:
    """Write a file that changes `components` of `pipeline`."""
    state: State = {}
    for at, component in enumerate(components):
        own = weights(getattr(pipeline, component), 10 * seed + at, wanted)
        if component.startswith("text_encoder"):
            own = convert_state_dict_to_diffusers(own)
        state |= {f"{component}.{name}": tensor for name, tensor in own.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file)
    return file
