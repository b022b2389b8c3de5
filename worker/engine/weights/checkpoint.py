"""Parts of a pipeline from a checkpoint: diffusers converts its weights, configurations are those of a folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from diffusers.loaders import FromOriginalModelMixin, single_file_utils
from safetensors import safe_open
from transformers import CLIPTextModel, CLIPTextModelWithProjection, T5EncoderModel

from shared.config.checkpoints import DENOISER_PREFIX, check_parts, names_by_part, read_header
from shared.config.model_spec import ModelSpec
from worker.engine.errors import text_of
from worker.engine.weights.completeness import check_tensors

_UTILS: Any = single_file_utils
_CLIP_CLASSES = (CLIPTextModel, CLIPTextModelWithProjection)


def checkpoint_parts(spec: ModelSpec, folder: Path, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a model that its `checkpoint` and `vae` have, as arguments of `from_pretrained`.

    `index` is the model_index.json of `folder`. Raises `ValueError`, which names the key and the file.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    parts: dict[str, Any] = {}
    if spec.vae is not None:
        with _naming("vae", spec.vae):
            parts["vae"] = _vae(Path(spec.vae), folder, index, dtype)
    if spec.checkpoint is not None:
        file = Path(spec.checkpoint)
        with _naming("checkpoint", spec.checkpoint):
            tensors = read_header(file)
            names = names_by_part(tensors, index)
            check_parts(names, tensors, index)
            for part in names.keys() - parts.keys():
                parts[part] = _converted(part, _read(file, names[part], dtype), folder, index, dtype)
    return parts


@contextmanager
def _naming(key: str, file: str) -> Iterator[None]:
    """Raise what is wrong with a file as a `ValueError` that names it; libraries raise anything for odd ones."""
    try:
        yield
    except Exception as error:
        lacking = f"it has no tensor {error.args[0]}" if isinstance(error, KeyError) and error.args else ""
        raise ValueError(f"{key} {file}: {lacking or text_of(error)}") from error


def _read(file: Path, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in names}
    # Conversions calculate with weights, which 8 bits cannot.
    return {
        name: one.to(dtype) if one.is_floating_point() and one.itemsize == 1 else one for name, one in tensors.items()
    }


def _converted(
    part: str, tensors: dict[str, torch.Tensor], folder: Path, index: Mapping[str, Any], dtype: torch.dtype
) -> torch.nn.Module:
    """Return a part with weights by their names in a checkpoint."""
    library, class_name = index[part]
    part_class = getattr(importlib.import_module(library), class_name)
    if class_name == "UNet2DConditionModel" and any(name.startswith("input_blocks.") for name in tensors):
        tensors = {DENOISER_PREFIX + name: tensor for name, tensor in tensors.items()}
    has_guidance = any("guidance_" in name for name in tensors)  # diffusers would drop it
    try:
        loaded: Any = _convert(part_class, tensors, config=str(folder), subfolder=part, torch_dtype=dtype)
    except NotImplementedError as error:  # diffusers casts what it found no weights for, too
        for frame, _ in walk_tb(error.__traceback__):
            if isinstance(unfinished := frame.f_locals.get("model"), torch.nn.Module):
                check_tensors(part, unfinished)
        raise
    loaded.eval()
    check_tensors(part, loaded)
    if class_name == "FluxTransformer2DModel" and has_guidance and not loaded.config.guidance_embeds:
        raise ValueError("it has weights of a guidance_embedder and source has none; set source to FLUX.1-dev")
    result: torch.nn.Module = loaded
    return result


def _convert(part_class: Any, tensors: dict[str, torch.Tensor], **options: Any) -> Any:
    if issubclass(part_class, FromOriginalModelMixin):
        return part_class.from_single_file(tensors, local_files_only=True, **options)
    if part_class in _CLIP_CLASSES:
        return _UTILS.create_diffusers_clip_model_from_ldm(part_class, tensors, local_files_only=True, **options)
    if part_class is T5EncoderModel:
        loaded = _UTILS.create_diffusers_t5_model_from_checkpoint(part_class, tensors, local_files_only=True, **options)
        loaded.tie_weights()  # files can have one of two names of the same weights
        return loaded
    raise ValueError(f"diffusers does not convert weights of a {part_class.__name__}")


def _vae(path: Path, folder: Path, index: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """Return the VAE of a file, or of a folder with its own configuration."""
    if index.get("vae", (None, None))[1] is None:
        raise ValueError("source has no VAE; remove the key")
    if not path.is_dir():
        tensors = read_header(path)
        names = names_by_part(tensors, {"vae": index["vae"]}).get("vae", list(tensors))
        return _converted("vae", _read(path, names, dtype), folder, index, dtype)
    own = path if (path / "config.json").is_file() else path / "vae"
    channels = [
        json.loads((one / "config.json").read_text("utf-8")).get("latent_channels") for one in (own, folder / "vae")
    ]
    if channels[0] != channels[1]:
        raise ValueError(f"its latents have {channels[0]} channels, and those of source {channels[1]}")
    library, class_name = index["vae"]
    vae_class: Any = getattr(importlib.import_module(library), class_name)
    loaded: torch.nn.Module = vae_class.from_pretrained(own, dtype=dtype, use_safetensors=True, local_files_only=True)
    check_tensors("vae", loaded)
    return loaded
