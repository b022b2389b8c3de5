"""The arguments of the queue's scripts: rows that some take, and the Lua table `args` in which a script has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from itertools import starmap
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, get_args, get_type_hints


class SubmitArgs(NamedTuple):
    """A job for `submit`. Empty texts stand for None."""

    id: str
    tenant: str
    rank: int
    slots: int
    sig: str
    model: str
    window: int
    max_batch: int
    wire: str
    created: int
    time_limit_ms: int | None
    not_before: int | None
    after: str
    on_parent: str
    sources: str
    ended_sources: str
    batch: str
    input: str
    idempotency: str
    webhook: str
    video: int | None
    on_deadline: str
    steps: int
    sync_call: str
    group: str


class ModelLoad(NamedTuple):
    """A model of a worker, and the time to load it: 0 in memory, negative if the last load failed."""

    name: str
    load_ms: int


Models: TypeAlias = Sequence[str] | Mapping[str, int]
"""Models of a worker, or a mapping to the ms of loading each: 0 in memory, negative when the last load failed.

Loaded models are claimed first. A model that only another worker holds is left to that worker for about one load."""


def load_times(models: Models) -> list[ModelLoad]:
    """Return the models of a worker as rows of a script."""
    times = models if isinstance(models, Mapping) else dict.fromkeys(models, 0)
    return list(starmap(ModelLoad, times.items()))


class ClaimKey(NamedTuple):
    job_id: str
    epoch: int


class ProgressRow(NamedTuple):
    """The progress of a job; `stored`: in its record, too."""

    job_id: str
    epoch: int
    stored: bool
    phase: str
    step: int
    total: int


class AddedSize(NamedTuple):
    """The size of what a tenant will keep, as `footprint.lua` has it."""

    tenant: str
    size: str


def parameter_names(method: Callable[..., Any]) -> list[str]:
    """Return the parameters of a script's method; a variadic one ends with `...`."""
    return [f"{one.name}..." if one.kind is Parameter.VAR_POSITIONAL else one.name for one in _parameters(method)]


def _parameters(method: Callable[..., Any]) -> list[Parameter]:
    return list(signature(method).parameters.values())[1:]


def lua_arguments(method: Callable[..., Any]) -> str:
    """Return the Lua code that makes `args`, with the types of a script's method.

    A number is a number, a bool is one, None is nil; a variadic parameter is a list, of tables for rows.
    """
    hints, fields, lists = get_type_hints(method), [], []
    for at, one in enumerate(_parameters(method), 1):
        if one.kind is Parameter.VAR_POSITIONAL:
            lists.append(_list(one.name, hints[one.name], at))
        else:
            fields.append(f"{one.name} = {_converted(hints[one.name], f'ARGV[{at}]')}")
    return "\n".join([f"local args = {{{', '.join(fields)}}}", *lists])


def _list(name: str, hint: Any, first: int) -> str:
    row, columns = _converted(hint, "ARGV[at]"), 1
    if hasattr(hint, "_fields"):
        types = get_type_hints(hint)
        columns = len(types)
        places = enumerate(types.items())
        fields = (f"{name} = {_converted(kind, f'ARGV[at + {place}]')}" for place, (name, kind) in places)
        row = f"{{{', '.join(fields)}}}"
    return f"args.{name} = {{}}\nfor at = {first}, #ARGV, {columns} do table.insert(args.{name}, {row}) end"


def _converted(hint: Any, text: str) -> str:
    types = set(get_args(hint)) or {hint}
    if types <= {int, float, NoneType}:
        return f"tonumber({text})"  # nil for an empty text
    if types == {bool}:
        return f"{text} == '1'"
    return f"{text} ~= '' and {text} or nil" if NoneType in types else text
