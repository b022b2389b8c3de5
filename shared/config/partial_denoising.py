"""Which models denoise an image in parts, by two jobs: Stable Diffusion XL, the base of which leaves the rest to its
refiner.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from shared.architectures.registry import DENOISING_PARTS
from shared.config.model_index import read_index
from shared.tasks import Task

_FIELDS: Mapping[Task, frozenset[str]] = {
    Task.TEXT_TO_IMAGE: frozenset({"denoising_end"}),
    Task.IMAGE_TO_IMAGE: frozenset({"denoising_start", "denoising_end"}),
    Task.INPAINT: frozenset({"denoising_start", "denoising_end"}),
}


def takes_part(field: str, folder: Path, task: Task, *, with_nets: bool) -> bool:
    """Return whether the model in `folder` takes `field` for a task; True if its files do not say.

    Of the pipelines with control nets, that of images to start from takes neither.
    """
    name = pipeline_class(str(folder))
    if name is None:
        return True  # the worker that loads it knows
    return (
        name in DENOISING_PARTS and field in _FIELDS.get(task, ()) and not (with_nets and task is Task.IMAGE_TO_IMAGE)
    )


def pipeline_class(source: str) -> str | None:
    """Return diffusers' class of the model in a folder; None if it cannot be read."""
    try:
        return _class_name(source)
    except (OSError, ValueError, TypeError, LookupError):
        return None  # loading the model reports the error


@lru_cache(maxsize=256)
def _class_name(source: str) -> str:
    return str(read_index(Path(source))["_class_name"])
