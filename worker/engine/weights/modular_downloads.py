"""The files of a modular pipeline on the hub, and of its parts in other repositories: those that are loaded only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub

from shared.config.model_index import MODULAR, PartPlace, part_places

_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = ("*.safetensors",)
_OF_VARIANTS = ("*.*.safetensors",)


def download_modular(
    source: str, revision: str | None, variant: str | None, replaced: Collection[str], *, local_files_only: bool
) -> Path:
    """Return the folder of a repository with the files that its parts are loaded from.

    Weights of a variant are loaded in place of plain ones where a part has them. Those of `replaced` parts are not
    downloaded.
    """
    download: Any = huggingface_hub.snapshot_download
    own = {"revision": revision, "local_files_only": local_files_only}
    folder = Path(download(source, allow_patterns=[MODULAR], **own))
    for place in part_places(folder):
        if place.repository in (None, source):
            repository, of_part = source, own
        else:
            repository, of_part = place.repository, {**own, "revision": place.revision}
        for allowed, ignored in _patterns(place, variant or place.variant, place.name in replaced):
            ignored = [*ignored, *([] if place.subfolder else ["*/*"])]  # a star matches folders too
            in_part = {"allow_patterns": _inside(place, allowed), "ignore_patterns": ignored or None}
            copy = Path(download(repository, **in_part, **of_part))
            if has_variant(copy / place.subfolder, variant or place.variant):
                break
    return folder


def has_variant(folder: Path, variant: str | None) -> bool:
    """Return whether a folder has weights of a variant."""
    return variant is not None and any(any(folder.glob(pattern)) for pattern in _weights_of(variant))


def _patterns(place: PartPlace, variant: str | None, is_replaced: bool) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield which files of a part to download, and which not: first those of a variant, then plain ones."""
    if is_replaced:
        yield _FILES, []
        return
    if variant is not None:
        yield (*_FILES, *_weights_of(variant)), []
    yield (*_FILES, *_WEIGHTS), _inside(place, _OF_VARIANTS)


def _weights_of(variant: str) -> tuple[str, str]:
    return f"*.{variant}.safetensors", f"*.{variant}-*.safetensors"


def _inside(place: PartPlace, patterns: Collection[str]) -> list[str]:
    return [f"{place.subfolder}/{pattern}".removeprefix("/") for pattern in patterns]
