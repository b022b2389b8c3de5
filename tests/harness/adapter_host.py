"""A host of LoRA files that counts its requests, with the paths of a hub: files, ETags, redirects, errors, delays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_REASONS = {200: "OK", 302: "Found", 304: "Not Modified", 404: "Not Found", 503: "Service Unavailable"}


@dataclass
class Answer:
    """What the host sends at a path: a body with its ETag, or another status. `held`: not before it is set."""

    body: bytes = b""
    etag: str | None = None
    status: int = 200
    location: str | None = None
    held: asyncio.Event | None = None


@dataclass
class AdapterHost:
    """Answers by path, each list from its first to its last, which stays; `requests` are the heads that came."""

    port: int = 0
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def asked(self, path: str) -> int:
        """Return how often a path was requested."""
        return sum(target.partition("?")[0] == path for target, _ in self.requests)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            target = head[0].split(" ")[1]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            self.requests.append((target, headers))
            answers = self.answers.get(target.partition("?")[0], [Answer(status=404)])
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if answer.held is not None:
                await answer.held.wait()
            writer.write(_response(answer, headers))
            await writer.drain()
        writer.close()


def _response(answer: Answer, headers: dict[str, str]) -> bytes:
    is_known = answer.etag is not None and headers.get("if-none-match") == answer.etag
    status, body = (304, b"") if is_known else (answer.status, answer.body)
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"content-length: {len(body)}", "connection: close"]
    lines += [] if answer.etag is None else [f"etag: {answer.etag}"]
    lines += [] if answer.location is None else [f"location: {answer.location}"]
    return "\r\n".join((*lines, "", "")).encode() + body


@contextlib.asynccontextmanager
async def adapter_host() -> AsyncIterator[AdapterHost]:
    """Serve on a port of this machine."""
    host = AdapterHost()
    server = await asyncio.start_server(host.handle, "127.0.0.1", 0)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
