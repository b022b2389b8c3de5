"""Wall clock, sortable ids, and the installed version."""

import secrets
import time
from importlib.metadata import PackageNotFoundError, version

from ulid import ULID

try:
    VERSION = version("fusequeue")
except PackageNotFoundError:  # run from a checkout that is not installed
    VERSION = "0"


def now_ms() -> int:
    """Return milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class SyncedClock:
    """The clock of another machine, read once: `at_ms` then, continued with this machine's monotonic clock."""

    def __init__(self, at_ms: int) -> None:
        self._ahead_ms = at_ms - time.monotonic_ns() // 1_000_000

    def now_ms(self) -> int:
        return self._ahead_ms + time.monotonic_ns() // 1_000_000


def epoch_s(at_ms: int | None) -> int | None:
    """Return whole seconds of a time in ms."""
    return None if at_ms is None else at_ms // 1000


_last = (0, 0)  # time and random bits of the newest id


def new_id(prefix: str, at_ms: int | None = None) -> str:
    """Return `prefix_` and a random ULID in lower case; ids sort by time, in one process by call."""
    global _last
    at_ms = now_ms() if at_ms is None else at_ms
    last_ms, last_bits = _last
    # Of 80 bits the first is 0, which leaves room for 65,000 ids that follow one another in a millisecond.
    bits = last_bits + 1 + secrets.randbits(64) if at_ms == last_ms else secrets.randbits(79)
    bits &= (1 << 80) - 1
    _last = (at_ms, bits)
    return make_id(prefix, at_ms, bits)


# Two characters at a time: `str(ULID(...))` takes three times as long, and each request makes two ids.
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _DIGITS for second in _DIGITS]
_SHIFTS = range(120, -1, -10)


def make_id(prefix: str, at_ms: int, random_bits: int) -> str:
    """Return the id of a time and 80 random bits."""
    value = at_ms << 80 | random_bits
    return f"{prefix}_{''.join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])}"


def id_time_ms(identifier: str) -> int | None:
    """Return the time of an id, or None if it has no valid ULID."""
    text = identifier.rpartition("_")[2]
    try:
        return ULID.from_str(text.upper()).milliseconds if text == text.lower() else None
    except ValueError:
        return None
