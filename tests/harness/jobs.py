"""The tiny pipelines of the oldest families, in any size, for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny import weights
from tiny.images import stable

FAMILIES: dict[str, Callable[..., Any]] = {name: stable.PIPELINES[name] for name in ("sd", "sdxl", "sd3", "flux")}


def save(family: str, folder: Path, **sizes: Any) -> Path:
    """Write a pipeline of `family` into `folder`, with the same weights every time."""
    return weights.save(lambda: FAMILIES[family](**sizes), folder)
