"""The parameters of a pipeline's call, described as modular pipelines describe their inputs."""

import inspect
import re
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from worker.engine.pipelines.clones import Pipeline

_ENTRY = re.compile(r"^ *(\w+) \(`.*\):[ \n]*((?:.*\n)*?)(?= *\w+ \(`|\n|\Z)", re.MULTILINE)
_LISTS = (list, tuple)


class CallInput(NamedTuple):
    """A parameter of a call; `type_hint` is that of one result where the call makes several."""

    name: str
    type_hint: Any
    default: Any
    description: str


def call_inputs(pipeline: Pipeline) -> tuple[CallInput, ...]:
    return _inputs(pipeline.__class__)


@cache
def _inputs(pipeline_class: Any) -> tuple[CallInput, ...]:
    call = pipeline_class.__call__
    try:
        hints = get_type_hints(call)
    except (NameError, TypeError, AttributeError):  # of names that only type checkers import
        return ()
    texts = {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(call) or "")}
    parameters = inspect.signature(call).parameters.values()
    empty = inspect.Parameter.empty
    return tuple(
        CallInput(
            one.name, _of_one(hints[one.name]), None if one.default is empty else one.default, texts.get(one.name, "")
        )
        for one in parameters
        if one.name in hints
    )


def _of_one(hint: Any) -> Any:
    """Return a type without the list of values of several results: of `str | list[str]`, `str`."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    parts = get_args(hint)
    kept = [part for part in parts if not (get_origin(part) in _LISTS and set(get_args(part)) & set(parts))]
    return Union[tuple(kept)]  # noqa: UP007  # of parts that are known at run time only
