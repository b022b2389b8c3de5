"""Multipart bodies as OpenAI's SDKs write them, read back into what the same body would be as JSON."""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from shared.errors import InvalidRequest

_NAME = re.compile(r"(\w{1,64})((?:\[[^\[\]]{0,64}\])*)")
_PART = re.compile(r"\[([^\[\]]*)\]")
_NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?")
_WORDS = {"true": True, "false": False}
MAX_DEPTH = 3


def numeric_fields(*kinds: type[BaseModel]) -> frozenset[str]:
    """Return the names of those fields that hold a number or a truth value, also by their other names."""
    found: set[str] = set()
    for kind in kinds:
        for name, field in kind.model_fields.items():
            if _is_numeric(field.annotation):
                choices = getattr(field.validation_alias, "choices", ())
                found |= {name, *(choice for choice in choices if isinstance(choice, str))}
    return frozenset(found)


def _is_numeric(annotation: Any) -> bool:
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(_is_numeric(part) for part in get_args(annotation))
    return annotation in (int, float, bool)


def parse_form(items: Iterable[tuple[str, str]], numbers: Collection[str]) -> dict[str, Any]:
    """Return `steps=8`, `tags[]=a`, `metadata[order]=1` and `loras[][id]=a` as the JSON object they stand for.

    The fields called as one of `numbers` are read as numbers where they look like one: what is wrong with the others
    is for the body's own check to say. Raises `InvalidRequest` that names a field which cannot be placed.
    """
    body: dict[str, Any] = {}
    for key, text in items:
        found = _NAME.fullmatch(key)
        parts = _PART.findall(found[2]) if found else []
        if found is None or len(parts) > MAX_DEPTH:
            raise InvalidRequest(f"{key[:64]}: there is no such field", param=key)
        path = [found[1], *parts]
        leaf = next(part for part in reversed(path) if part)
        is_number = leaf in numbers and found[1] != "metadata"
        _place(body, path, _value(text) if is_number else text, key)
    return body


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.fullmatch(text):
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _place(body: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    """Put `value` where `path` leads; an empty part is a list, of which objects are filled up in order."""
    name, rest = path[0], path[1:]
    if not rest:
        if name in body:
            raise InvalidRequest(f"{key[:64]}: given twice", param=key)
        body[name] = value
    elif rest[0]:
        _place(_of(body.setdefault(name, {}), dict, key), rest, value, key)
    elif rest == [""]:
        _of(body.setdefault(name, []), list, key).append(value)
    else:
        items = _of(body.setdefault(name, []), list, key)
        # `a[][id]=1&a[][id]=2&a[][scale]=3`: the first object that has no such field yet is meant.
        item = next((one for one in items if isinstance(one, dict) and rest[1] not in one), None)
        if item is None:
            items.append(item := {})
        _place(item, rest[1:], value, key)


def _of(value: Any, kind: type, key: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidRequest(f"{key[:64]}: given as a value and as a list or object", param=key)
    return value
