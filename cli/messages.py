"""Messages on stderr; imports nothing that `fusequeue up` would keep in memory."""

import sys

MAX_ERROR_CHARS = 2000
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def one_line(text: str) -> str:
    """Return text on one line, without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)


def counted(number: int, nouns: str) -> str:
    """Return a number of things in words: `1 job`, `2 jobs`."""
    return f"{number} {nouns if number != 1 else nouns.removesuffix('s')}"


def readable(nbytes: int) -> str:
    """Return a number of bytes with the unit that suits it: `59.2 KiB`."""
    size, unit = next((one for one in _UNITS if nbytes >= one[0]), _UNITS[-1])
    return f"{nbytes / size:.1f} {unit}"


def print_error(text: object) -> None:
    """Print an error on one line of stderr."""
    print(f"fusequeue: {one_line(str(text))[:MAX_ERROR_CHARS]}", file=sys.stderr)
