"""The index of a pipeline's folder: its class, and the library and class of each of its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CLASSIC = "model_index.json"
MODULAR = "modular_model_index.json"

Index = dict[str, Any]


def index_file(folder: Path) -> Path | None:
    """Return the index of a folder, the classic one of a folder with both; None if it has none."""
    return next((folder / name for name in (CLASSIC, MODULAR) if (folder / name).is_file()), None)


def is_modular(folder: Path) -> bool:
    return index_file(folder) == folder / MODULAR


def read_index(folder: Path) -> Index:
    """Return the index of a folder: `[library, class]` of each part by its name, and settings of the pipeline.

    A modular one is brought to this form; parts that it has no files of are left out. Raises `OSError` or `ValueError`.
    """
    index = json.loads((index_file(folder) or folder / CLASSIC).read_text("utf-8"))
    if not isinstance(index, dict):
        raise ValueError("its index is no JSON object")
    if not is_modular(folder):
        return index
    return {name: _classic_entry(entry) for name, entry in index.items() if not _is_unset(entry)}


def repository_of(entry: Any) -> str | None:
    """Return the folder or repository that an entry of a modular index names, None if it names none."""
    specification = entry[2] if _is_part(entry) else {}
    named = specification.get("pretrained_model_name_or_path") or specification.get("repo")
    return named if isinstance(named, str) else None


def _is_part(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)


def _is_unset(entry: Any) -> bool:
    return _is_part(entry) and repository_of(entry) is None


def _classic_entry(entry: Any) -> Any:
    """Return the part's `[library, class]` of a modular index; other values as they are."""
    if not _is_part(entry):
        return entry
    hint = entry[2].get("type_hint")
    return list(hint) if isinstance(hint, list) and len(hint) == 2 and hint[1] else entry[:2]
