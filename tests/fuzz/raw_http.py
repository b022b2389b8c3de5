"""Bytes that are almost HTTP, over raw sockets: no 5xx, no desync, no connection that stays, no slow `/healthz`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CLIENTS = 12
ANSWER_S = 0.3  # for requests that are complete; others get no response yet
CLOSE_S = 20.0  # of a connection after a refused request, on a busy machine
HELD = 40
HANG_S = 90.0  # a body's 60 s, and the checks
HEALTHZ_S = 0.05
HEALTHZ_EVERY_S = 0.05

HOST = b"Host: localhost\r\n"
JSON = HOST + b"Content-Type: application/json\r\n"
BODY = b'{"model":"demo","prompt":"x","n":0}'
CHUNKS = b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n"
VALID = (
    b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    b"HEAD /docs HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/jobs?limit=1 HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    b"POST /v1/jobs HTTP/1.1\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    b"POST /v1/jobs HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS,
    b"POST /v1/jobs:bulk HTTP/1.1\r\n" + HOST + b"Content-Type: application/x-ndjson\r\nContent-Length: 3\r\n\r\n{}\n",
    b"PUT /nothing HTTP/1.1\r\n" + HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nab",
)
LINES = (
    b"Content-Length: 5\r\n",
    b"Content-Length: -1\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: keep-alive, content-length\r\n",
    b"Expect: 100-continue\r\n",
    b"Expect: 200-ok\r\n",
    b"Host: other.example\r\n",
    b"X-Forwarded-For: 10.0.0.1\r\nX-Forwarded-Proto: gopher\r\n",
    b"Authorization: Bearer \xff\xfe\r\n",
    b"X-Request-Id: a\r\n b\r\n",
    b"X-A: \0\r\n",
    b"Range: bytes=0-\r\nIf-None-Match: *\r\n",
)
WORDS = (
    b"\0",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b" ",
    b"\t",
    b":",
    b"%00",
    b"%",
    b"\xff",
    b"0\r\n\r\n",
    b"HTTP/9.9",
    b"f" * 17,
)
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [^\r\n]*\r\n")


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(WORDS) + data[at:]


def _delete(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 8) :]


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _add_line(rng: random.Random, data: bytes) -> bytes:
    start, _, rest = data.partition(b"\r\n")
    return start + b"\r\n" + rng.choice(LINES) + rest


def _repeat_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\r\n")
    at = rng.randrange(len(lines))
    return b"\r\n".join([*lines[:at], lines[at], *lines[at:]])


def _bare_line_feed(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n", rng.randint(1, 4))


def _long_header(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\r\nX-Long: " + b"a" * rng.choice((100, 8_000, 70_000)) + b"\r\n", 1)


def _many_headers(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\r\n" + b"a: b\r\n" * rng.choice((50, 99, 2_000)), 1)


def _follow(rng: random.Random, data: bytes) -> bytes:
    return data + rng.choice(VALID) * rng.choice((1, 2, 40))


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(1, len(data) + 1)]


def _tiny_chunks(rng: random.Random, data: bytes) -> bytes:
    return data.replace(CHUNKS, b"1\r\n \r\n" * rng.choice((10, 5_000)) + b"0\r\n\r\n")


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_insert, _delete, _flip, _add_line, _add_line, _repeat_line, _bare_line_feed, _long_header, _many_headers),
    *(_follow, _cut, _tiny_chunks),
)


def request(rng: random.Random) -> bytes:
    """Return a request with up to four faults."""
    data = rng.choice(VALID)
    for _ in range(rng.randrange(5)):
        data = rng.choice(MUTATIONS)(rng, data) or b"\r\n"
    return data


@dataclass
class Findings:
    """What the clients of a run have seen."""

    host: str
    port: int
    until: float
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    held: list[tuple[float, bytes, asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    def problem(self, what: str, data: bytes) -> None:
        """Note a problem; the first ones are enough."""
        if len(self.problems) < 20:
            self.problems.append(f"{what}: {data[:400]!r}")

    async def send_until_end(self, rng: random.Random) -> None:
        """Send one request after the other, each on its own connection."""
        while time.monotonic() < self.until:
            data = request(rng)
            reader, writer = await asyncio.open_connection(self.host, self.port)
            with contextlib.suppress(ConnectionError):
                for piece in _pieces(rng, data):
                    writer.write(piece)
                    await asyncio.sleep(0)
            received, ended = await _read(reader, ANSWER_S)
            if not ended and _refused(received):
                more, ended = await _read(reader, CLOSE_S)
                received += more
                if not ended:
                    self.problem("a refused connection stays open", data)
            self._check(data, received)
            if ended or received or len(self.held) >= HELD:
                writer.close()
            else:
                self.held.append((time.monotonic(), data, reader, writer))

    def _check(self, data: bytes, received: bytes) -> None:
        """Count the statuses of the responses, which follow each other without a gap."""
        rest = received
        while rest:
            start = _STATUS.match(rest)
            head, found, rest = rest.partition(b"\r\n\r\n")
            if start is None or not found:
                self.problem("not a response", data + b" -> " + received)
                return
            status = int(start[1])
            self.statuses[f"{status // 100}xx"] += 1
            if status >= 500 and status != 503:
                self.problem(f"status {status}", data)
            length = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
            if length is None or data[:4] == b"HEAD" or b"HEAD " in data:
                return  # streamed, interim, or without its body
            rest = rest[int(length[1]) :]

    async def check_held(self) -> None:
        """Check that the server has closed connections that sent only a part of a request."""
        for since, data, reader, writer in self.held:
            if time.monotonic() - since > HANG_S and not (await _read(reader, 1))[1]:
                self.problem(f"open after {HANG_S:.0f} s", data)
            writer.close()

    async def healthz_s(self, until: float) -> list[float]:
        """Return how long each request of `/healthz` takes."""
        times = []
        while time.monotonic() < until:
            started = time.monotonic()
            reader, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            received, _ = await _read(reader, 30)
            writer.close()
            times.append(time.monotonic() - started)
            if not received.startswith(b"HTTP/1.1 200"):
                self.problem("/healthz", received)
            await asyncio.sleep(HEALTHZ_EVERY_S)
        return times


def _pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """Return the bytes of a request in one or a few pieces."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def _read(reader: asyncio.StreamReader, seconds: float) -> tuple[bytes, bool]:
    """Return what arrives until the connection ends or pauses for `seconds`, and whether it has ended."""
    received = b""
    try:
        while True:
            async with asyncio.timeout(seconds):
                piece = await reader.read(65_536)
            if not piece:
                return received, True
            received += piece
    except TimeoutError:
        return received, False
    except ConnectionError:
        return received, True


