"""The commands against a URL at which something else responds."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from cli.main import app


class Handler(BaseHTTPRequestHandler):
    """Responds to everything with one body."""

    status: ClassVar[int]
    body: ClassVar[bytes]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.status)
        self.send_header("content-type", "text/html" if self.body.startswith(b"<") else "application/json")
        self.send_header("content-length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b"<html>\n<p>Welcome</p>", 3),
        (200, b'{"data": [{"id": "job_', 3),
        (200, b"[1]", 3),
        (200, b"\x00\xff", 3),
        (404, b"<html>\n<p>Nothing here</p>", 4),
        (401, b"<html>\n<p>Sign in</p>", 5),
        (422, b'{"detail": "a\\nb\\u001b[31m", "errors": [1, {"message": "a\\nb\\u001b[31m"}]}', 2),
    ],
)
@pytest.mark.parametrize("command", ["jobs", "submit x", "status job_1", "watch job_1", "models"])
def test_a_foreign_response_is_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, command: str, status: int, body: bytes, expected: int
) -> None:
    monkeypatch.setattr(Handler, "status", status, raising=False)
    monkeypatch.setattr(Handler, "body", body, raising=False)
    result = CliRunner().invoke(app, [*command.split(), "--url", url])
    assert isinstance(result.exception, SystemExit), result.exception
    (line,) = result.stderr.splitlines()
    assert line.startswith("fusequeue: ")
    assert line.isprintable()
    assert (result.exit_code, result.stdout) == (expected, "")
