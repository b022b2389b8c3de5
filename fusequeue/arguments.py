"""Checks of arguments before anything is sent; `InvalidArgument` names the one that is wrong."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fusequeue.errors import InvalidArgument
from fusequeue.response_types import Resource

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def seconds(name: str, value: object) -> float:
    """Return a duration; None and infinity are no limit."""
    if value is None:
        return math.inf
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not number >= 0:  # NaN is not either
        raise InvalidArgument(f"{name}: {value!r:.80} is not a number of seconds from 0")
    return number


def finite_seconds(name: str, value: object) -> float:
    """Return a duration that has an end."""
    number = seconds(name, value)
    if number == math.inf:
        raise InvalidArgument(f"{name}: {value!r:.80} has no end; use a number of seconds")
    return number


def whole(name: str, value: object) -> int:
    """Return a whole number from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"{name}: {value!r:.80} is not a whole number from 0")
    return value


def key(value: str | None, default: str) -> str:
    """Return an Idempotency-Key, by default a new one."""
    if value is None:
        return default
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise InvalidArgument(f"idempotency_key: {value!r:.80} is not 1 to 255 visible ASCII characters")
    return value


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Return names and values; None is an empty mapping."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name}: {value!r:.80} has no names and values, such as {{'name': 'value'}}")
    return value


def callback(name: str, value: object) -> None:
    """Raise `InvalidArgument` for what cannot be called; None is no callback."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name}: {value!r:.80} is not a function")


def folder_path(name: str, value: object) -> Path:
    """Return the path of a folder."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidArgument(f"{name}: {value!r:.80} is not a path")
    return Path(value)


def path_of(collection: str, item: Resource | str, action: str = "") -> str:
    """Return the URL path of an object, or of its id."""
    item_id = item if isinstance(item, str) else getattr(item, "id", None)
    if not isinstance(item_id, str):
        raise InvalidArgument(f"invalid id: {item!r:.80}; use a text, or the object itself")
    if item_id.strip(". ") == "":  # `.` and `..` name other paths
        raise InvalidArgument(f"invalid id: {item_id!r}")
    try:
        return f"{collection}/{quote(item_id, safe='')}{action}"
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"invalid id: {item_id!r}") from error


def json_text(body: Mapping[str, Any], where: str = "") -> str:
    """Return a body as JSON on one line; `where` goes before the name of a field that cannot be sent."""
    try:
        return _dumps(body)
    except (ValueError, TypeError, RecursionError) as error:
        for name, value in body.items():
            try:
                _dumps({name: value})
            except (ValueError, TypeError, RecursionError) as reason:
                raise InvalidArgument(f"{where}{name}: it cannot be sent as JSON: {reason}") from error
        raise InvalidArgument(f"{where or 'body: '}it cannot be sent as JSON: {error}") from error


def _dumps(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    """Return what JSON has for mappings and sequences of other types, a time as ISO 8601 and a delay in seconds."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise TypeError(f"{value} has no time zone; use datetime.now(UTC), or value.astimezone()")
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}")
