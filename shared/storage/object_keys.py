"""What both kinds of storage agree on: which keys there are, and what is known of an object."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_KEY_CHARS = 512
CHUNK_BYTES = 256 * 1024

# No part begins with a dot: that excludes `.` and `..`, and leaves dot names to the folder's own use.
_PART = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_KEY = re.compile(rf"{_PART}(/{_PART})*")


@dataclass(frozen=True)
class ObjectInfo:
    """An object's size in bytes, content type and etag; the etag changes whenever the content does."""

    size: int
    content_type: str
    etag: str


def check_key(key: str) -> str:
    """Return `key` if it is one, else raise `ValueError`: a key that leaves its place is a bug of ours."""
    if len(key) > MAX_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(f"{key[:MAX_KEY_CHARS]!r} is no storage key")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` without its closing slash; the same rule as for keys."""
    return check_key(prefix.removesuffix("/"))


def span(start: int, end: int | None) -> int | None:
    """Return how many bytes [start, end) asks for at most, None for no bound."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"[{start}, {end}) is no range")
    return None if end is None else end - start
