"""Objects as text: rows of columns, or blocks of lines where a terminal is too narrow for these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from datetime import datetime

from rich.cells import cell_len, set_cell_size

from cli.messages import one_line

GAP = "  "
MIN_LAST_COLUMN = 12
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Row = Sequence[str]


def cell(value: object) -> str:
    """Return a value as the text of a cell."""
    if value is None:
        return ""
    return one_line(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def age(at: datetime, now: datetime) -> str:
    """Return how long ago something was, in its largest unit."""
    seconds = max(0, int((now - at).total_seconds()))
    return next((f"{seconds // size} {unit}" for size, unit in _UNITS if seconds >= size), "0 s")


def fitting(rows: Sequence[Row], width: int) -> list[Row] | None:
    """Return the columns of a table that a terminal has room for, or None if it is too narrow for a table.

    The first row has the names of the columns. Those without a value are left out, and if need be those of zeros.
    """
    fewer = (_with_values(rows, nothing) for nothing in ({""}, {"", "0"}))
    return next((shown for shown in fewer if _fits(shown, width)), None)


def _with_values(rows: Sequence[Row], nothing: Set[str]) -> list[Row]:
    """Return rows without the columns in which there is nothing. The last one stays, as it can be cut."""
    last = len(rows[0]) - 1
    used = [at for at in range(last + 1) if at == last or not all(row[at] in nothing for row in rows[1:])]
    return [[row[at] for at in used] for row in rows]


def _fits(rows: Sequence[Row], width: int) -> bool:
    """Return whether a terminal is wide enough for columns of which only the last one is cut."""
    *fixed, last = (max(map(cell_len, column)) for column in zip(*rows, strict=True))
    return sum(fixed) + len(GAP) * len(fixed) + min(last, MIN_LAST_COLUMN) <= width


def aligned(rows: Sequence[Row], width: int | None) -> Iterator[str]:
    """Yield rows of cells as lines of columns, of which only the last is cut to `width`: an id is never cut."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        widths[-1] = min(widths[-1], max(MIN_LAST_COLUMN, width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)))
    for *cells, last in rows:
        fixed = (set_cell_size(text, size) for text, size in zip(cells, widths, strict=False))
        yield GAP.join((*fixed, _cut(last, widths[-1]))).rstrip()


def blocks(rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield each row but the first, which has the names, as lines of a name and a value, and an empty line after it."""
    names, *others = _with_values(rows, {""})
    first = max(map(cell_len, names))
    for row in others:
        for at, (name, text) in enumerate(zip(names, row, strict=True), 1):
            shown = _cut(text, max(MIN_LAST_COLUMN, width - first - len(GAP))) if at == len(names) else text
            yield f"{set_cell_size(name, first)}{GAP}{shown}".rstrip()
        yield ""


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
