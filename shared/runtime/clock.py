"""Wall clock, sortable ids, and the installed version."""

import time
from importlib.metadata import PackageNotFoundError, version

from ulid import ULID, LaxMonotonicPolicy, ULIDGenerator

try:
    VERSION = version("fusequeue-server")
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


_ids = ULIDGenerator(policy=LaxMonotonicPolicy())


def new_id(prefix: str, at_ms: int | None = None) -> str:
    """Return `prefix_` and a random ULID in lower case; ids sort by time, in one process by call."""
    return f"{prefix}_{_ids.generate(now_ms() if at_ms is None else at_ms)}".lower()


def make_id(prefix: str, at_ms: int, random_bits: int) -> str:
    """Return the id of a time and 80 random bits."""
    return f"{prefix}_{ULID.from_int(at_ms << 80 | random_bits)}".lower()


def id_time_ms(identifier: str) -> int | None:
    """Return the time of an id, or None if it has no valid ULID."""
    text = identifier.rpartition("_")[2]
    try:
        return ULID.from_str(text.upper()).milliseconds if text == text.lower() else None
    except ValueError:
        return None
