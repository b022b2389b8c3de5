"""Tables and percentiles of simulations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of values in ascending order."""
    return values[min(len(values) - 1, int(share * len(values)))]


def print_table(columns: str, rows: Iterable[Sequence[object]]) -> None:
    """Print a table in Markdown, each row as soon as it is known; `columns` are separated by bars."""
    print(f"| {columns} |\n|{'---|' * len(columns.split('|'))}")
    for row in rows:
        print("|", " | ".join("" if cell is None else str(cell) for cell in row), "|", flush=True)
