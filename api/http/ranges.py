"""Byte ranges of RFC 9110: which part of an object a `Range` header asks for."""

from __future__ import annotations

import re

from api.errors import RangeNotSatisfiable

_ONE_RANGE = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.IGNORECASE)


def requested(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes [start, end) that `header` asks for of `size`, None for all of them.

    Several ranges, and what is no range of bytes, are answered with all, as the RFC allows. Raises
    `RangeNotSatisfiable` when the range lies outside.
    """
    found = _ONE_RANGE.fullmatch(header) if header else None
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:  # the last n bytes
        start, end = max(0, size - int(found[2])), size
        if int(found[2]) == 0:
            raise RangeNotSatisfiable("the range is empty", size=size)
    else:
        start = int(found[1])
        end = min(size, int(found[2]) + 1) if found[2] else size
        if found[2] and int(found[2]) < start:
            return None
    if start >= size:
        raise RangeNotSatisfiable(f"the object has {size} bytes", size=size)
    return start, end
