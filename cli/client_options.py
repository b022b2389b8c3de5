"""The options that every command which speaks to a service has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from cli.output import CommandConsole, exit_on_error
from fusequeue import Client

Url = Annotated[
    str | None,
    typer.Option(envvar="FUSEQUEUE_URL", help="The service. Unset: http://127.0.0.1:8000", show_default=False),
]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="FUSEQUEUE_API_KEY", help="Its API key.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object, or one a line.")]


@contextmanager
def connected(url: str | None, key: str | None, as_json: bool) -> Iterator[tuple[Client, CommandConsole]]:
    """Give a client and a screen; errors are told and become exit statuses."""
    with exit_on_error(), Client(url, api_key=key) as client:
        yield client, CommandConsole(as_json)
