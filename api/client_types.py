"""The part of the Python client that follows from the declared fields of jobs.

`python -m api.client_types > fusequeue/job_fields.py` writes it, as the client imports no other package.
"""

import textwrap
from collections.abc import Iterable, Iterator
from enum import EnumType
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from api.webhook_events import ENDPOINT_EVENTS
from shared.config import step_schedules
from shared.job import Phase, State
from shared.job_fields import (
    CallFields,
    ChoosableFields,
    ChosenFields,
    ConvertedFields,
    OnDeadline,
    OnParentFailure,
    PipelineFields,
    Priority,
    ServiceFields,
)
from shared.tasks import OutputFormat, Task
from shared.webhooks import DeliveryState, JobEventName

Fields: TypeAlias = dict[str, FieldInfo]
ARGUMENTS = frozenset({"model", "prompt"})
"""Fields that the client's methods have as arguments of their own."""

OWN_TYPES = frozenset({"not_before"})
"""Fields for which the client takes Python's own types as well."""

ALIASES: dict[str, tuple[Any, str]] = {
    "JobState": (State, ""),
    "JobPhase": (Phase, ""),
    "PriorityName": (Priority, ""),
    "OnDeadlineName": (OnDeadline, ""),
    "OnParentFailureName": (OnParentFailure, ""),
    "TaskName": (Task, ""),
    "FormatName": (OutputFormat, ""),
    "CacheLevelName": (step_schedules.Choice, ""),
    "DeliveryState": (DeliveryState, ""),
    "JobEventName": (JobEventName, ""),
    "EndpointEventName": (
        Literal[tuple(ENDPOINT_EVENTS)],
        "What an endpoint can subscribe to: events of jobs, and OpenAI's of batches and videos.",
    ),
}
"""Types of values with the client's name of each, and a text on it."""

HEADER = '''"""Fields of jobs and the values that they can have, from the service's own declarations of them.

Written by `python -m api.client_types > fusequeue/job_fields.py`; change nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

from pydantic import BaseModel, Field, JsonValue, SkipValidation
'''


def source() -> str:
    """Return the text of the client's module."""
    sent = _fields(PipelineFields, ChoosableFields, CallFields, ServiceFields, ConvertedFields)
    sent = {name: field for name, field in sent.items() if name not in ARGUMENTS | OWN_TYPES}
    returned = _fields(PipelineFields, ChosenFields, CallFields, ServiceFields)
    lines = [HEADER, *_aliases(), "", ""]
    lines += _class("SentFields(TypedDict, total=False)", "Parameters of a job that are sent as they are.", _sent(sent))
    lines += ["", ""]
    lines += _class(
        "ReturnedFields(BaseModel)", "What a job is to make, with every default chosen.", _returned(returned)
    )
    return "\n".join(lines)


def _fields(*declared: type[BaseModel]) -> Fields:
    """Return the fields of the classes, without those of objects: the client has other types for these."""
    fields = {name: field for kind in declared for name, field in kind.model_fields.items()}
    return {name: field for name, field in fields.items() if not any(_objects(field.annotation))}


def _objects(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _objects(part)


def _aliases() -> Iterator[str]:
    for name, (kind, text) in ALIASES.items():
        line = f"{name}: TypeAlias = {_literal(kind)}"
        if len(line) > 120:
            line = "\n".join(
                (f"{name}: TypeAlias = Literal[", *(f"    {_quoted(value)}," for value in _values(kind)), "]")
            )
        yield line
        yield from _text(text, "")


def _sent(fields: Fields) -> Iterator[str]:
    for name, field in fields.items():
        kind = _written(field.annotation, "Mapping")
        yield f"    {name}: {kind if kind.endswith(' | None') else f'{kind} | None'}"
        yield from _text(field.description or "", "    ")


def _returned(fields: Fields) -> Iterator[str]:
    for name, field in fields.items():
        kind = _written(field.annotation, "dict")
        if any(_has_values(part) for part in (field.annotation, *get_args(field.annotation))):
            kind = f"SkipValidation[{kind}]"  # a newer service may have more values
        if field.is_required():
            default = ""
        elif field.default_factory is not None:
            default = f" = Field(default_factory={field.default_factory.__name__})"
        else:
            default = f" = {_quoted(field.default) if isinstance(field.default, str) else field.default}"
        yield f"    {name}: {kind}{default}"
        yield from _text(field.description or "", "    ")


def _has_values(annotation: Any) -> bool:
    return isinstance(annotation, EnumType) or get_origin(annotation) is Literal


def _literal(kind: Any) -> str:
    return f"Literal[{', '.join(map(_quoted, _values(kind)))}]"


def _values(kind: Any) -> list[str]:
    return [str(value) for value in (kind if isinstance(kind, EnumType) else get_args(kind))]


def _quoted(text: str) -> str:
    return f'"{text}"'


def _class(head: str, text: str, lines: Iterable[str]) -> list[str]:
    return [f"class {head}:", f'    """{text}"""', "", *lines]


def _text(text: str, indent: str) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(f'"""{text}"""', 120, initial_indent=indent, subsequent_indent=indent)


def _written(annotation: Any, mapping: str) -> str:
    """Return a type as the client writes it; `mapping` is its type of objects with any names."""
    for name, (kind, _) in ALIASES.items():
        if kind == annotation:
            return name
    if annotation is NoneType:
        return "None"
    if _has_values(annotation):
        return _literal(annotation)
    origin = get_origin(annotation)
    parts = [_written(part, mapping) for part in get_args(annotation)[: 1 if origin in (Annotated, tuple) else None]]
    if origin is tuple:
        return f"Sequence[{parts[0]}]" if mapping == "Mapping" else f"tuple[{parts[0]}, ...]"
    if origin is Annotated:
        return parts[0]
    if origin in (Union, UnionType):
        return " | ".join(parts)
    return f"{mapping}[{', '.join(parts)}]" if origin is dict else str(annotation.__name__)


if __name__ == "__main__":
    print(source())
