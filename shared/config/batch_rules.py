"""The rules file: for some models and sizes, fewer rows in a fused forward than `models.toml` allows.

    {"schema_version": 1, "rules": [{"model_contains": "qwen", "resolution": "1024x1024", "max_batch_size": 2}]}

A rule without `resolution` is for every size. Of all rules that fit the lowest number counts. Unknown keys are errors,
so that a misspelt rule does not go unnoticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ConfigurationError


class _Object(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Rule(_Object):
    """A bound on the rows of a model's forwards; `model_contains` is part of its id or source, in any case."""

    model_contains: Annotated[str, Field(min_length=1)]
    resolution: Annotated[str | None, Field(pattern=r"^[1-9]\d{1,4}x[1-9]\d{1,4}$")] = None
    max_batch_size: Annotated[int, Field(ge=1, le=256)]

    def fits(self, names: tuple[str, ...], width: int, height: int) -> bool:
        """Tell whether this rule is for a model of these names, and pictures of this size."""
        if self.resolution not in (None, f"{width}x{height}"):
            return False
        return any(self.model_contains.lower() in name.lower() for name in names)


class BatchRules(_Object):
    """All rules of a deployment."""

    schema_version: Literal[1] = 1
    rules: Annotated[tuple[Rule, ...], Field(strict=False)] = ()

    def cap(self, names: tuple[str, ...], width: int, height: int, most: int) -> int:
        """Return how many rows a forward may have, `most` where no rule says less."""
        return min([most, *(rule.max_batch_size for rule in self.rules if rule.fits(names, width, height))])


class _File(BatchRules):
    schema_version: Literal[1]
    rules: Annotated[tuple[Rule, ...], Field(strict=False)]


def load(path: Path | None) -> BatchRules:
    """Read a rules file, none being no rules; raises `ConfigurationError` that names the file and the key."""
    if path is None:
        return BatchRules()
    try:
        return _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {error.strerror}; FUSEQUEUE_BATCH_RULES names the file of batch rules"
        ) from error
    except ValidationError as error:
        faults = "; ".join(f"{_key(fault['loc'])}{_words(fault['type'], fault['msg'])}" for fault in error.errors())
        raise ConfigurationError(f"{path}: {faults}") from error


def _key(place: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, place))}: " if place else ""


def _words(kind: str, message: str) -> str:
    return "there is no such key" if kind == "extra_forbidden" else message
