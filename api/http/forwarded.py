"""What a trusted proxy says of the request that its client sent: X-Forwarded-For, -Proto, -Host, -Port, -Prefix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from api.keyless import valid_host

PREFIX_KEY = "forwarded_prefix"
"""Of a scope: the path below which the proxy serves this API."""

_START = b"x-forwarded-"
_DEFAULT_PORTS = ("80", "443")  # of the scheme, or of another one, which the proxy does not name
_PREFIX = re.compile(r"(/(?!\.{1,2}(/|$))[A-Za-z0-9._~!$&'()*+;=:@-]+)*")
_MAX_PREFIX_CHARS = 256


class TrustedProxies(Protocol):
    """The addresses of the proxies, as uvicorn keeps them."""

    def __contains__(self, host: str | None) -> bool: ...

    def get_trusted_client_address(self, x_forwarded_for: str) -> tuple[str, int]:
        """Return the last address of a list that is not a trusted proxy's."""
        ...


class ForwardedHeaders:
    """ASGI middleware: gives a request from a trusted proxy the client, scheme, host and path that its client used.

    uvicorn's reads the client and a single scheme. Values that cannot be are ignored, also in a list.
    """

    def __init__(self, app: ASGIApp, proxies: TrustedProxies) -> None:
        self._app = app
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            peer = scope.get("client")
            if (None if peer is None else peer[0]) in self._proxies:
                _apply(scope, self._proxies.get_trusted_client_address)
        await self._app(scope, receive, send)


def _apply(scope: MutableMapping[str, Any], client_of: Callable[[str], tuple[str, int]]) -> None:
    lists = _forwarded(scope["headers"])
    if not lists:
        return
    if addresses := lists.get("for"):
        host, port = client_of(",".join(addresses))
        if host:
            scope["client"] = (host, port)
    scheme = lists.get("proto", [""])[0].lower()
    if scheme in ("http", "https"):
        scope["scheme"] = scheme
    scope[PREFIX_KEY] = forwarded_prefix(lists.get("prefix", ()))
    own = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    host = forwarded_host(own, lists.get("host", [""])[0], lists.get("port", [""])[0])
    if host != own:
        others = [header for header in scope["headers"] if header[0] != b"host"]
        scope["headers"] = [(b"host", host.encode("ascii")), *others]


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    """Return the entries of each X-Forwarded header; the first is the client's proxy's."""
    lists: dict[str, list[str]] = {}
    for name, value in headers:
        if name.startswith(_START):
            entries = (entry.strip() for entry in value.decode("latin-1").split(","))
            lists.setdefault(name[len(_START) :].decode("latin-1"), []).extend(entries)
    return lists


def forwarded_host(own: str, host: str, port: str) -> str:
    """Return the host, with its port, that the client used; `own` is that of the request."""
    found = host if valid_host(host) is not None and _port_is_valid(host) else own
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65_535):
        return found
    has_port = valid_host(found) != found.lower()
    return found if has_port or str(int(port)) in _DEFAULT_PORTS else f"{found}:{int(port)}"


def _port_is_valid(host: str) -> bool:
    _, _, port = host.rpartition("]")[2].partition(":")
    return not port or 0 < int(port) <= 65_535


def forwarded_prefix(entries: Iterable[str]) -> str:
    """Return the path that the proxies have removed, each its own; "" if one of them is no path."""
    prefix = "".join(entry.rstrip("/") for entry in entries)
    return prefix if len(prefix) <= _MAX_PREFIX_CHARS and _PREFIX.fullmatch(prefix) else ""
