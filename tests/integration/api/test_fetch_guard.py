"""The fetch guard, with servers on loopback that the operator's allow-list permits."""

from __future__ import annotations

import asyncio
import gzip
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from harness.tls import certificate

from shared.errors import FetchFailed
from shared.inputs.fetch_guard import FetchGuard, FetchRules

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
Serve = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def _server(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Run a server that passes each request's headers to `serve`, which writes the response; yields its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(await reader.readuntil(b"\r\n\r\n"), writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "connection: close", *more]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _guard(
    port: int, resolve: Callable[[str, int], Awaitable[Sequence[str]]] | None = None, **more: object
) -> FetchGuard:
    rules = {"timeout_s": 60.0, "max_bytes": 1000, "ports": (port,), "allow_http": True, "networks": LOOPBACK}
    tls = more.pop("tls", None)
    settled = FetchRules(**(rules | more))
    return FetchGuard(settled, resolve or _at_loopback, *([tls] if tls else []))


async def _at_loopback(host: str, port: int) -> Sequence[str]:
    return ["127.0.0.1"]


async def test_the_checked_address_is_called_with_the_host_header_of_the_url() -> None:
    """The connection uses the address that was checked; the request names the host of the URL."""
    heads: list[bytes] = []

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(_answer(b"image"))

    async with _server(serve) as port:
        assert await _guard(port).get(f"http://images.example:{port}/a.png?b=1#c") == b"image"
        assert heads[0].startswith(b"get /a.png?b=1 http/1.1\r\n")
        assert f"\r\nhost: images.example:{port}\r\n".encode() in heads[0]
        assert b"\r\naccept-encoding: identity\r\n" in heads[0]
        (accepted,) = (line for line in heads[0].split(b"\r\n") if line.startswith(b"accept:"))
        assert all(kind in accepted for kind in (b"image/png", b"video/mp4", b"audio/*"))


async def test_a_name_that_changes_its_address_is_resolved_once() -> None:
    """DNS rebinding: there is no second lookup, whose result would be unchecked."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"ok"))

    async with _server(serve) as port:
        assert await _guard(port, resolve).get(f"http://rebind.example:{port}/") == b"ok"
    assert len(answers) == 1


@pytest.mark.parametrize("status", ["302 Found", "308 Permanent"])
async def test_a_redirect_is_reported_and_not_followed(status: str) -> None:
    """A public server cannot redirect to the metadata service."""
    calls = 0

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.write(_answer(b"", status, "location: http://169.254.169.254/latest/meta-data"))

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match="redirects"):
            await _guard(port).get(f"http://example.com:{port}/")
    assert calls == 1


async def test_the_environments_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve the name again, without a check."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"direct"))

    async with _server(serve) as port:
        assert await _guard(port).get(f"http://example.com:{port}/") == b"direct"


async def test_a_declared_length_over_the_cap_is_not_read() -> None:
    """A declared length is trusted when it is too large."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(60)

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match="more than 1000 bytes"):
            await _guard(port).get(f"http://example.com:{port}/")


async def test_an_endless_response_is_cut_off_at_the_cap() -> None:
    """A response without a length costs no more than the cap."""
    sent = 0

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"400\r\n" + bytes(1024) + b"\r\n")
            sent += 1024
            await writer.drain()

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match="more than 1000 bytes"):
            await _guard(port).get(f"http://example.com:{port}/")
    assert sent < 50_000_000


async def test_an_unrequested_compression_is_not_unpacked() -> None:
    """A gzip bomb stays compressed."""
    packed = gzip.compress(bytes(500_000))
    assert len(packed) < 1000

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(packed, "200 OK", "content-encoding: gzip"))

    async with _server(serve) as port:
        assert await _guard(port).get(f"http://example.com:{port}/") == packed


async def test_a_slow_server_is_stopped_at_the_total_time() -> None:
    """Single bytes do not extend the limit."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.03)

    async with _server(serve) as port:
        begun = time.monotonic()
        with pytest.raises(FetchFailed, match="no complete response within"):
            await _guard(port, timeout_s=0.4).get(f"http://example.com:{port}/")
        assert time.monotonic() - begun < 20, "all of it takes 30 s"


async def test_a_silent_resolver_is_stopped_at_the_total_time() -> None:
    """The limit includes the name resolution."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return ["127.0.0.1"]

    with pytest.raises(FetchFailed, match=r"within|resolved"):
        await _guard(443, resolve, timeout_s=0.2).get("https://example.com/")


async def test_the_next_address_is_used_when_the_first_refuses() -> None:
    """All checked addresses are tried in order."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"second"))

    async with _server(serve) as port:
        assert await _guard(port, resolve).get(f"http://example.com:{port}/") == b"second"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", b"no http at all\r\n\r\n"]
)
async def test_an_incomplete_response_is_a_failure(answer: bytes) -> None:
    """A cut-off body must not be used."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match=r"the request to .* failed"):
            await _guard(port).get(f"http://example.com:{port}/")


async def test_a_status_other_than_200_is_reported() -> None:
    """The error contains the status of the server."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"gone", "404 Not Found"))

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match="status 404"):
            await _guard(port).get(f"http://example.com:{port}/")


async def test_a_post_uses_the_same_guard() -> None:
    """Body and headers are sent unchanged; any status is returned."""
    heads: list[bytes] = []

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(_answer(b"later", "503 Service Unavailable", "retry-after: 7"))

    async with _server(serve) as port:
        reply = await _guard(port).send(
            "POST", f"http://hooks.example:{port}/x", headers={"webhook-id": "evt_1"}, content=b"{}"
        )
    assert (reply.status, reply.headers["retry-after"], reply.body) == (503, "7", b"later")
    assert b"webhook-id: evt_1" in heads[0]
    assert b"content-length: 2" in heads[0]


async def test_tls_checks_the_host_and_not_the_address(tmp_path: Path) -> None:
    """SNI and the certificate have the name of the URL, although an address is called."""
    certificate_file, key_file, client = certificate(tmp_path, "images.example")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate_file, key_file)
    names: list[str | None] = []
    server.sni_callback = lambda _, name, __: names.append(name)

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"secret"))

    async with _server(serve, server) as port:
        guard = _guard(port, tls=client, allow_http=False)
        assert await guard.get(f"https://images.example:{port}/") == b"secret"
        assert names == ["images.example"]
        with pytest.raises(FetchFailed, match="cannot reach"):
            await guard.get(f"https://other.example:{port}/")
