"""JSON as it should be: UTF-8, no key twice, no NaN, no NUL, nothing that is too deep or too long to read."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from shared.errors import InvalidJson, InvalidRequest


def decode(raw: bytes) -> Any:
    """Return what `raw` says, or raise `InvalidJson` (or `InvalidRequest` naming a field with a NUL in it)."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"not UTF-8: byte {error.start} cannot be read") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise InvalidJson("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # Python's bound on the digits of one number
        raise InvalidJson("a number has too many digits") from error
    if "\\u0000" in text:
        _refuse_nul(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidRequest(f"{key[:64]}: given twice", param=key)
        found[key] = value
    return found


def _refuse(constant: str) -> NoReturn:
    raise InvalidJson(f"{constant} is not JSON")


def _refuse_nul(value: Any) -> None:
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, str) and "\0" in item:
            raise InvalidRequest(f"{path or 'body'}: holds a NUL character", param=path or None)
        if isinstance(item, dict):
            if any("\0" in key for key in item):
                raise InvalidRequest(f"{path or 'body'}: a key holds a NUL character", param=path or None)
            todo += [(f"{path}.{key}" if path else key, child) for key, child in item.items()]
        elif isinstance(item, list):
            todo += [(path, child) for child in item]
