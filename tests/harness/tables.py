"""Tables of cases that one test runs on one API: a new one for each case takes longer than the case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def row(*values: object) -> Iterator[None]:
    """Name the row of the table in an error of the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the row {repr(values)[:500]}")
        raise
