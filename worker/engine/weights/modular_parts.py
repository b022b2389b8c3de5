"""Loading a modular pipeline: diffusers' own blocks, and the parts that its index names, from safetensors only."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from shared.config.model_index import MODULAR, Index

_LIBRARIES = ("diffusers", "transformers")


def load_modular(folder: Path, index: Index, options: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Return the pipeline of a folder with its parts.

    `options` are those of `from_pretrained`; `parts` replace parts of the folder, None for one that is not loaded, and
    can hold a `quantization_config`. Raises `ValueError` for blocks that are not diffusers' own, as their code would
    have to be run, and for a part that is not in the folder.
    """
    pipeline = _class_of(index)(pretrained_model_name_or_path=str(folder), local_files_only=True)
    quantized = getattr(parts.get("quantization_config"), "quant_mapping", {})
    loaded = {}
    for name, specification in pipeline._component_specs.items():
        if name in parts:
            loaded[name] = parts[name]
        elif specification.default_creation_method == "from_pretrained" and name in index:
            own = {"quantization_config": quantized[name]} if name in quantized else {}
            loaded[name] = _load_part(folder, name, specification, {**options, **own})
    pipeline.register_components(**loaded)
    return pipeline


def _class_of(index: Index) -> Any:
    """Return the class of the pipeline, whose blocks are made from diffusers' own classes."""
    for key in ("_class_name", "_blocks_class_name"):
        name = index.get(key)
        if not isinstance(name, str) or not hasattr(diffusers, name):
            raise ValueError(f"{MODULAR} names the {key} {name!r}, which is not diffusers' own; its code is not run")
    found = getattr(diffusers, index["_class_name"])
    if not (isinstance(found, type) and issubclass(found, diffusers.ModularPipeline)):
        raise ValueError(f"{index['_class_name']} is no modular pipeline; check {MODULAR}")
    return found


def _load_part(folder: Path, name: str, specification: Any, options: Mapping[str, Any]) -> Any:
    library = index_library(specification.type_hint)
    if library not in _LIBRARIES:
        raise ValueError(f"its {name} is a class of {library}; only diffusers' and transformers' are loaded")
    place = specification.pretrained_model_name_or_path
    if place != str(folder) and (folder / (specification.subfolder or name)).is_dir():
        place = str(folder)  # its index names the place from which the folder was copied
    if place != str(folder) and Path(str(place)).is_absolute():
        raise ValueError(f"it has no folder {name}, which {MODULAR} expects in {place}; copy it into {folder}")
    kind: Any = specification.type_hint
    subfolder = specification.subfolder or ("" if place != str(folder) else name)
    if not issubclass(kind, torch.nn.Module):
        options = {"local_files_only": True}
    elif specification.variant is not None and options.get("variant") is None:
        options = {**options, "variant": specification.variant}
    revision = {} if specification.revision is None or place == str(folder) else {"revision": specification.revision}
    return kind.from_pretrained(place, subfolder=subfolder, **options, **revision)


def index_library(kind: Any) -> str:
    module = inspect.getmodule(kind)
    return "no known library" if module is None else module.__name__.partition(".")[0]
