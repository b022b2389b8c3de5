"""Strict JSON: UTF-8, no duplicate keys, no NaN, no NUL, no half of a surrogate pair; bounded in depth and size."""

import json
import re
from codecs import BOM_UTF8
from typing import Any, NoReturn

from shared.errors import InvalidJson, InvalidRequest

MAX_VALUES = 1_000
"""In all objects and lists. A request has some 100; each invalid one costs its validation up to 15 us."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(raw: bytes) -> Any:
    """Return the decoded value, or raise `InvalidJson`, or `InvalidRequest` naming the field.

    A byte order mark before it is left out: editors and shells of Windows write one.
    """
    try:
        text = raw.removeprefix(BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"invalid UTF-8 at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_Objects().unique, parse_constant=_refuse)
    except RecursionError:
        raise InvalidJson("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise InvalidJson(f"invalid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:  # Python limits the digits of a number
        raise InvalidJson("a number has too many digits") from error
    _check(value, escaped="\\u" in text)
    return value


class _Objects:
    """Makes the objects of one text, and stops at too many: 100,000 took the decoder a third of a second."""

    def __init__(self) -> None:
        self._count = 0

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += 1 + len(pairs)
        _check_count(self._count)
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise InvalidRequest(f"duplicate key: {key[:64]}", param=key)
            result[key] = value
        return result


def _check_count(count: int) -> None:
    if count > MAX_VALUES:
        raise InvalidRequest(f"body: more than {MAX_VALUES} values")


def _refuse(constant: str) -> NoReturn:
    raise InvalidJson(f"invalid JSON: {constant}")


def _check(value: Any, *, escaped: bool) -> None:
    """Raise `InvalidRequest` for too many values, and for texts that only escapes can make.

    Such texts are no UTF-8, or end a string elsewhere.
    """
    pending, count = [("", value)], 0
    while pending:
        path, item = pending.pop()
        if isinstance(item, str) and escaped and (fault := _fault(item)):
            raise InvalidRequest(f"{path or 'body'}: contains {fault}", param=path or None)
        if isinstance(item, dict | list):
            count += len(item)
            _check_count(count)
        if isinstance(item, dict):
            if escaped and (fault := next(filter(None, map(_fault, item)), None)):
                raise InvalidRequest(f"{path or 'body'}: a key contains {fault}", param=path or None)
            pending += [(f"{path}.{key}" if path else key, child) for key, child in item.items()]
        elif isinstance(item, list):
            pending += [(path, child) for child in item]


def _fault(text: str) -> str | None:
    if "\0" in text:
        return "a NUL character"
    return None if text.isascii() or not _SURROGATE.search(text) else "half of a surrogate pair"
