"""Options, output and exit statuses of all commands that call a service."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console

from cli.messages import print_error
from cli.tables import Row, aligned, blocks, cell, fitting
from fusequeue import Client, ClientError, RefusedError, errors

Url = Annotated[str | None, typer.Option(envvar="FUSEQUEUE_URL", help="Service. Default: http://127.0.0.1:8000")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="FUSEQUEUE_API_KEY", help="API key of the service.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")]
Chosen = dict[str, Any]
"""The options of a table that a command was given, by name."""

Object: TypeAlias = BaseModel | Mapping[str, Any]
T = TypeVar("T", bound=Object)
MAX_NAME_CHARS = 1000


class Exit(IntEnum):
    """Exit statuses, for scripts."""

    OK = 0
    FAILED = 1  # a job ended without a result, or a check failed
    USAGE = 2  # a bad argument, field or setting
    UNREACHABLE = 3  # no service, or it is full: retry later
    NOT_FOUND = 4
    DENIED = 5  # the key is missing, expired, or lacks the scope
    TIMEOUT = 6  # the job continues


def text_option(value: str | list[str] | None) -> str | list[str] | None:
    """Return the text or texts of an option; raises `BadParameter` for bytes that are not UTF-8."""
    for text in [value] if isinstance(value, str) else value or ():
        if not is_text(text):
            raise typer.BadParameter(f"{text[:80]!r} is not UTF-8")
    return value


def is_text(argument: str) -> bool:
    """Return whether an argument is text; other bytes have become surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in argument)


def name_option(value: str | list[str] | None) -> str | list[str] | None:
    """Return the ids or names of an option; raises `BadParameter` for what no URL can hold."""
    for name in [value] if isinstance(value, str) else value or ():
        text_option(name)
        if len(name) > MAX_NAME_CHARS:
            raise typer.BadParameter(f"{name[:40]!r}... has more than {MAX_NAME_CHARS} characters")
    return value


def ids_option(value: list[str] | None) -> list[str] | None:
    """Return the ids of an argument; raises `BadParameter` for a filter among them, which is an option."""
    name_option(value)
    for name, separator, text in (one.partition("=") for one in value or ()):
        if separator:
            option = f"--{name.lstrip('-').replace('_', '-')} {text}".rstrip()
            raise typer.BadParameter(f"{name}={text} is no id; filters are options, such as {option[:80]}")
    return value


def finite_option(value: float | None) -> float | None:
    """Return the number of an option; raises `BadParameter` for NaN and infinity, which no minimum excludes."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def takes(options: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command, which gets those that were given as `chosen`."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**values: Any) -> None:
            chosen = {name: value for name in options if (value := values.pop(name)) not in (None, [])}
            command(**values, chosen=chosen)

        own = [one for one in signature(command).parameters.values() if one.name != "chosen"]
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in options.items()
        ]
        parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in own] + more
        run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return add


class CommandConsole:
    """Output of a command: results to stdout as a table or as JSON, everything else to stderr."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = Console(soft_wrap=True, highlight=False, emoji=False)  # else rich replaces `:cat:` in prompts
        self.err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

    def record(self, value: Object, lines: Iterable[tuple[str, object]]) -> None:
        """Print one object: its (name, value) `lines`, or all of it as JSON."""
        if self.as_json:
            self._json(value)
            return
        rows = [(name, cell(value)) for name, value in lines]
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            self.out.print(f"{name:<{width}}  {text}".rstrip(), markup=False)

    def table(self, values: Iterable[T], columns: Sequence[str], cells: Callable[[T], Sequence[object]]) -> None:
        """Print objects as rows of `cells`, as blocks where a terminal is too narrow for these, or each as a line of
        JSON as it arrives."""
        if self.as_json:
            for value in values:
                self._json(value)
            return
        rows: list[Row] = [[cell(one) for one in cells(value)] for value in values]
        if not rows:
            self.out.print("none")
            return
        self.rows([list(columns), *rows])

    def rows(self, rows: Sequence[Row]) -> None:
        """Print rows of texts, of which the first has the names of the columns."""
        width = self.out.width if self.out.is_terminal else None
        shown = rows if width is None else fitting(rows, width)
        if shown is None:
            for line in blocks(rows, self.out.width):
                self.out.print(line, markup=False)
            return
        head, *lines = aligned(shown, width)
        self.out.print(head, style="bold", markup=False)
        for line in lines:
            self.out.print(line, markup=False)

    def _json(self, value: Object) -> None:
        data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
        text = json.dumps(data, ensure_ascii=not self.out.encoding.startswith("utf"))
        escaped = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
        self.out.print(escaped, markup=False, soft_wrap=True)


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
        raise typer.Exit(print_client_error(error)) from None
    except BrokenPipeError:
        raise  # of `| head`; click ends the command without a message
    except OSError as error:
        print_error(f"{error.filename or 'file'}: {error.strerror or error}")
        raise typer.Exit(Exit.USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def print_client_error(error: ClientError) -> Exit:
    """Print an error of the client, a line for each fault, and return its exit status."""
    if isinstance(error, errors.Unauthorized) and error.code == "missing_api_key":
        print_error("no API key: name one by --api-key or FUSEQUEUE_API_KEY; `fusequeue keys create` creates one")
        return Exit.DENIED
    for fault in error.errors if isinstance(error, RefusedError) else (error,):
        print_error(fault)
    return next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), Exit.FAILED)


def for_each(items: Iterable[str], action: Callable[[str], None]) -> None:
    """Call `action` with every item, also after one that is refused; the first refusal gives the exit status."""
    statuses = []
    for item in items:
        try:
            action(item)
        except (RefusedError, errors.InvalidArgument) as error:
            if isinstance(error, errors.Busy | errors.Unauthorized):
                raise
            statuses.append(print_client_error(error))
    if statuses:
        raise typer.Exit(statuses[0])


@contextmanager
def connected(url: str | None, key: str | None, as_json: bool) -> Iterator[tuple[Client, CommandConsole]]:
    """Yield a client and a console; client errors become messages and exit statuses."""
    with exit_on_error(), Client(url, api_key=key) as client:
        yield client, CommandConsole(as_json)
