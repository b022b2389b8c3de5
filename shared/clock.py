"""The one place that reads the wall clock, and the ids that are made from it."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def now_ms() -> int:
    """Return milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def new_id(prefix: str, at_ms: int | None = None) -> str:
    """Return `prefix_` and 26 characters that sort by time: 48 bits of clock, 80 bits of chance (as a ULID)."""
    number = ((now_ms() if at_ms is None else at_ms) << 80) | secrets.randbits(80)
    digits = []
    for _ in range(26):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return f"{prefix}_{''.join(reversed(digits))}"
