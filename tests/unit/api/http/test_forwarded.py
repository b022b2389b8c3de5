"""X-Forwarded headers of trusted proxies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from api.http.forwarded import PREFIX_KEY, ForwardedHeaders

PEER = "10.0.0.7"
LONG = "/a" * 200

# Headers of a request for `Host: backend:8000` over http, and the scheme, host and path of its URLs.
FORWARDED: list[tuple[Sequence[tuple[str, str]], tuple[str, str, str]]] = [
    ([], ("http", "backend:8000", "")),
    ([("proto", "https")], ("https", "backend:8000", "")),
    ([("proto", "https, http")], ("https", "backend:8000", "")),
    ([("proto", "https"), ("proto", "http")], ("https", "backend:8000", "")),
    ([("proto", "HTTPS")], ("https", "backend:8000", "")),
    ([("proto", "gopher")], ("http", "backend:8000", "")),
    ([("proto", "")], ("http", "backend:8000", "")),
    ([("host", "images.example")], ("http", "images.example", "")),
    ([("host", "images.example:8443")], ("http", "images.example:8443", "")),
    ([("host", "images.example, inner")], ("http", "images.example", "")),
    ([("host", "[fd00::1]:8443")], ("http", "[fd00::1]:8443", "")),
    ([("host", "images.example"), ("port", "8443")], ("http", "images.example:8443", "")),
    ([("host", "[fd00::1]"), ("port", "8443")], ("http", "[fd00::1]:8443", "")),
    ([("host", "images.example:8443"), ("port", "9000")], ("http", "images.example:8443", "")),
    ([("host", "images.example"), ("port", "443"), ("proto", "https")], ("https", "images.example", "")),
    ([("host", "images.example"), ("port", "80")], ("http", "images.example", "")),
    ([("host", "images.example"), ("port", "8443, 80")], ("http", "images.example:8443", "")),
    ([("prefix", "/images")], ("http", "backend:8000", "/images")),
    ([("prefix", "/images/")], ("http", "backend:8000", "/images")),
    ([("prefix", "/outer, /inner")], ("http", "backend:8000", "/outer/inner")),
    ([("prefix", "/outer"), ("prefix", "/inner")], ("http", "backend:8000", "/outer/inner")),
    *(
        ([("host", host)], ("http", "backend:8000", ""))
        for host in (
            *("", "a b", "evil@images.example", "images.example/x", "images.example?", "images.example\\x", "b\xfc"),
            *("[fd00::1", "a:99999", "a:0", "a:", "http://images.example", '"><script>', "-", "\x7f"),
        )
    ),
    *(
        ([("host", "images.example"), ("port", port)], ("http", "images.example", ""))
        for port in ("", "0", "65536", "-1", "8e3", "\xb2", "9" * 5000, "80a")
    ),
    *(
        ([("prefix", prefix)], ("http", "backend:8000", ""))
        for prefix in ("images", "//evil.example", "/a/../b", "/..", "/.", "/a?b", "/a#b", "/a b", "/\xfc", "/%2", LONG)
    ),
]


async def seen(headers: Sequence[tuple[str, str]], trusted: str = PEER) -> dict[str, Any]:
    """Return the scope that the application gets."""
    scopes: list[dict[str, Any]] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        scopes.append(scope)

    proxies = ProxyHeadersMiddleware(app, trusted).trusted_hosts
    raw = [(f"x-forwarded-{name}".encode(), value.encode("latin-1")) for name, value in headers]
    scope = {
        "type": "http",
        "scheme": "http",
        "client": (PEER, 5),
        "headers": [(b"host", b"backend:8000"), *raw],
    }
    await ForwardedHeaders(app, proxies)(scope, None, None)  # type: ignore[arg-type]
    return scopes[0]


def url_parts(scope: dict[str, Any]) -> tuple[str, str, str]:
    (host,) = (value.decode() for name, value in scope["headers"] if name == b"host")
    return scope["scheme"], host, scope.get(PREFIX_KEY, "")


@pytest.mark.parametrize(("headers", "parts"), FORWARDED)
async def test_a_trusted_proxy_decides_the_parts_of_urls(
    headers: Sequence[tuple[str, str]], parts: tuple[str, str, str]
) -> None:
    assert url_parts(await seen(headers)) == parts


@pytest.mark.parametrize(("headers", "parts"), FORWARDED)
async def test_headers_from_others_are_ignored(headers: Sequence[tuple[str, str]], parts: tuple[str, str, str]) -> None:
    scope = await seen([*headers, ("for", "203.0.113.9")], trusted="10.0.0.8")
    assert url_parts(scope) == ("http", "backend:8000", "")
    assert scope["client"] == (PEER, 5)


@pytest.mark.parametrize(
    ("addresses", "client"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        (["198.51.100.1, 203.0.113.9"], "203.0.113.9"),  # the first is what the client has sent
        (["203.0.113.9", PEER], "203.0.113.9"),
        (["[2001:db8::1]:443"], "2001:db8::1"),
        ([""], PEER),
    ],
)
async def test_the_client_is_the_last_that_is_no_trusted_proxy(addresses: list[str], client: str) -> None:
    scope = await seen([("for", value) for value in addresses])
    assert scope["client"][0] == client
