"""Strict JSON: UTF-8, no duplicate keys, no NaN, no NUL, no half of a surrogate pair; depth and numbers are limited."""

import json
import re
from typing import Any, NoReturn

from shared.errors import InvalidJson, InvalidRequest

_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(raw: bytes) -> Any:
    """Return the decoded value, or raise `InvalidJson`, or `InvalidRequest` naming the field."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"invalid UTF-8 at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise InvalidJson("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"invalid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # Python limits the digits of a number
        raise InvalidJson("a number has too many digits") from error
    if "\\u" in text:
        _check_texts(value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InvalidRequest(f"duplicate key: {key[:64]}", param=key)
        result[key] = value
    return result


def _refuse(constant: str) -> NoReturn:
    raise InvalidJson(f"invalid JSON: {constant}")


def _check_texts(value: Any) -> None:
    """Raise `InvalidRequest` for texts that only escapes can make: they are no UTF-8, or end a string elsewhere."""
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, str) and (fault := _fault(item)):
            raise InvalidRequest(f"{path or 'body'}: contains {fault}", param=path or None)
        if isinstance(item, dict):
            if fault := next(filter(None, map(_fault, item)), None):
                raise InvalidRequest(f"{path or 'body'}: a key contains {fault}", param=path or None)
            pending += [(f"{path}.{key}" if path else key, child) for key, child in item.items()]
        elif isinstance(item, list):
            pending += [(path, child) for child in item]


def _fault(text: str) -> str | None:
    if "\0" in text:
        return "a NUL character"
    return None if text.isascii() or not _SURROGATE.search(text) else "half of a surrogate pair"
