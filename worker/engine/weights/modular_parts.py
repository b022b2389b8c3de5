"""Loading a modular pipeline: diffusers' own blocks, and the parts that its index names, from safetensors only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from shared.config.model_index import MODULAR, Index, PartPlace, part_places
from worker.engine.weights.completeness import REMEDY
from worker.engine.weights.modular_downloads import has_variant
from worker.engine.weights.prompt_rewriting import switch_rewriting

_LIBRARIES = ("diffusers", "transformers")


def load_modular(folder: Path, index: Index, options: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Return the pipeline of a folder with its parts.

    `options` are those of `from_pretrained`; `parts` replace parts of the folder, None for one that is not loaded, and
    can hold a `quantization_config`. Raises `ValueError` for blocks and parts whose code is not diffusers' or
    transformers' own, as it is not run, and for a part without files.
    """
    pipeline = _class_of(index)(pretrained_model_name_or_path=str(folder), local_files_only=True)
    _require_variant(folder, options.get("variant"))
    quantized = getattr(parts.get("quantization_config"), "quant_mapping", {})
    expected = pipeline._component_specs
    loaded = {name: part for name, part in parts.items() if name in expected}
    for place in part_places(folder):
        if place.name in expected and place.name not in loaded:
            own = {"quantization_config": quantized[place.name]} if place.name in quantized else {}
            loaded[place.name] = _load_part(folder, place, expected[place.name].type_hint, {**options, **own})
    pipeline.register_components(**loaded)
    switch_rewriting(pipeline)
    return pipeline


def _require_variant(folder: Path, variant: str | None) -> None:
    """Raise `ValueError` if no part has weights of a variant; those that have none are loaded from plain ones."""
    found = (_folder_with(place, folder) / place.subfolder for place in part_places(folder))
    if variant is not None and not any(has_variant(one, variant) for one in found):
        raise ValueError(f"none of its parts has weights of the variant {variant!r}; correct the model's variant")


def _class_of(index: Index) -> Any:
    """Return the class of the pipeline, whose blocks are made from diffusers' own classes."""
    for key in ("_class_name", "_blocks_class_name"):
        name = index.get(key)
        if not isinstance(name, str) or not hasattr(diffusers, name):
            raise ValueError(f"{MODULAR} names {name!r} as its {key}, which is not diffusers' own: its code is not run")
    found = getattr(diffusers, index["_class_name"])
    if not (isinstance(found, type) and issubclass(found, diffusers.ModularPipeline)):
        raise ValueError(f"{index['_class_name']} is no modular pipeline; correct {MODULAR}")
    return found


def _load_part(folder: Path, place: PartPlace, kind: Any, options: Mapping[str, Any]) -> Any:
    library = str(getattr(kind, "__module__", None)).partition(".")[0]
    if library not in _LIBRARIES:
        raise ValueError(f"its {place.name} is no class of {' or '.join(_LIBRARIES)}, and others are not loaded")
    own: dict[str, Any] = dict(options) if issubclass(kind, torch.nn.Module) else {"local_files_only": True}
    if kind.__name__.startswith("Auto"):
        own["trust_remote_code"] = False
    found = _folder_with(place, folder)
    if "variant" in own:
        variant = own["variant"] or place.variant
        own["variant"] = variant if has_variant(found / place.subfolder, variant) else None
    return kind.from_pretrained(found, subfolder=place.subfolder, **own)


def _folder_with(place: PartPlace, folder: Path) -> Path:
    """Return `folder`, or the repository on this machine, in which the files of a part are."""
    if place.subfolder and (folder / place.subfolder).is_dir():
        return folder
    if place.repository is None:
        raise ValueError(f"it has no folder {place.subfolder}, which {MODULAR} lists; {REMEDY}")
    find: Any = huggingface_hub.snapshot_download
    try:
        return Path(find(place.repository, revision=place.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"it has no folder {place.subfolder or place.name}, and {place.repository}, which {MODULAR} names for it, "
            "is not on this machine; download it into the folder"
        ) from None
