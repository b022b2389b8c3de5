"""The index of a pipeline's folder: its class, and the library and class of each of its parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CLASSIC = "model_index.json"
MODULAR = "modular_model_index.json"

Index = dict[str, Any]

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_INSIDE = re.compile(r"(?:(?!\.\.)[\w-][\w.-]*(?:/(?!\.\.)[\w.-]+)*)?")  # a path without `..`, relative to a folder

_WITHOUT_WEIGHTS = re.compile(r"(Tokenizer|TokenizerFast|Processor|Extractor|Scheduler)$")  # classes of parts


class PartPlace(NamedTuple):
    """Where the files of a part of a modular pipeline are: a subfolder, of a repository if it names one."""

    name: str
    subfolder: str
    repository: str | None
    revision: str | None
    variant: str | None


def index_file(folder: Path) -> Path | None:
    """Return the index of a folder, the classic one of a folder with both; None if it has none."""
    return next((folder / name for name in (CLASSIC, MODULAR) if (folder / name).is_file()), None)


def is_modular(folder: Path) -> bool:
    return index_file(folder) == folder / MODULAR


def read_index(folder: Path) -> Index:
    """Return the index of a folder: `[library, class]` of each part by its name, and settings of the pipeline.

    A modular one is brought to this form, without the parts that are to come from nowhere, and those that rewrite
    prompts unless they are in the folder. Raises `OSError` or `ValueError`.
    """
    index = _read(folder)
    if not is_modular(folder):
        return index
    placed = {place.name for place in part_places(folder)}
    return {name: _classic_entry(one) for name, one in index.items() if name in placed or not _is_part(one)}


def part_places(folder: Path) -> Iterator[PartPlace]:
    """Yield the places of the parts of a modular pipeline; those of other folders are taken to be in this one.

    Parts that rewrite prompts count only if they are in the folder: they are language models of many GB.
    """
    for name, entry in _read(folder).items():
        if not _is_part(entry):
            continue
        source = entry[2].get("pretrained_model_name_or_path") or entry[2].get("repo")
        if not isinstance(source, str):
            continue
        on_hub = _HUB_ID.fullmatch(source) is not None
        values = (entry[2].get(key) for key in ("revision", "variant"))
        revision, variant = (value if isinstance(value, str) else None for value in values)
        own = entry[2].get("subfolder") or ("" if on_hub else name)
        if not isinstance(own, str) or not _INSIDE.fullmatch(own) or not _INSIDE.fullmatch(revision or ""):
            raise ValueError(f"{MODULAR} places its {name} outside of a folder; correct the entry")
        if rewrites_prompts(name) and not (own and (folder / own).is_dir()):
            continue
        yield PartPlace(name, own, source if on_hub else None, revision, variant)


def missing_folders(folder: Path) -> list[str]:
    """Return the folders of parts that the index of a folder lists and that are not there, nor in a repository."""
    if is_modular(folder):
        parts = {place.subfolder for place in part_places(folder) if place.repository is None}
    else:
        entries = {name: entry for name, entry in read_index(folder).items() if not name.startswith("_")}
        parts = {name for name, entry in entries.items() if isinstance(entry, list) and any(entry)}
    return sorted(part for part in parts if not (folder / part).is_dir())


def parts_without_weights(folder: Path) -> list[str]:
    """Return the parts of a classic folder that have a configuration of a model, and no safetensors."""
    if is_modular(folder):
        return []
    entries = {name: entry for name, entry in read_index(folder).items() if isinstance(entry, list) and all(entry)}
    models = [name for name, entry in entries.items() if not _WITHOUT_WEIGHTS.search(str(entry[-1]))]
    return sorted(
        name
        for name in models
        if (folder / name / "config.json").is_file() and not next((folder / name).glob("*.safetensors"), None)
    )


def _read(folder: Path) -> Index:
    index = json.loads((index_file(folder) or folder / CLASSIC).read_text("utf-8"))
    if not isinstance(index, dict):
        raise ValueError("its index is no JSON object")
    return index


def rewrites_prompts(part: str) -> bool:
    """Return whether a part of a modular pipeline rewrites prompts, by its name: pipelines also run without it."""
    return part.startswith("prompt_")


def _is_part(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)


def _classic_entry(entry: Any) -> Any:
    """Return the `[library, class]` of a part of a modular index; other values as they are."""
    if not _is_part(entry):
        return entry
    hint = entry[2].get("type_hint")
    return list(hint) if isinstance(hint, list) and len(hint) == 2 and hint[1] else entry[:2]
