"""Limits of one HTTP connection, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from unit.api.http.raw_http import QUICK, EchoServer, RawClient

from api.http import server_protocol
from api.http.connections import Connections
from api.http.server_protocol import CHUNK_OVERHEAD_BYTES, MAX_HEAD_BYTES, MAX_PIPELINED, ServerProtocol

GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSING = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
async def server() -> AsyncIterator[EchoServer]:
    async with EchoServer().running() as running:
        yield running


def status(response: bytes) -> bytes:
    return response[9:12]


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join([b"POST /a HTTP/1.1", b"Host: x", *headers, b"", body])


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
INVALID = {
    "a length and chunks": post(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks and a length": post(b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n" + SMUGGLED),
    "two lengths": post(b"Content-Length: 1", b"Content-Length: 5", body=b"a" + SMUGGLED),
    "two equal lengths": post(b"Content-Length: 1", b"Content-Length: 1", body=b"a" + SMUGGLED),
    "a list of lengths": post(b"Content-Length: 1, 1", body=b"a" + SMUGGLED),
    "a signed length": post(b"Content-Length: +1", body=b"a" + SMUGGLED),
    "a negative length": post(b"Content-Length: -1", body=SMUGGLED),
    "a hexadecimal length": post(b"Content-Length: 0x1", body=b"a" + SMUGGLED),
    "an empty length": post(b"Content-Length:", body=SMUGGLED),
    "a length beyond 64 bits": post(b"Content-Length: 18446744073709551617", body=b"a" + SMUGGLED),
    "a length with a space": post(b"Content-Length: 1 1", body=b"a" + SMUGGLED),
    "a space before the colon": post(b"Content-Length : 1", body=b"a" + SMUGGLED),
    "another encoding": post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "chunks twice": post(b"Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n" + SMUGGLED),
    "two encodings": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity", body=b"0\r\n\r\n" + SMUGGLED),
    "an unknown encoding": post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n" + SMUGGLED),
    "an encoding with a tab": post(b"Transfer-Encoding:\x0bchunked", body=b"0\r\n\r\n" + SMUGGLED),
    "a quoted encoding": post(b'Transfer-Encoding: "chunked"', body=b"0\r\n\r\n" + SMUGGLED),
    "chunks in HTTP/1.0": b"POST /a HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk size that is no number": post(b"Transfer-Encoding: chunked", body=b"g\r\n\r\n"),
    "a signed chunk size": post(b"Transfer-Encoding: chunked", body=b"+1\r\na\r\n0\r\n\r\n"),
    "a chunk size with 0x": post(b"Transfer-Encoding: chunked", body=b"0x1\r\na\r\n0\r\n\r\n"),
    "a chunk size beyond 64 bits": post(b"Transfer-Encoding: chunked", body=b"1" + b"0" * 16 + b"\r\na"),
    "a negative chunk size": post(b"Transfer-Encoding: chunked", body=b"-1\r\na\r\n0\r\n\r\n"),
    "no chunk size": post(b"Transfer-Encoding: chunked", body=b"\r\na\r\n0\r\n\r\n"),
    "a chunk that is longer than its size": post(b"Transfer-Encoding: chunked", body=b"1\r\nab\r\n0\r\n\r\n"),
    "a bare line feed after a chunk size": post(b"Transfer-Encoding: chunked", body=b"1\na\r\n0\r\n\r\n"),
    "a bare line feed in a chunk extension": post(b"Transfer-Encoding: chunked", body=b"1;a\na\r\n0\r\n\r\n"),
    "a bare line feed after a chunk": post(b"Transfer-Encoding: chunked", body=b"1\r\na\n0\r\n\r\n"),
    "a null byte in a chunk extension": post(b"Transfer-Encoding: chunked", body=b"1;\0\r\na\r\n0\r\n\r\n"),
    "a folded header": b"GET /a HTTP/1.1\r\nHost: x\r\nX-A: b\r\n c\r\n\r\n",
    "a header that begins with a space": b"GET /a HTTP/1.1\r\n Host: x\r\nHost: x\r\n\r\n",
    "bare line feeds": b"GET /a HTTP/1.1\nHost: x\n\n",
    "a bare line feed after a header": b"GET /a HTTP/1.1\r\nHost: x\nX-A: b\r\n\r\n",
    "a bare carriage return in a header": b"GET /a HTTP/1.1\r\nHost: x\r\nX-A: b\rX-B: c\r\n\r\n",
    "a null byte in a header": b"GET /a HTTP/1.1\r\nHost: x\r\nX-A: a\0b\r\n\r\n",
    "a null byte in a header's name": b"GET /a HTTP/1.1\r\nHost: x\r\nX\0A: b\r\n\r\n",
    "a control character in a header": b"GET /a HTTP/1.1\r\nHost: x\r\nX-A: a\x01b\r\n\r\n",
    "a header without a name": b"GET /a HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    "a header without a colon": b"GET /a HTTP/1.1\r\nHost: x\r\nX-A\r\n\r\n",
    "a space in a header's name": b"GET /a HTTP/1.1\r\nHost: x\r\nX A: b\r\n\r\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "a target of another host": b"GET http://y/a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target with user and host": b"GET http://x@y/a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target that is no path": b"GET a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a null byte in the target": b"GET /a\0 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a target beyond ASCII": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "no target": b"GET HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/2": b"GET /a HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/0.9": b"GET /a HTTP/0.9\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "CONNECT": b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n",
    "a lower-case method": b"get /a HTTP/1.1\r\nHost: x\r\n\r\n",
}


async def test_an_invalid_request_gets_400_and_is_closed(server: EchoServer) -> None:
    """With one response; no request reaches the application."""
    for case, request_bytes in INVALID.items():
        response = await server.send(request_bytes)
        assert (case, status(response), response.count(b"HTTP/1.1 ")) == (case, b"400", 1), response
        assert b"connection: close" in response, case
        assert b"application/problem+json" in response, case
        assert server.seen == [], case


VALID = [
    GET % b"/a",
    b"GET http://x/a HTTP/1.1\r\nHost: X\r\n\r\n",
    b"\r\nGET /a HTTP/1.1\r\nHost: x\r\nX-A: \xe9\t\r\n\r\n",
    b"GET /a HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    post(b"Content-Length: 0"),
    post(b"Content-Length: 003", body=b"abc"),
    post(b"Transfer-Encoding: Chunked", body=b"3;a=b\r\nabc\r\n0\r\nX-A: b\r\n\r\n"),
    post(b"Transfer-Encoding: chunked", body=b"003\r\nabc\r\n000\r\n\r\n"),
]


async def test_a_valid_request_is_served(server: EchoServer) -> None:
    responses = await asyncio.gather(*map(server.send, VALID))
    assert [status(response) for response in responses] == [b"200"] * len(VALID), responses
    assert sorted(body for _, _, body in server.seen) == [b""] * 6 + [b"abc"] * 3


async def test_a_trailer_is_no_header(server: EchoServer) -> None:
    """uvicorn added it to the headers, which the application reads later."""
    await server.send(post(b"Transfer-Encoding: chunked", body=b"0\r\nAuthorization: Bearer x\r\n\r\n"))
    assert b"authorization" not in dict(server.headers)


async def test_requests_do_not_depend_on_the_pieces_they_arrive_in(server: EchoServer) -> None:
    body = bytes(range(256)) * 100
    data = GET % b"/first" + post(b"Content-Length: %d" % len(body), body=body) + CLOSING % b"/last"
    for size in (1, 7, 4095, 4096, 4097, 100_000):
        server.seen.clear()
        client = await server.connect()
        for start in range(0, min(len(data), 3000 if size == 1 else len(data)), size):
            await client.send(data[start : start + size])
            if size < 4095:
                await asyncio.sleep(0)
        if size == 1:
            await client.send(data[3000:])
        await client.read_all()
        assert server.seen == [("GET", "/first", b""), ("POST", "/a", body), ("GET", "/last", b"")], size


async def test_a_request_after_a_closing_one_is_not_served(server: EchoServer) -> None:
    response = await server.send(CLOSING % b"/a" + GET % b"/b")
    assert response.count(b"HTTP/1.1 200") == 1
    assert [path for _, path, _ in server.seen] == ["/a"]


async def test_an_invalid_request_does_not_cut_the_response_before_it(server: EchoServer) -> None:
    """uvicorn wrote its 400 into the earlier response."""
    client = await server.connect()
    await client.send(GET % b"/hold")
    while not server.seen:
        await asyncio.sleep(0.01)
    await client.send(b"nonsense\r\n\r\n")
    await asyncio.sleep(0.05)
    server.release.set()
    response = await client.read_all()
    assert response.count(b"HTTP/1.1 ") == 1
    assert status(response) == b"200"
    assert response.endswith(b"/hold")


async def test_an_offer_of_http2_is_ignored(server: EchoServer) -> None:
    """Java's client sends it with every request; llhttp took the body for the other protocol's."""
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    for body, pause in ((b"", False), (b"abc", False), (b"abc", True)):
        client = await server.connect()
        request = post(*upgrade, b"Content-Length: %d" % len(body), body=body)
        await client.send(request[: len(request) - len(body)])
        if pause:
            await asyncio.sleep(0.05)
        await client.send(body)
        assert status(await client.response()) == b"200"
    assert server.seen == [("POST", "/a", b""), *[("POST", "/a", b"abc")] * 2]


async def test_a_connection_stays_open_after_an_offer_without_a_body(server: EchoServer) -> None:
    client = await server.connect()
    offer = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    for _ in range(2):
        await client.send(offer)
        assert status(await client.response()) == b"200"
    await client.send(offer + GET % b"/b")
    for _ in range(2):
        assert status(await client.response()) == b"200"
    assert [path for _, path, _ in server.seen] == ["/a", "/a", "/a", "/b"]


async def test_a_body_after_an_offer_is_not_taken_for_a_request(server: EchoServer) -> None:
    upgrade = (b"Connection: upgrade", b"Upgrade: x")
    await server.send(post(*upgrade, b"Content-Length: %d" % len(SMUGGLED), body=SMUGGLED))
    await server.send(
        post(*upgrade, b"Transfer-Encoding: chunked", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED))
    )
    assert server.seen == [("POST", "/a", SMUGGLED)] * 2


async def test_a_large_head_gets_431(server: EchoServer) -> None:
    for head in (
        b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * MAX_HEAD_BYTES,
        b"GET /" + b"a" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\n" + b"X" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 200,
        b"\r\n" * MAX_HEAD_BYTES,
    ):
        response = await server.send(head)
        assert status(response) == b"431", (head[:60], response)
    assert server.seen == []


async def test_chunks_that_are_mostly_overhead_are_refused(server: EchoServer) -> None:
    """1,000 bytes of body in chunks of one byte took as long as 1,000 requests."""
    for number, extension in enumerate((b"", b";a=" + b"b" * 100)):
        chunks = b"1%s\r\na\r\n" % extension * (4 * CHUNK_OVERHEAD_BYTES)
        response = await server.send(CHUNKED % b"/a" + chunks)
        assert status(response) == b"400"
        assert b"chunks are too small" in response
        assert server.seen == []
        assert server.disconnects == number + 1, "the application stops reading"


async def test_small_chunks_of_a_line_each_are_served(server: EchoServer) -> None:
    chunks = b"8\r\nabcdefg\n\r\n" * 5000
    client = await server.connect()
    await client.send(CHUNKED % b"/a" + chunks + b"0\r\n\r\n")
    assert status(await client.response()) == b"200"
    assert len(server.seen[0][2]) == 40_000


async def test_many_requests_in_advance_are_answered_in_part(server: EchoServer) -> None:
    client = await server.connect()
    await client.send(GET % b"/hold" + GET % b"/a" * 5_000)
    while not server.seen:
        await asyncio.sleep(0.01)
    server.release.set()
    response = await client.read_all()
    served = response.count(b"HTTP/1.1 200")
    assert MAX_PIPELINED < served < 2 * MAX_PIPELINED
    assert response.count(b"connection: close") == 1
    assert response.endswith(b"/a")


async def endless(client: RawClient, piece: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await client.send(piece)
            await asyncio.sleep(0.002)


async def test_a_response_before_the_end_of_the_body_closes_the_connection(server: EchoServer) -> None:
    """The rest of the body was read without limit."""
    client = await server.connect()
    await client.send(CHUNKED % b"/early")
    sending = asyncio.create_task(endless(client, b"400\r\n" + b"a" * 1024 + b"\r\n"))
    response = await client.response()
    assert status(response) == b"200"
    assert b"connection: close" in response
    await asyncio.wait_for(sending, 5)


async def test_a_client_that_still_sends_receives_an_early_response() -> None:
    """A reset while it sends would take the response from it."""
    async with EchoServer().with_limits(linger_s=600).running() as server:
        client = await server.connect()
        await client.send(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n")
        await asyncio.sleep(0.1)
        await client.send(b"a" * 30_000_000)  # the largest bodies of calls have 27 MB
        assert status(await client.response()) == b"200"


async def test_what_is_dropped_after_an_early_response_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time that is left for it."""
    monkeypatch.setattr(server_protocol, "MAX_DROPPED_BYTES", 100_000)
    async with EchoServer().with_limits(linger_s=600).running() as server:
        client = await server.connect()
        await client.send(CHUNKED % b"/early")
        sending = asyncio.create_task(endless(client, b"400\r\n" + b"a" * 1024 + b"\r\n"))
        assert status(await client.response()) == b"200"
        await asyncio.wait_for(sending, 30)


