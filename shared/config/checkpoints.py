"""Checkpoints: the weights of several parts of a pipeline in one safetensors file, with the names of the original code.

Reads only the header, so that `fusequeue doctor` sees what is wrong without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shared.architectures.family import KnownCheckpoint
from shared.architectures.registry import CHECKPOINT_MARKS, CHECKPOINTS
from shared.config.model_index import read_index

FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Dtypes of weights, by safetensors' names; they are loaded as the model's dtype."""

DENOISER_PREFIX = "model.diffusion_model."
_LONGEST_HEADER = 100 * 1024 * 1024
_LORA_MARKS = (".lora_", "lora_unet_", "lora_te", ".lora.up.", "lora_A.", "lora_B.", ".hada_w", ".lokr_w")
_SCALES = (".scale_weight", ".weight_scale", ".weight_scale_2", ".comfy_quant", ".absmax")
# Weights of other parts, or for training: they are not those of a denoiser without a prefix.
_OTHERS = ("model_ema.", "first_stage_model.", "vae.", "cond_stage_model.", "conditioner.", "text_encoders.")
_FIRST_DENOISERS = ("transformer", "unet")  # a second one is in a file of its own
# Where files have the weights of a part: the first prefix that a file has counts.
_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "vae": ("first_stage_model.", "vae."),
    "text_encoder": ("cond_stage_model.", "conditioner.embedders.0.transformer.", "text_encoders.clip_l."),
    "text_encoder_2": ("conditioner.embedders.1.", "conditioner.embedders.0.model.", "text_encoders.clip_g."),
}
_T5_CLASS, _T5_PREFIX = "T5EncoderModel", "text_encoders.t5xxl."
_XL = "Stable Diffusion XL"


class Tensor(NamedTuple):
    """A tensor of a header."""

    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file; raises `ValueError` if it is no complete safetensors file of plain weights."""
    if not file.is_file():
        raise ValueError("there is no such file; correct the path")
    if file.suffix != ".safetensors":
        raise ValueError(
            "it is no .safetensors file; convert it: others, such as .ckpt, can run code when they are read"
        )
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        encoded = opened.read(min(length, _LONGEST_HEADER))
    try:
        entries = {name: entry for name, entry in json.loads(encoded).items() if name != "__metadata__"}
        tensors = {name: Tensor(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(
            "its header cannot be read: it is no safetensors file, or damaged; download it again"
        ) from None
    if size < end:
        raise ValueError(f"it ends after {size} of {end} bytes; download it again")
    if fault := _kind_fault(tensors):
        raise ValueError(fault)
    return tensors


def _kind_fault(tensors: Mapping[str, Tensor]) -> str | None:
    """Return why the tensors are no weights that can be loaded, None if they can be."""
    if any(mark in name for name in tensors for mark in _LORA_MARKS):
        return "it is a LoRA file, not a checkpoint; make it a [[model.adapter]]"
    coded = any(name.endswith(".weight") and tensor.dtype not in FLOATING for name, tensor in tensors.items())
    if coded or any(name.endswith(_SCALES) or "quant_state" in name for name in tensors):
        return (
            "its weights are quantized with scales, which are not read; use a file of plain fp16, bf16 or fp8 weights"
        )
    return None


def names_by_part(names: Iterable[str], index: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of tensors by the part of `index`, a model_index.json, that they are weights of."""
    all_names = list(names)
    parts = {}
    for part, entry in index.items():
        class_name = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if isinstance(class_name, str) and (found := _names_of(part, class_name, all_names)):
            parts[part] = found
    return parts


def _names_of(part: str, class_name: str, names: list[str]) -> list[str]:
    prefixes = (_T5_PREFIX,) if class_name == _T5_CLASS else _PREFIXES.get(part, ())
    if part in _FIRST_DENOISERS:
        prefixes = (DENOISER_PREFIX,)
    for prefix in prefixes:
        if found := [name for name in names if name.startswith(prefix)]:
            return found
    return [name for name in names if part in _FIRST_DENOISERS and not name.startswith(_OTHERS)]


def check_parts(parts: Mapping[str, list[str]], names: Iterable[str], index: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a file lacks the weights of the denoiser that `index` has, or is of another family."""
    family = family_of(names)
    looks = "" if family is None else f"; it looks like {family.name}: set source to such a model"
    for name in _FIRST_DENOISERS:
        class_name = index.get(name, (None, None))[1]
        marks = CHECKPOINT_MARKS.get(str(class_name), ("",))
        if class_name is not None and not any(mark in one for one in parts.get(name, ()) for mark in marks):
            raise ValueError(f"it has no weights of a {class_name}, the {name} of source{looks}")
    has_second = index.get("text_encoder_2", (None, None))[1] is not None
    if "unet" in parts and family is not None and has_second != (family.name == _XL):
        raise ValueError(f"source {'is' if has_second else 'is not'} a {_XL}{looks}")


def family_of(names: Iterable[str]) -> KnownCheckpoint | None:
    """Return the family that a file seems to be of, None if it is not known."""
    plain = {name.removeprefix(DENOISER_PREFIX) for name in names}
    return next((one for one in CHECKPOINTS if any(name.startswith(one.mark) for name in plain)), None)


def checkpoint_fault(file: Path, folder: Path | None) -> str | None:
    """Return why a file cannot give the weights of the pipeline whose configurations are in `folder`; None if it can.

    As far as the headers say: the load compares every tensor.
    """
    try:
        tensors = read_header(file)
        index = None if folder is None else read_index(folder)
        if isinstance(index, dict):
            check_parts(names_by_part(tensors, index), tensors, index)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def vae_fault(path: Path, _folder: Path | None) -> str | None:
    """Return why a VAE cannot be read from a file or folder; None if it can."""
    if path.is_dir():
        has_config = (path / "config.json").is_file() or (path / "vae" / "config.json").is_file()
        return None if has_config else "the folder has no config.json; set vae to a folder of save_pretrained"
    try:
        read_header(path)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def source_hint(file: Path) -> str:
    """Return what to set `source` to for a file, as far as its header says it."""
    try:
        family = family_of(read_header(file))
    except (OSError, ValueError):
        family = None
    if family is None:
        return "set it to a folder or a hub id of a model of the same architecture"
    return f'the checkpoint looks like {family.name}, set it to "{family.source}" or a folder of such a model'
