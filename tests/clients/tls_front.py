"""A proxy with TLS before the service: some clients send requests to https only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvicorn
from harness.ports import free_port
from harness.tls import certificate
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
START_TIMEOUT_S = 30.0
BODY_HEADERS = {"content-length", "transfer-encoding"}
HOP_BY_HOP = (b"connection", b"transfer-encoding", b"date", b"server")


def application(upstream: str) -> Starlette:
    """Return an application that forwards requests to `upstream` and says that they came by https."""
    client = httpx.AsyncClient(timeout=None, trust_env=False)

    async def forward(request: Request) -> StreamingResponse:
        url = httpx.URL(upstream).copy_with(raw_path=request.scope["raw_path"] + _query(request))
        headers = [*request.headers.raw, (b"x-forwarded-proto", b"https")]
        content = request.stream() if BODY_HEADERS & set(request.headers) else None
        sent = client.build_request(request.method, url, headers=headers, content=content)
        answer = await client.send(sent, stream=True)
        response = StreamingResponse(answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose))
        response.raw_headers = [pair for pair in answer.headers.raw if pair[0].lower() not in HOP_BY_HOP]
        return response

    return Starlette(routes=[Route("/{path:path}", forward, methods=METHODS)])


def _query(request: Request) -> bytes:
    query: bytes = request.scope["query_string"]
    return b"?" + query if query else b""


@contextlib.contextmanager
def serving(upstream: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Run the proxy; yields its URL and the certificate that its clients must trust."""
    certificate_file, key_file, _ = certificate(folder)
    port = free_port()
    config = uvicorn.Config(
        application(upstream),
        host="127.0.0.1",
        port=port,
        ssl_certfile=str(certificate_file),
        ssl_keyfile=str(key_file),
        log_level="warning",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        if time.monotonic() > deadline:
            raise RuntimeError("the proxy with TLS does not start")
        time.sleep(0.05)
    try:
        yield f"https://localhost:{port}", certificate_file
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
