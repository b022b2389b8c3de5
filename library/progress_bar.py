"""The bar of the items that are done, in terminals and notebooks."""

from __future__ import annotations

import importlib.util

from rich import get_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn


def items_bar(*, shown: bool) -> Progress:
    """Return a bar, which is a text in a notebook without ipywidgets: Rich would show none there, but a warning."""
    console = get_console()
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
        console = Console(force_jupyter=False, force_terminal=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not shown)
