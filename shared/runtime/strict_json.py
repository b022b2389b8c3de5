"""Strict JSON: UTF-8, no duplicate keys, no NaN, no NUL; depth and number length are limited."""

import json
from typing import Any, NoReturn

from shared.errors import InvalidJson, InvalidRequest


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
    if "\\u0000" in text:
        _refuse_nul(value)
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


def _refuse_nul(value: Any) -> None:
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if isinstance(item, str) and "\0" in item:
            raise InvalidRequest(f"{path or 'body'}: contains a NUL character", param=path or None)
        if isinstance(item, dict):
            if any("\0" in key for key in item):
                raise InvalidRequest(f"{path or 'body'}: a key contains a NUL character", param=path or None)
            pending += [(f"{path}.{key}" if path else key, child) for key, child in item.items()]
        elif isinstance(item, list):
            pending += [(path, child) for child in item]
