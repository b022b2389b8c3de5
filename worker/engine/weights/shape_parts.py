"""Loading a model that makes meshes: the parts that its configuration names, of hy3dgen's classes, from safetensors.

hy3dgen itself makes any class that the configuration names, and reads pickles.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from shared.config.shape_folder import CONFIG, shape_weights
from worker.engine.weights.completeness import REMEDY
from worker.engine.weights.shape_classes import shape_classes

_PARTS = ("model", "vae", "conditioner", "scheduler", "image_processor")
_WITH_WEIGHTS = ("model", "vae", "conditioner")
# They name files that classes would read: a pickle, or a model of transformers from anywhere.
_REFUSED = ("ckpt_path", "version")
_ENCODERS = ("CLIPImageEncoder", "DinoImageEncoder", "DinoImageEncoderMV")


def load_shape_parts(folder: Path, variant: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return the parts of the pipeline of a folder by their names in `_PARTS`.

    Raises `ValueError` for a configuration or weights that do not fit.
    """
    config = yaml.safe_load((folder / CONFIG).read_text("utf-8"))
    if not isinstance(config, Mapping):
        raise ValueError(f"{CONFIG} holds no configuration; {REMEDY}")
    file = shape_weights(folder, variant)
    if not file.is_file():
        raise ValueError(f"it has no {file.name}: set `variant` to that of its weights, such as fp16, or {REMEDY}")
    parts = {name: _make(name, config.get(name)) for name in _PARTS}
    weights = load_file(file)
    for name in _WITH_WEIGHTS:
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        _fill(name, parts[name], own)
        parts[name].to(dtype).eval().requires_grad_(False)
    return parts


def _make(name: str, entry: Any) -> Any:
    """Return the part that an entry of the configuration describes."""
    target = entry.get("target") if isinstance(entry, Mapping) else None
    made = shape_classes().allowed.get(target)
    if made is None:
        raise ValueError(f"{CONFIG} names {target!r} as its {name}, which is no class of hy3dgen that makes shapes")
    params = entry.get("params") or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"{CONFIG}: the params of its {name} are no table")
    for key in params:
        if key in _REFUSED or key not in inspect.signature(made).parameters:
            raise ValueError(f"{CONFIG}: its {name} has a parameter {key!r}, which is not read")
    for key, encoder in params.items():
        if key.endswith("image_encoder"):
            _check_encoder(key, encoder)
    return made(**params)


def _check_encoder(key: str, encoder: Any) -> None:
    """Raise `ValueError` for an image encoder that would be read from elsewhere."""
    own = encoder.get("kwargs") if isinstance(encoder, Mapping) else None
    if not isinstance(own, Mapping) or encoder.get("type") not in _ENCODERS:
        raise ValueError(f"{CONFIG}: its {key} is not one of {', '.join(_ENCODERS)}")
    if not isinstance(own.get("config"), Mapping) or any(name in own for name in _REFUSED):
        raise ValueError(f"{CONFIG}: its {key} has no config of its own, and others are not read")


def _fill(name: str, part: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    missing, unexpected = part.load_state_dict(tensors, strict=False)
    if missing:
        raise ValueError(f"{name} has no weights for {', '.join(sorted(missing)[:3])}; {REMEDY}")
    if unexpected:
        raise ValueError(f"{name} has no place for {', '.join(sorted(unexpected)[:3])}: {CONFIG} is another model's")
