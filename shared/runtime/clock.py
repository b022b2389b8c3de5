"""The one place that reads the wall clock, and the ids that are made from it."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_DIGITS = 26


def now_ms() -> int:
    """Return milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def new_id(prefix: str, at_ms: int | None = None) -> str:
    """Return `prefix_` and 26 characters that sort by time: 48 bits of clock, 80 bits of chance (as a ULID)."""
    return made_id(prefix, now_ms() if at_ms is None else at_ms, secrets.randbits(80))


def made_id(prefix: str, at_ms: int, rest: int) -> str:
    """Return the id of a moment and 80 bits that tell it from others of that moment."""
    number = (at_ms << 80) | rest
    digits = []
    for _ in range(_DIGITS):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return f"{prefix}_{''.join(reversed(digits))}"


def made_at_ms(made: str) -> int | None:
    """Return the time that an id of `new_id` was made for, None for what is no such id."""
    digits = made.rpartition("_")[2]
    if len(digits) != _DIGITS or not set(digits) <= set(_ALPHABET):
        return None
    number = 0
    for digit in digits:
        number = 32 * number + _ALPHABET.index(digit)
    return number >> 80
