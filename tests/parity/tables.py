"""Tables of a page: their rows by the names of their columns, so that a page with fewer columns can be continued."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

_BETWEEN_CELLS = re.compile(r"(?<!\\)\|")


def read_rows(page: str) -> Iterator[Mapping[str, str]]:
    """Yield the rows of all tables of a page."""
    columns: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = _cells(line)
        elif not line.startswith("|---"):
            yield dict(zip(columns, _cells(line), strict=False))


def heading(columns: Iterable[str]) -> str:
    names = list(columns)
    return f"{line_of(names)}\n{'|---' * len(names)}|"


def line_of(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in _BETWEEN_CELLS.split(line)[1:-1]]
