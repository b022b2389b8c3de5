"""An S3 server over https, in memory, that can differ from AWS's in what servers in the wild differ in."""

from __future__ import annotations

import base64
import re
import ssl
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from harness.tls import certificate

KEEPS_FRAMES = "stores the frames of aws-chunked bodies"
REFUSES_FRAMES = "refuses aws-chunked bodies"
SUMS_WHOLE = "returns the checksum of the whole object with a range of it"
IGNORES_RANGES = "returns the whole object instead of a range"
NEEDS_MD5 = "refuses DeleteObjects without Content-MD5"
FIRST_NAME_GONE = "loses what is stored under the first name"
KEEPS_NOTHING = "loses what is stored"
NAMES_NO_KEY, NAMES_ANOTHER_KEY = "deletes nothing, and names no key", "deletes nothing, and names another key"
DAMAGES = "returns other bytes than those of the checksum"


class OddS3(ThreadingHTTPServer):
    """Its `oddities` can change at any time; clients trust it by `ca_file`. It has every bucket."""

    daemon_threads = True

    def __init__(self, folder: Path, *oddities: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.oddities = set(oddities)
        self.objects: dict[str, bytes] = {}
        self.puts: list[dict[str, str]] = []
        self.names: list[str] = []
        certificate_file, key_file, _ = certificate(folder)
        self.ca_file = str(certificate_file)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_file, key_file)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"https://localhost:{self.server_address[1]}"


@contextmanager
def odd_s3(folder: Path, *oddities: str) -> Iterator[OddS3]:
    """Run such a server in a thread."""
    server = OddS3(folder, *oddities)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OddS3

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        key, query = self._target()
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            rows = "".join(f"<Contents><Key>{escape(name)}</Key></Contents>" for name in self._keys(prefix))
            return self._reply(200, f"<ListBucketResult>{rows}</ListBucketResult>".encode())
        if not key:
            return self._reply(200)
        if key not in self.server.objects:
            return self._refuse(404, "NoSuchKey")
        data = self.server.objects[key]
        checksum = {"x-amz-checksum-crc32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}
        if DAMAGES in self.server.oddities:
            data = bytes(len(data))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None or IGNORES_RANGES in self.server.oddities:
            return self._reply(200, data, checksum)
        first, last = int(asked[1]), int(asked[2] or len(data) - 1)
        if first >= len(data):
            return self._refuse(416, "InvalidRange")
        place = {"Content-Range": f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}"}
        return self._reply(
            206, data[first : last + 1], place | (checksum if SUMS_WHOLE in self.server.oddities else {})
        )

    def do_PUT(self) -> None:
        body, oddities = self._body(), self.server.oddities
        self.server.puts.append({name.lower(): value for name, value in self.headers.items()})
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            if REFUSES_FRAMES in oddities:
                return self._refuse(411, "MissingContentLength")
            body = body if KEEPS_FRAMES in oddities else _without_frames(body)
        key = self._target()[0]
        self.server.names.append(key)
        lost = KEEPS_NOTHING in oddities or (FIRST_NAME_GONE in oddities and key == self.server.names[0])
        if not lost:
            self.server.objects[key] = body
        return self._reply(200)

    def do_DELETE(self) -> None:
        self.server.objects.pop(self._target()[0], None)
        self._reply(204)

    def do_POST(self) -> None:
        body = self._body()
        if NEEDS_MD5 in self.server.oddities and "Content-MD5" not in self.headers:
            return self._refuse(400, "MissingContentMD5")
        if self.server.oddities & {NAMES_NO_KEY, NAMES_ANOTHER_KEY}:
            key = b"<Key>b</Key>" if NAMES_ANOTHER_KEY in self.server.oddities else b""
            error = b"<Error>" + key + b"<Code>AccessDenied</Code><Message>no</Message></Error>"
            return self._reply(200, b"<DeleteResult>" + error + b"</DeleteResult>")
        for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
            self.server.objects.pop(key, None)
        return self._reply(200, b"<DeleteResult/>")

    def _target(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path).lstrip("/").partition("/")[2], parse_qs(parts.query, keep_blank_values=True)

    def _keys(self, prefix: str) -> list[str]:
        return sorted(name for name in self.server.objects if name.startswith(prefix))

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _refuse(self, status: int, code: str) -> None:
        self._reply(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def _reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "image/png", "ETag": '"1"', **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _without_frames(body: bytes) -> bytes:
    data, rest = b"", body
    while size := int((head := rest.partition(b"\r\n"))[0], 16):
        data, rest = data + head[2][:size], head[2][size + 2 :]
    return data
