"""Options, output and exit statuses of all commands that call a service."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from fusequeue import (
    Busy,
    Client,
    ClientError,
    JobFailed,
    NotFound,
    RefusedError,
    Unauthorized,
    Unreachable,
    WaitTimeout,
)

Url = Annotated[
    str | None,
    typer.Option(envvar="FUSEQUEUE_URL", help="URL of the service. Default: http://127.0.0.1:8000", show_default=False),
]
Key = Annotated[
    str | None,
    typer.Option("--api-key", envvar="FUSEQUEUE_API_KEY", help="API key of the service.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")]


class Exit(IntEnum):
    """Exit statuses, for scripts."""

    OK = 0
    FAILED = 1  # a job ended without a result, or a check failed
    USAGE = 2  # a bad argument, field or setting
    UNREACHABLE = 3  # no service, or it is full: retry later
    NOT_FOUND = 4
    DENIED = 5  # the key is missing, expired, or lacks the scope
    TIMEOUT = 6  # the job continues


class CommandConsole:
    """Output of a command: results to stdout as a table or as JSON, everything else to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(soft_wrap=True, highlight=False)
        self.err = Console(stderr=True, soft_wrap=True, highlight=False)

    def message(self, text: str) -> None:
        """Print a message, except with --json."""
        if not self.as_json:
            self.out.print(text, markup=False)

    def record(self, value: BaseModel | Mapping[str, Any], lines: Iterable[tuple[str, object]]) -> None:
        """Print one object: its (name, value) `lines`, or all of it as JSON."""
        if self.as_json:
            self._json(value)
            return
        grid = Table.grid(padding=(0, 2))
        for name, cell in lines:
            grid.add_row(name, _cell(cell))
        self.out.print(grid)

    def table(
        self, rows: Iterable[tuple[BaseModel | Mapping[str, Any], Sequence[object]]], columns: Sequence[str]
    ) -> None:
        """Print (object, cells) rows as a table, or each object as a line of JSON as it arrives."""
        if self.as_json:
            for value, _ in rows:
                self._json(value)
            return
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for _, cells in rows:
            table.add_row(*map(_cell, cells))
        self.out.print(table if table.row_count else "none", markup=False)

    def _json(self, value: BaseModel | Mapping[str, Any]) -> None:
        data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        self.out.print(json.dumps(data, ensure_ascii=False), markup=False, soft_wrap=True)


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


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a client error on one line and exit with its status; Ctrl-C exits with 130."""
    try:
        yield
    except ClientError as error:
        field = f"{error.param}: " if isinstance(error, RefusedError) and error.param not in (None, "") else ""
        message = str(error)
        print(f"fusequeue: {'' if message.startswith(field) else field}{message}", file=sys.stderr)
        status = next((status for kind, status in _STATUSES if isinstance(error, kind)), Exit.FAILED)
        raise typer.Exit(status) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def connected(url: str | None, key: str | None, as_json: bool) -> Iterator[tuple[Client, CommandConsole]]:
    """Yield a client and a console; client errors become messages and exit statuses."""
    with exit_on_error(), Client(url, api_key=key) as client:
        yield client, CommandConsole(as_json)
