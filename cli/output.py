"""What commands print, and the status they end with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from fusequeue import Busy, ClientError, JobFailed, NotFound, RefusedError, Unauthorized, Unreachable, WaitTimeout


class Exit(IntEnum):
    """Exit statuses, for scripts."""

    OK = 0
    FAILED = 1  # a job ended without a result, or a check did not pass
    USAGE = 2  # a bad argument, field or setting
    UNREACHABLE = 3  # no service, or it is full: later may go better
    NOT_FOUND = 4
    DENIED = 5  # the key is missing, expired, or may not do this
    TIMEOUT = 6  # the job goes on


class CommandConsole:
    """Where a command's words go: results to stdout, as a table or as JSON; the rest to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(soft_wrap=True, highlight=False)
        self.err = Console(stderr=True, soft_wrap=True, highlight=False)

    def say(self, words: str) -> None:
        """Print a word to a person, who is not there when JSON was asked for."""
        if not self.as_json:
            self.out.print(words, markup=False)

    def one(self, value: BaseModel | Mapping[str, Any], lines: Iterable[tuple[str, object]]) -> None:
        """Print one thing: its `lines` to a person, all of it as JSON."""
        if self.as_json:
            self._json(value)
            return
        grid = Table.grid(padding=(0, 2))
        for name, told in lines:
            grid.add_row(name, _cell(told))
        self.out.print(grid)

    def table(
        self, rows: Iterable[tuple[BaseModel | Mapping[str, Any], Sequence[object]]], columns: Sequence[str]
    ) -> None:
        """Print many things: a row each, or a line of JSON each as they come."""
        if self.as_json:
            for value, _ in rows:
                self._json(value)
            return
        shown = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for _, cells in rows:
            shown.add_row(*map(_cell, cells))
        self.out.print(shown if shown.row_count else "none", markup=False)

    def _json(self, value: BaseModel | Mapping[str, Any]) -> None:
        told = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        self.out.print(json.dumps(told, ensure_ascii=False), markup=False, soft_wrap=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


_STATUSES: tuple[tuple[type[ClientError], Exit], ...] = (
    (JobFailed, Exit.FAILED),
    (WaitTimeout, Exit.TIMEOUT),
    (Unreachable, Exit.UNREACHABLE),
    (Busy, Exit.UNREACHABLE),
    (NotFound, Exit.NOT_FOUND),
    (Unauthorized, Exit.DENIED),
    (RefusedError, Exit.USAGE),
)


def status_of(error: ClientError) -> Exit:
    """Return the exit status for an error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), Exit.FAILED)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Tell an error in one line and end with its status; Ctrl-C ends with 130."""
    try:
        yield
    except ClientError as error:
        field = f"{error.param}: " if isinstance(error, RefusedError) and error.param not in (None, "") else ""
        message = str(error)
        print(f"fusequeue: {'' if message.startswith(field) else field}{message}", file=sys.stderr)
        raise typer.Exit(status_of(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
