"""The command mcp."""

from typing import Annotated

import typer

from cli.client_options import Exit, Key, Url, exit_on_error
from cli.messages import print_error
from fusequeue import Client


def mcp(
    url: Url = None,
    key: Key = None,
    http: Annotated[
        bool, typer.Option("--http", help="Serve http://127.0.0.1:PORT/mcp; clients send the key.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")] = 8100,
) -> None:
    """Serve the tools generate, status, result and batch to MCP clients, over stdio by default."""
    try:
        from cli.mcp.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        print_error("mcp is not installed: pip install 'fusequeue-server[mcp]'")
        raise typer.Exit(Exit.USAGE) from None
    with exit_on_error():
        Client(url, api_key=key).close()  # refuses a URL or key that cannot be used
        serve(url, key, port if http else None)