def _refused(received: bytes) -> bool:
    """Return whether a response says that the connection ends; one that succeeds can wait for its request's end."""
    heads = [head.lower() for head in received.split(b"\r\n\r\n")[:-1]]
    return any(b"connection: close" in head and b"http/1.1 4" in head for head in heads)


async def _run(host: str, port: int, seed: int, seconds: float) -> dict[str, Any]:
    started = time.monotonic()
    findings = Findings(host, port, started + seconds)
    before_s = statistics.median(await findings.healthz_s(started + min(1.0, seconds / 4)))
    senders = [findings.send_until_end(random.Random(f"{seed} {client}")) for client in range(CLIENTS)]
    times, *_ = await asyncio.gather(findings.healthz_s(findings.until), *senders)
    await findings.check_held()
    median_s = statistics.median(times)
    if median_s > max(HEALTHZ_S, 10 * before_s):
        findings.problem(f"/healthz took {median_s * 1000:.0f} ms, {before_s * 1000:.0f} ms before", b"")
    facts = {f"{status} responses": count for status, count in sorted(findings.statuses.items())}
    return {**facts, "healthz ms": round(median_s * 1000, 1), "problems": findings.problems}


def run(host: str, port: int, seed: int, seconds: float) -> dict[str, Any]:
    """Send requests for `seconds`, the same ones for the same seed; `problems` says what should not have happened."""
    return asyncio.run(_run(host, port, seed, seconds))
