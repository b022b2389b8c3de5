"""Batch rules: a JSON file that lowers `max_batch` for some models and sizes.

    {"schema_version": 1, "rules": [{"model_contains": "qwen", "resolution": "1024x1024", "max_batch_size": 2}]}

A rule without `resolution` applies to all sizes; the lowest matching number counts. Unknown keys are errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from shared.errors import ConfigurationError


class BatchRule(BaseModel):
    """`model_contains` matches part of a model's id or source, in any case."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model_contains: Annotated[str, Field(min_length=1)]
    resolution: Annotated[str | None, Field(pattern=r"^[1-9]\d{1,4}x[1-9]\d{1,4}$")] = None
    max_batch_size: Annotated[int, Field(ge=1, le=256)]

    def matches(self, names: tuple[str, ...], width: int, height: int) -> bool:
        if self.resolution not in (None, f"{width}x{height}"):
            return False
        return any(self.model_contains.lower() in name.lower() for name in names)


class BatchRules(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1]
    rules: Annotated[tuple[BatchRule, ...], Field(strict=False)]

    def max_batch(self, names: tuple[str, ...], most: int, width: int, height: int) -> int:
        """Return the most rows of a forward of a model with an id and a source as `names`, at most `most`."""
        matching = [rule for rule in self.rules if rule.matches(names, width, height)]
        return min([most, *(rule.max_batch_size for rule in matching)])


def load_batch_rules(path: Path) -> BatchRules:
    """Read a file of batch rules, or raise `ConfigurationError` naming the file and the key."""
    try:
        return BatchRules.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; set FUSEQUEUE_BATCH_RULES to a file of rules") from error
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {'; '.join(map(fault_text, error.errors()))}") from error


def fault_text(fault: ErrorDetails) -> str:
    """Return a fault of a file with its key."""
    key = f"{'.'.join(map(str, fault['loc']))}: " if fault["loc"] else ""
    return key + ("unknown key" if fault["type"] == "extra_forbidden" else fault["msg"].removeprefix("Value error, "))
