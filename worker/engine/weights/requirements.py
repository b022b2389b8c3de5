"""What weights need: packages of their formats, and memory, of files before they are loaded and of loaded tensors.

Imports no diffusers, so that `fusequeue doctor` starts fast.
"""

import contextlib
import filecmp
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import huggingface_hub

from shared.config.candidates import ScorerSpec
from shared.config.checkpoints import names_by_part, read_header
from shared.config.controls import ControlSpec
from shared.config.model_index import CLASSIC, is_modular, part_places, read_index
from shared.config.model_spec import ModelSpec
from shared.config.refiners import RefinerSpec
from shared.config.shape_folder import is_shape_folder, shape_weights
from shared.config.weight_formats import HeldAs, Quantization, StorageDtype
from shared.signature import DENOISERS

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
# nf4 has a float32 scale per 64 weights; the other quantized formats have one per row.
BYTES_PER_WEIGHT: Mapping[HeldAs, float] = {
    "torchao-int8": 1,
    "torchao-fp8": 1,
    "bitsandbytes-int8": 1,
    "bitsandbytes-nf4": 0.5 + 4 / 64,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_FLOATING = ("F64", "F32", "F16", "BF16")  # safetensors' names; loaded as the model's dtype
_LONGEST_HEADER = 100 * 1024 * 1024
# Matrices that are looked up and not multiplied are not quantized; nor is a language model's head.
_UNQUANTIZED = re.compile(r"(^|\.)(shared|\w*embed_tokens|\w*embeddings?|relative_attention_bias|lm_head)\.weight$")
# The layers that diffusers leaves in the model's dtype in all denoisers; some leave more.
_UNCAST = re.compile(r"norm|pos_embed|patch_embed")


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def lacking(quantization: Quantization, device_type: str) -> str | None:
    """Return what the installation or the device lacks for the formats of a model, and what to do; None if nothing."""
    needed = [(f'{key} = "{name}"', name.partition("-")[0]) for key, name in quantization.formats.items()]
    needed += [("gguf", "gguf")] if quantization.gguf else []
    for key, package in needed:
        if not is_installed(package):
            remedy = "pip install 'fusequeue-server[quantization]'"
            return f"quantization.{key} needs {package}, which is not installed; {remedy}"
        if package == "bitsandbytes" and device_type == "cpu":
            return f"quantization.{key} needs a GPU; use torchao on a CPU"
    return None


def model_bytes(spec: ModelSpec, folder: Path) -> int:
    """Return the approximate size in memory of the weights in `folder`, and of the control nets on this machine.

    Raises `OSError` for a missing GGUF file.
    """
    if is_shape_folder(folder):
        weights = shape_weights(folder, spec.variant)
        return file_bytes(weights, ITEM_BYTES[spec.dtype], None) if weights.is_file() else 0  # the load reports it
    replaced = _replaced_parts(spec, folder)
    components = [one for one in (*folder.iterdir(), *_elsewhere(folder)) if one.is_dir() and one.name not in replaced]
    item_bytes = ITEM_BYTES[spec.dtype]
    control_files = {file for one in spec.control for file in _control_files(one)}  # one can be of several controls
    of_controls = (file_bytes(file, item_bytes, None) for file in control_files)
    of_folder = (component_bytes(component, spec) for component in components)
    others = _refiner_bytes(spec, folder) + _scorer_bytes(spec)
    return sum(of_folder) + sum(replaced.values()) + sum(of_controls) + others


def _refiner_bytes(spec: ModelSpec, folder: Path) -> int:
    """Return the bytes of the parts that a refiner on this machine does not share with its model."""
    source = None if spec.refiner is None else cached_refiner(spec.refiner)
    if source is None or spec.refiner is None:
        return 0
    as_refiner = spec.model_copy(update={"variant": spec.refiner.variant})
    parts = (one for one in source.iterdir() if one.is_dir() and not is_shared(one.name, spec, folder, source))
    return sum(component_bytes(part, as_refiner) for part in parts)


def cached_refiner(refiner: RefinerSpec) -> Path | None:
    """Return the folder of a refiner's files on this machine, None if it has none."""
    if refiner.is_folder:
        folder = Path(refiner.source)
        return folder if (folder / CLASSIC).is_file() else None
    file = huggingface_hub.try_to_load_from_cache(refiner.source, CLASSIC, revision=refiner.revision)
    return Path(file).parent if isinstance(file, str) else None


def _scorer_bytes(spec: ModelSpec) -> int:
    folder = None if spec.scorer is None else cached_scorer(spec.scorer)
    item_bytes = ITEM_BYTES["float16" if spec.dtype == "float16" else "float32"]
    return 0 if folder is None else sum(file_bytes(file, item_bytes, None) for file in _weight_files(folder, None))


def cached_scorer(scorer: ScorerSpec) -> Path | None:
    """Return the folder of a scorer's files on this machine, None if it has none."""
    if scorer.is_folder:
        folder = Path(scorer.source)
        return folder if (folder / "config.json").is_file() else None
    file = huggingface_hub.try_to_load_from_cache(scorer.source, "config.json", revision=scorer.revision)
    return Path(file).parent if isinstance(file, str) else None


def is_shared(part: str, spec: ModelSpec, folder: Path, source: Path) -> bool:
    """Return whether a refiner in `source` uses a part of its model, which is in `folder`.

    It decodes the model's latents, so the VAE is the model's. A text encoder is if the refiner has no files of one, or
    the same files, unless a checkpoint replaces those of the model.
    """
    part = part.replace("tokenizer", "text_encoder")  # it goes with its encoder
    if part == "vae" or part in DENOISERS:
        return part == "vae"
    if spec.refiner is None or not part.startswith("text_encoder"):
        return False
    own, theirs = _weight_files(folder / part, spec.variant), _weight_files(source / part, spec.refiner.variant)
    if [one.name for one in own] != [one.name for one in theirs]:
        return not theirs
    return part not in _replaced_parts(spec, folder) and all(map(_same_content, own, theirs))


def _same_content(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return filecmp.cmp(one.resolve(), other.resolve(), shallow=False)
    return False


def _elsewhere(folder: Path) -> Iterator[Path]:
    """Yield the folders of a modular pipeline's parts that are in other repositories, of those on this machine."""
    for place in part_places(folder) if is_modular(folder) else ():
        if place.repository is not None and not (place.subfolder and (folder / place.subfolder).is_dir()):
            config = f"{place.subfolder}/config.json".removeprefix("/")
            file = huggingface_hub.try_to_load_from_cache(place.repository, config, revision=place.revision)
            if isinstance(file, str):
                yield Path(file).parent


def _replaced_parts(spec: ModelSpec, folder: Path) -> dict[str, int]:
    """Return the bytes in memory of the parts that `checkpoint` and `vae` replace; none of a file that is wrong."""
    item_bytes, parts = ITEM_BYTES[spec.dtype], dict[str, int]()
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the load reports what is wrong
        if spec.checkpoint is not None:
            tensors = read_header(Path(spec.checkpoint))
            index = read_index(folder)
            for part, names in names_by_part(tensors, index).items():
                held_as = spec.layerwise_casting if part in DENOISERS else None
                parts[part] = math.ceil(
                    sum(tensor_bytes(name, tensors[name].shape, item_bytes, held_as) for name in names)
                )
        if spec.vae is not None:
            path = Path(spec.vae)
            own = path if (path / "config.json").is_file() or path.is_file() else path / "vae"
            files = [own] if own.is_file() else _weight_files(own, None)
            parts["vae"] = sum(file_bytes(file, item_bytes, None) for file in files)
    return parts


def cached_folder(control: ControlSpec) -> Path | None:
    """Return the folder of a control's files on this machine, None if it has none."""
    if not control.source:
        return None
    known = CLASSIC if control.kind == "redux" else "config.json"
    if control.weight_name is not None:
        known = (Path(control.subfolder) / control.weight_name).as_posix()
    if control.is_folder:
        folder = Path(control.source)
        return folder if (folder / known).is_file() else None
    file = huggingface_hub.try_to_load_from_cache(control.source, known, revision=control.revision)
    return Path(file).parents[known.count("/")] if isinstance(file, str) else None


def _control_files(control: ControlSpec) -> list[Path]:
    folder = cached_folder(control)
    if folder is None:
        return []
    if control.kind == "redux":
        return [file for part in folder.iterdir() if part.is_dir() for file in _weight_files(part, control.variant)]
    if control.weight_name is None:
        return _weight_files(folder, control.variant)
    return [folder / control.subfolder / control.weight_name, *_weight_files(folder / control.encoder_folder, None)]


def component_bytes(folder: Path, spec: ModelSpec) -> int:
    """Return the bytes of one component's weights in memory, in the format of the model's table."""
    quantization = spec.quantization or Quantization.model_construct()
    replaced_by = quantization.gguf.get(folder.name)
    if replaced_by is not None:
        return Path(replaced_by).stat().st_size
    held_as: HeldAs | None = quantization.format_of(folder.name)
    if folder.name in DENOISERS and spec.layerwise_casting is not None:
        held_as = spec.layerwise_casting
    return sum(file_bytes(file, ITEM_BYTES[spec.dtype], held_as) for file in _weight_files(folder, spec.variant))


def _weight_files(folder: Path, variant: str | None) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    of_variant = [file for file in files if variant is not None and f".{variant}" in file.name]
    plain = [file for file in files if "." not in file.name.removesuffix(".safetensors")]
    return of_variant or plain or files


def file_bytes(file: Path, item_bytes: int, held_as: HeldAs | None) -> int:
    """Return the bytes of a file's tensors in memory, read from its header; the file's size if that is unreadable."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, _LONGEST_HEADER)))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return math.ceil(sum(_entry_bytes(*item, item_bytes, held_as) for item in tensors.items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return file.stat().st_size


def _entry_bytes(name: str, entry: Mapping[str, Any], item_bytes: int, held_as: HeldAs | None) -> float:
    if entry["dtype"] in _FLOATING:
        return tensor_bytes(name, entry["shape"], item_bytes, held_as)
    start, end = entry["data_offsets"]
    return float(end - start)


def tensor_bytes(name: str, shape: Sequence[int], item_bytes: int, held_as: HeldAs | None) -> float:
    """Return the bytes of a tensor of floats; matrices are quantized, and convolutions are cast too."""
    if held_as is None or not name.endswith(".weight") or len(shape) < 2:
        return math.prod(shape) * item_bytes
    is_cast = held_as in get_args(StorageDtype)
    small = not _UNCAST.search(name) if is_cast else len(shape) == 2 and not _UNQUANTIZED.search(name)
    return math.prod(shape) * (BYTES_PER_WEIGHT[held_as] if small else item_bytes)


def tensors_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of loaded tensors; a quantized one consists of others."""
    total = 0
    for tensor in tensors:
        flatten = getattr(tensor, "__tensor_flatten__", None)  # torchao's
        scales = getattr(getattr(tensor, "quant_state", None), "absmax", None)  # bitsandbytes' of 4 bits
        total += tensor.nbytes if flatten is None else tensors_bytes(getattr(tensor, name) for name in flatten()[0])
        total += 0 if scales is None else scales.nbytes
    return total
