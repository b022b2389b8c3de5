"""Fetching through the guard, from servers on loopback that an operator's allow-list opens."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shared.errors import FetchFailed, FetchRefused
from shared.inputs.fetch_guard import FetchGuard, FetchRules

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)
Serve = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def _server(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that hands each request's head to `serve`, which writes the answer; yields its port."""
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


async def test_the_vetted_address_is_called_with_the_names_host_header() -> None:
    """The connection goes to the address that was judged; the request still names the host it was meant for."""
    heads: list[bytes] = []

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(_answer(b"picture"))

    async with _server(serve) as port:
        assert await _guard(port).get(f"http://pictures.example:{port}/a.png?b=1#c") == b"picture"
        assert heads[0].startswith(b"get /a.png?b=1 http/1.1\r\n")
        assert f"\r\nhost: pictures.example:{port}\r\n".encode() in heads[0]
        assert b"\r\naccept-encoding: identity\r\n" in heads[0]


async def test_a_name_that_changes_its_address_is_resolved_once() -> None:
    """DNS rebinding: the second answer, which nobody judged, is never asked for."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"ok"))

    async with _server(serve) as port:
        assert await _guard(port, resolve).get(f"http://rebind.example:{port}/") == b"ok"
    assert len(answers) == 1


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_told_and_not_followed(status: str) -> None:
    """A public server cannot send us to the metadata service."""
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
    """A proxy would resolve the name anew, out of our sight."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"direct"))

    async with _server(serve) as port:
        assert await _guard(port).get(f"http://example.com:{port}/") == b"direct"


async def test_loopback_is_refused_where_the_operator_did_not_open_it() -> None:
    """The same call without the allow-list never reaches the server."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("called")

    async with _server(serve) as port:
        for host in ("127.0.0.1", "example.com", "[::ffff:127.0.0.1]"):
            with pytest.raises(FetchRefused, match="loopback"):
                await _guard(port, networks=()).get(f"http://{host}:{port}/")


async def test_a_declared_length_over_the_cap_is_not_read() -> None:
    """What says that it is too large is believed."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(60)

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match="more than 1000 bytes"):
            await _guard(port).get(f"http://example.com:{port}/")


async def test_an_endless_answer_is_cut_off_at_the_cap() -> None:
    """A server that declares nothing and never stops costs its cap and no more."""
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


async def test_what_is_compressed_unasked_is_not_unpacked() -> None:
    """A gzip bomb stays as small as it came."""
    packed = gzip.compress(bytes(500_000))
    assert len(packed) < 1000

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(packed, "200 OK", "content-encoding: gzip"))

    async with _server(serve) as port:
        assert await _guard(port).get(f"http://example.com:{port}/") == packed


async def test_a_dripping_server_ends_with_the_total_time() -> None:
    """A byte now and then keeps no call alive beyond its bound."""

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


async def test_a_resolver_that_keeps_silent_ends_with_the_total_time() -> None:
    """The bound counts from the name's resolution."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        await asyncio.sleep(60)
        return ["127.0.0.1"]

    with pytest.raises(FetchFailed, match=r"within|resolved"):
        await _guard(443, resolve, timeout_s=0.2).get("https://example.com/")


async def test_a_dead_first_address_does_not_hide_a_live_second() -> None:
    """Where one judged address refuses connections, the next is tried."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"second"))

    async with _server(serve) as port:
        assert await _guard(port, resolve).get(f"http://example.com:{port}/") == b"second"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", b"no http at all\r\n\r\n"]
)
async def test_a_server_that_breaks_off_is_a_failure(answer: bytes) -> None:
    """Half an answer is none."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match=r"the request to .* failed"):
            await _guard(port).get(f"http://example.com:{port}/")


async def test_a_status_other_than_200_is_told() -> None:
    """The client learns what its server answered."""

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"gone", "404 Not Found"))

    async with _server(serve) as port:
        with pytest.raises(FetchFailed, match="status 404"):
            await _guard(port).get(f"http://example.com:{port}/")


async def test_a_post_goes_through_the_same_guard() -> None:
    """A body and headers of ours are sent as they are; any status comes back."""
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


def _certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's TLS context for `name` and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = signed.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(secret + pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "both.pem")
    return server, ssl.create_default_context(cadata=pem.decode())


async def test_tls_names_and_checks_the_host_and_not_the_address(tmp_path: Path) -> None:
    """SNI carries the URL's name, and the certificate must be that name's, though an address is called."""
    server, client = _certificate(tmp_path, "pictures.example")
    names: list[str | None] = []
    server.sni_callback = lambda _, name, __: names.append(name)

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(_answer(b"secret"))

    async with _server(serve, server) as port:
        guard = _guard(port, tls=client, allow_http=False)
        assert await guard.get(f"https://pictures.example:{port}/") == b"secret"
        assert names == ["pictures.example"]
        with pytest.raises(FetchFailed, match="cannot reach"):
            await guard.get(f"https://other.example:{port}/")
