"""HTTP client that disconnects before the response."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NoReturn

import httpx
from redis import Redis

from harness.waiting import wait_until


def send_and_disconnect(request: httpx.Request, when: Callable[[], object]) -> NoReturn:
    """Send a whole request, disconnect once `when()` holds, and raise `ReadTimeout` like a client that timed out.

    A client with a short timeout could disconnect before its request is read.
    """
    head = [f"{request.method} {request.url.raw_path.decode('ascii')} HTTP/1.1".encode("ascii")]
    head += [name + b": " + value for name, value in request.headers.raw]
    with socket.create_connection((request.url.host, request.url.port or 80), timeout=60) as connection:
        connection.sendall(b"\r\n".join([*head, b"", b""]) + request.read())
        wait_until(when, "the condition for the disconnect")
    raise httpx.ReadTimeout("the client has disconnected", request=request)


def write_is_blocked(client: Redis) -> bool:
    """Return whether Redis blocks a command, as `CLIENT PAUSE` does with writes; ignores blocking reads."""
    return any("b" in row["flags"] and row["cmd"] != "xread" for row in client.client_list())
