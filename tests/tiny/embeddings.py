"""Files of embeddings (textual inversion) with random vectors for tiny pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection

_NAMES = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}
STRENGTH = 2.0  # deviation of the values; those of tiny token embeddings have 0.02


def vectors(pipeline: Any, seed: int, count: int) -> dict[str, torch.Tensor]:
    """Return vectors for each CLIP text encoder of a pipeline, by component."""
    generator = torch.Generator().manual_seed(seed)
    encoders = {name: getattr(pipeline, name, None) for name in _NAMES}
    return {
        name: torch.randn(count, encoder.get_input_embeddings().embedding_dim, generator=generator) * STRENGTH
        for name, encoder in encoders.items()
        if isinstance(encoder, CLIPTextModel | CLIPTextModelWithProjection)
    }


def save(file: Path, of_encoders: dict[str, torch.Tensor], key: str = "emb_params") -> Path:
    """Write the vectors as others do: for one text encoder by `key`, for two by their names."""
    named = of_encoders if len(of_encoders) > 1 else {}
    state = {_NAMES[name]: tensor for name, tensor in named.items()} or {key: next(iter(of_encoders.values()))}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file)
    return file
