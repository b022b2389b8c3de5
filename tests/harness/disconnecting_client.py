"""A client that hangs up in the middle of its request, for tests."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NoReturn

import httpx
from redis import Redis

from harness.waiting import wait_until


def hang_up(request: httpx.Request, when: Callable[[], object]) -> NoReturn:
    """Send a request whole, close its connection once `when()` holds, and raise `ReadTimeout` as a hasty client does.

    A client with a short timeout might be gone before its request was read: then nothing comes of it.
    """
    sent = [f"{request.method} {request.url.raw_path.decode('ascii')} HTTP/1.1".encode("ascii")]
    sent += [name + b": " + value for name, value in request.headers.raw]
    with socket.create_connection((request.url.host, request.url.port or 80), timeout=60) as connection:
        connection.sendall(b"\r\n".join([*sent, b"", b""]) + request.read())
        wait_until(when, "there is something to hang up on")
    raise httpx.ReadTimeout("the client has hung up", request=request)


def a_write_waits(client: Redis) -> bool:
    """Say whether something that was sent to Redis is held up, as writes are in a `CLIENT PAUSE`; no blocking read."""
    return any("b" in one["flags"] and one["cmd"] != "xread" for one in client.client_list())
