"""Options, output and exit statuses of all commands that call a service."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from pydantic import BaseModel
from rich.cells import cell_len, set_cell_size
from rich.console import Console

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
GAP = "  "
MIN_LAST_COLUMN = 12


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
        rows = [(name, _cell(cell)) for name, cell in lines]
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            self.out.print(f"{name:<{width}}  {text}".rstrip(), markup=False)

    def table(self, values: Iterable[T], columns: Sequence[str], cells: Callable[[T], Sequence[object]]) -> None:
        """Print objects as rows of `cells`, or each as a line of JSON as it arrives."""
        if self.as_json:
            for value in values:
                self._json(value)
            return
        rows = [[_cell(cell) for cell in cells(value)] for value in values]
        if not rows:
            self.out.print("none")
            return
        head, *lines = aligned([list(columns), *rows], self.out.width if self.out.is_terminal else None)
        self.out.print(head, style="bold", markup=False)
        for line in lines:
            self.out.print(line, markup=False)

    def _json(self, value: Object) -> None:
        data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        self.out.print(json.dumps(data, ensure_ascii=False), markup=False, soft_wrap=True)


def aligned(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Yield rows of cells as lines of columns, of which only the last is cut to `width`: an id is never cut."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if width is not None:
        widths[-1] = min(widths[-1], max(MIN_LAST_COLUMN, width - sum(widths[:-1]) - len(GAP) * (len(widths) - 1)))
    for *cells, last in rows:
        if cell_len(last) > widths[-1]:
            last = set_cell_size(last, widths[-1] - 1) + "…"
        fixed = (set_cell_size(cell, size) for cell, size in zip(cells, widths, strict=False))
        yield GAP.join((*fixed, last)).rstrip()


def _cell(value: object) -> str:
    """Return a value as text on one line, without what a terminal would obey."""
    if value is None:
        return ""
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "".join(char if char.isprintable() else " " for char in text)


_STATUSES: dict[type[ClientError], Exit] = {  # the base class after its subclasses
    errors.WaitTimeout: Exit.TIMEOUT,
    errors.Unreachable: Exit.UNREACHABLE,
    errors.UnexpectedResponse: Exit.UNREACHABLE,
    errors.InvalidArgument: Exit.USAGE,
    errors.Busy: Exit.UNREACHABLE,
    errors.NotFound: Exit.NOT_FOUND,
    errors.Unauthorized: Exit.DENIED,
    RefusedError: Exit.USAGE,
}


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a client error, a line for each fault, and exit with its status; Ctrl-C exits with 130."""
    try:
        yield
    except ClientError as error:
        faults = error.errors if isinstance(error, RefusedError) else (error,)
        for fault in faults:
            print(f"fusequeue: {fault}", file=sys.stderr)
        status = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), Exit.FAILED)
        raise typer.Exit(status) from None
    except BrokenPipeError:
        raise  # of `| head`; click ends the command without a message
    except OSError as error:
        print(f"fusequeue: {error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
        raise typer.Exit(Exit.USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def connected(url: str | None, key: str | None, as_json: bool) -> Iterator[tuple[Client, CommandConsole]]:
    """Yield a client and a console; client errors become messages and exit statuses."""
    with exit_on_error(), Client(url, api_key=key) as client:
        yield client, CommandConsole(as_json)
