"""Faults of a models file, with the model that each is in."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shared.config.batch_rules import fault_text


def duplicated(names: list[str]) -> str:
    """Return the names that are there more than once."""
    return ", ".join(sorted({name for name in names if names.count(name) > 1}))


def faults_text(error: ValidationError, document: Mapping[str, Any]) -> str:
    """Return the faults of a file on one line: `model 'a': limits.max_frames: ...`."""
    faults = error.errors()
    return "; ".join(_text(fault, document) for fault in faults if not _repeats(fault, faults))


def _repeats(fault: ErrorDetails, faults: Sequence[ErrorDetails]) -> bool:
    """Whether a list is too short only since its invalid items are dropped."""
    at = fault["loc"]
    return fault["type"] == "too_short" and any(other["loc"][: len(at)] == at for other in faults if other is not fault)


def _text(fault: ErrorDetails, document: Mapping[str, Any]) -> str:
    match fault["loc"]:
        case ("model", int(number), *keys):
            return f"{_name(document['model'], number)}: {fault_text({**fault, 'loc': tuple(keys)})}"
    return fault_text(fault)


def _name(tables: Sequence[Any], number: int) -> str:
    """Return a model's id, or which one of the file it is."""
    name = tables[number].get("id") if isinstance(tables[number], dict) else None
    return f"model {name!r}" if isinstance(name, str) else f"model number {number + 1}"
