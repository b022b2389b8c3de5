"""Options, output and exit statuses of all commands that call a service."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from fusequeue import Client, ClientError, RefusedError, errors

Url = Annotated[str | None, typer.Option(envvar="FUSEQUEUE_URL", help="Service. Default: http://127.0.0.1:8000")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="FUSEQUEUE_API_KEY", help="API key of the service.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")]
Fields = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="Any request field, e.g. -s steps=20 -s seed=7."),
]
Object: TypeAlias = BaseModel | Mapping[str, Any]
T = TypeVar("T", bound=Object)


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

    def record(self, value: Object, lines: Iterable[tuple[str, object]]) -> None:
        """Print one object: its (name, value) `lines`, or all of it as JSON."""
        if self.as_json:
            self._json(value)
            return
        grid = Table.grid(padding=(0, 2))
        for name, cell in lines:
            grid.add_row(name, _cell(cell))
        self.out.print(grid)

    def table(self, values: Iterable[T], columns: Sequence[str], cells: Callable[[T], Sequence[object]]) -> None:
        """Print objects as rows of `cells`, or each as a line of JSON as it arrives."""
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for value in values:
            if self.as_json:
                self._json(value)
            else:
                table.add_row(*map(_cell, cells(value)))
        if self.as_json:
            return
        self.out.print(table if table.row_count else "none", markup=False)

    def _json(self, value: Object) -> None:
        data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        self.out.print(json.dumps(data, ensure_ascii=False), markup=False, soft_wrap=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


_STATUSES: dict[type[ClientError], Exit] = {  # the base class after its subclasses
    errors.WaitTimeout: Exit.TIMEOUT,
    errors.Unreachable: Exit.UNREACHABLE,
    errors.Busy: Exit.UNREACHABLE,
    errors.NotFound: Exit.NOT_FOUND,
    errors.Unauthorized: Exit.DENIED,
    RefusedError: Exit.USAGE,
}


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a client error on one line and exit with its status; Ctrl-C exits with 130."""
    try:
        yield
    except ClientError as error:
        field = f"{error.param}: " if isinstance(error, RefusedError) and error.param not in (None, "") else ""
        message = str(error)
        print(f"fusequeue: {'' if message.startswith(field) else field}{message}", file=sys.stderr)
        status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), Exit.FAILED)
        raise typer.Exit(status) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def connected(url: str | None, key: str | None, as_json: bool) -> Iterator[tuple[Client, CommandConsole]]:
    """Yield a client and a console; client errors become messages and exit statuses."""
    with exit_on_error(), Client(url, api_key=key) as client:
        yield client, CommandConsole(as_json)