STOPPED = {
    b"": [],
    b"\r\n": [b"408"],
    b"GET / HTTP/1.1\r\nHost: x\r\n": [b"408"],
    b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab": [b"408"],
    CHUNKED % b"/a" + b"5\r\nab": [b"408"],
    GET % b"/a": [b"200"],
    post(b"Content-Length: 3", body=b"abc"): [b"200"],
    GET % b"/a" + b"GET /b": [b"200", b"408"],
}


async def test_a_client_that_stops_is_closed(server: EchoServer) -> None:
    """A 408 on an idle connection could be taken for the response to the next request."""
    responses = await asyncio.gather(*map(server.send, STOPPED))
    parts = [response.split(b"HTTP/1.1 ")[1:] for response in responses]
    assert [[status(b"HTTP/1.1 " + one) for one in each] for each in parts] == list(STOPPED.values())


async def test_a_client_that_sends_a_byte_at_a_time_is_closed(server: EchoServer) -> None:
    async def send_slowly(start: bytes) -> bytes:
        client = await server.connect()
        await client.send(start)
        sending = asyncio.create_task(endless_slow(client))
        response = await client.read_all(30)
        sending.cancel()
        return status(response)

    starts = (b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ", CHUNKED % b"/a" + b"ffff\r\n")
    assert await asyncio.gather(*map(send_slowly, starts)) == [b"408", b"408"]


async def endless_slow(client: RawClient) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await client.send(b"a")
            await asyncio.sleep(0.05)


async def test_the_whole_request_has_a_time_limit() -> None:
    async with EchoServer().with_limits(request_s=0.5, body_bytes_per_s=0.001).running() as server:
        client = await server.connect()
        await client.send(CHUNKED % b"/a" + b"ffff\r\n")
        sending = asyncio.create_task(endless_slow(client))
        assert status(await client.read_all(10)) == b"408"
        sending.cancel()


async def test_a_body_that_the_application_does_not_read_is_not_late(server: EchoServer) -> None:
    client = await server.connect()
    await client.send(GET % b"/hold" + b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"a" * 50_000)
    await asyncio.sleep(3 * QUICK.body_s)
    server.release.set()
    assert status(await client.response()) == b"200"
    await client.send(b"a" * 50_000)
    assert status(await client.response()) == b"200"


@pytest.mark.parametrize("trusted", [False, True], ids=["client", "trusted proxy"])
async def test_idle_connections_of_trusted_proxies_stay_open(trusted: bool) -> None:
    """A proxy that sends a request at the moment in which its connection is closed answers its client with 502."""
    connections = Connections(8, None, lambda _host: trusted)
    async with EchoServer(connections=connections).with_limits(proxy_idle_s=600).running() as server:
        client = await server.connect()
        await client.send(GET % b"/a")
        assert status(await client.response()) == b"200"
        if trusted:
            await asyncio.sleep(5 * QUICK.idle_s)
            await client.send(GET % b"/a")
            assert status(await client.response()) == b"200"
        else:
            async with asyncio.timeout(10):
                assert await client.reader.read() == b""


@pytest.mark.parametrize("ending", [b"", b"Connection: keep-alive\r\n"], ids=["close", "keep-alive"])
async def test_a_stream_to_a_client_of_http_1_0_ends_with_the_connection(server: EchoServer, ending: bytes) -> None:
    """It would take the framing of chunks for content."""
    request = b"POST /stream HTTP/1.0\r\nContent-Length: 6\r\n" + ending + b"\r\n"
    client = await server.connect()
    await client.send(request + b"abc")
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert await client.reader.readexactly(3) == b"abc"
    await client.send(b"def")
    assert await client.read_all() == b"def"
    assert (await server.send(b"GET /a HTTP/1.0\r\n\r\n")).endswith(b"content-length: 2\r\nconnection: close\r\n\r\n/a")


async def test_a_stream_without_events_is_not_closed(server: EchoServer) -> None:
    client = await server.connect()
    await client.send(GET % b"/hold")
    await asyncio.sleep(3 * QUICK.idle_s)
    server.release.set()
    assert status(await client.response()) == b"200"


async def test_a_client_that_does_not_read_is_closed(server: EchoServer) -> None:
    client = await server.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(GET % b"/large")
    async with asyncio.timeout(10):
        while server.connections.count:
            await asyncio.sleep(0.02)


async def test_a_client_that_reads_slowly_gets_everything(server: EchoServer) -> None:
    client = await server.connect()
    await client.send(CLOSING % b"/large")
    size = 0
    while piece := await client.reader.read(262_144):
        size += len(piece)
        await asyncio.sleep(0.01)
    assert size > 20_000_000


async def test_a_disconnect_ends_every_request_of_the_connection(server: EchoServer) -> None:
    """uvicorn ended the last one only."""
    client = await server.connect()
    await client.send(CHUNKED % b"/stream")
    assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    client.writer.transport.abort()
    async with asyncio.timeout(5):
        while server.disconnects < 1:
            await asyncio.sleep(0.01)


async def test_nothing_remains_of_a_closed_connection(server: EchoServer) -> None:
    """Python looks for reference cycles rarely here, and a timer that goes on would keep a connection forever."""
    gc.disable()
    half, late = b"GET /half HTTP/1.1\r\n", CHUNKED % b"/a" + b"5\r\nab"
    await asyncio.gather(*map(server.send, (CLOSING % b"/a", GET % b"/a", half, late, INVALID["HTTP/2"], b"")))
    server.clients.clear()
    try:
        async with asyncio.timeout(5):
            while any(type(each) is ServerProtocol for each in gc.get_objects()):
                await asyncio.sleep(0.05)
    finally:
        gc.enable()


def full(limit: int, per_address: int | None = None) -> Callable[[], EchoServer]:
    return lambda: EchoServer(connections=Connections(limit, per_address, lambda _: False)).with_limits(idle_s=60)


async def test_an_idle_connection_makes_room_for_a_new_one() -> None:
    """400 idle connections kept everybody from the API."""
    async with full(3)().running() as server:
        clients = [await server.connect() for _ in range(10)]
        for client in (clients[-1], await server.connect()):
            await client.send(GET % b"/a")
            assert status(await client.response()) == b"200"
        assert server.connections.count == 3
        assert await clients[0].read_all() == b""


async def test_a_connection_with_a_request_is_not_closed_for_another_one() -> None:
    async with full(2)().running() as server:
        clients = [await server.connect() for _ in range(2)]
        for client in clients:
            await client.send(GET % b"/hold")
        while len(server.seen) < 2:
            await asyncio.sleep(0.01)
        refused = await server.send(GET % b"/a")
        assert status(refused) == b"503"
        assert b"too_many_connections" in refused
        assert b"retry-after: 2" in refused.lower()
        server.release.set()
        for client in clients:
            assert status(await client.response()) == b"200"


async def test_an_address_has_a_limit_of_its_own() -> None:
    async with full(100, per_address=2)().running() as server:
        clients = [await server.connect() for _ in range(2)]
        for client in clients:
            await client.send(GET % b"/hold")
        while len(server.seen) < 2:
            await asyncio.sleep(0.01)
        assert b"2 connections from this address are open" in await server.send(GET % b"/a")
        server.release.set()


async def test_a_response_that_is_still_being_read_is_not_cut_for_another_connection() -> None:
    """The application has finished it, and a part of it waits for its client; until then the place is taken."""
    one_place = Connections(1, None, lambda _: False)
    server = EchoServer(connections=one_place, send_buffer=4096).with_limits(unread_s=20, idle_s=20)
    async with server.running():
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", server.port))
            slow.sendall(GET % b"/buffered")
            while not server.finished:
                await asyncio.sleep(0.01)
            assert status(await server.send(CLOSING % b"/other")) == b"503"
            received = 0
            while received < 60_000:
                piece = await asyncio.to_thread(slow.recv, 65536)
                assert piece, f"the response ended after {received} bytes"
                received += len(piece)
            async with asyncio.timeout(20):
                while status(await server.send(CLOSING % b"/other")) != b"200":
                    await asyncio.sleep(0.01)
