"""The share of request bodies in the memory and the temporary files of an API process."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from harness.http_server import png, serving
from harness.tables import row
from PIL import Image

from api.http import bodies
from api.http.bodies import BodyShares, read_form, release_body
from shared.errors import Overloaded
from shared.queue import Queue
from shared.runtime import metrics

MIB = 1024 * 1024
FORM = {"content-type": "multipart/form-data; boundary=x"}
Handler = Callable[[Request], Awaitable[None]]


class Server:
    """The middleware around a handler that reads bodies and holds them until `finish`."""

    def __init__(self, handler: Handler | None = None) -> None:
        self.handler = handler
        self.finish = asyncio.Event()
        self.held = 0
        self._app = BodyShares(self._handle, largest_json=MIB, largest_file=MIB)

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        scope["tenant"] = scope["path"]
        if self.handler is not None:
            await self.handler(request)
            return
        await request.body()
        self.held += 1
        await self.finish.wait()

    async def post(self, tenant: str, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        pieces = [body[start : start + MIB] for start in range(0, len(body), MIB)] or [b""]
        messages = iter(pieces)
        left = len(pieces)

        async def receive() -> Any:
            nonlocal left
            left -= 1
            return {"type": "http.request", "body": next(messages), "more_body": left > 0}

        async def send(_message: Any) -> None: ...

        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await self._app({"type": "http", "path": tenant, "headers": raw, "method": "POST"}, receive, send)


def part(name: str, content: bytes, more: str = "") -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


async def test_bodies_of_one_tenant_leave_room_for_those_of_another() -> None:
    """64 of 128 MiB for one who sends without end, and 503 for the rest; another's next body is read at once."""
    server = Server()
    refused = metrics.share_refusals.labels("body_memory")._value.get
    before = refused()
    flood = [asyncio.create_task(server.post("/greedy", bytes(4 * MIB))) for _ in range(50)]
    async with asyncio.timeout(10):
        while sum(task.done() for task in flood) < 34:
            await asyncio.sleep(0)
    assert refused() - before == 34
    assert server.held == 16
    assert all(isinstance(task.exception(), Overloaded) for task in flood if task.done())
    other = asyncio.create_task(server.post("/modest", bytes(20 * MIB)))
    async with asyncio.timeout(2):
        while server.held < 17:
            await asyncio.sleep(0)
    server.finish.set()
    await other
    await asyncio.gather(*flood, return_exceptions=True)
    assert metrics.shared_in_use.labels("body_memory")._value.get() == 0


async def test_a_body_counts_until_its_handler_drops_it() -> None:
    counted = []

    async def handle(request: Request) -> None:
        await request.body()
        counted.append(metrics.shared_in_use.labels("body_memory")._value.get())
        release_body(request)
        counted.append(metrics.shared_in_use.labels("body_memory")._value.get())

    await Server(handle).post("/a", bytes(3 * MIB))
    assert counted == [3 * MIB, 0]


async def test_a_file_of_a_form_is_on_disk_and_counts_as_such() -> None:
    counted = []

    async def handle(request: Request) -> None:
        async with read_form(request, max_files=1, max_fields=2, max_text_bytes=1000) as form:
            file: Any = form["file"]
            assert (form["note"], file.size, file.file._rolled) == ("text", 5 * MIB, True)
            for name in ("body_memory", "body_files"):
                counted.append(metrics.shared_in_use.labels(name)._value.get())

    body = part("note", b"text") + part("file", bytes(5 * MIB), '; filename="a"') + b"--x--\r\n"
    await Server(handle).post("/a", body, FORM)
    assert counted == [1000 + 64 * 1024, len(body)]
    assert metrics.shared_in_use.labels("body_files")._value.get() == 0


async def test_texts_of_a_form_have_a_common_limit() -> None:
    """Each below the limit; together they were up to 128 MiB."""

    async def handle(request: Request) -> None:
        async with read_form(request, max_files=1, max_fields=9, max_text_bytes=1000):
            pass

    fields = [part(f"field{index}", bytes(400)) for index in range(3)]
    await Server(handle).post("/a", b"".join(fields[:2]) + b"--x--\r\n", FORM)
    with pytest.raises(Exception, match="more than 1000 bytes"):
        await Server(handle).post("/a", b"".join(fields) + b"--x--\r\n", FORM)


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(bodies, "MIN_MEMORY_BYTES", 1)
    async with serving(fake_queue, tmp_path, max_body_bytes=100_000, max_input_bytes=60_000) as client:
        yield client


async def test_uploads_and_bulk_requests_larger_than_the_memory_for_bodies_are_served(api: httpx.AsyncClient) -> None:
    """Neither is ever whole in memory."""
    lines = b'{"model": "demo", "prompt": "a red circle"}\n' * 300 + b" " * 7_000_000
    response = await api.post("/v1/jobs:bulk", content=lines, headers={"content-type": "application/x-ndjson"})
    assert (response.status_code, response.text.count('"id"')) == (200, 300)
    sent = png() + bytes(50_000)
    for _ in range(2):
        uploads = [api.post("/v1/inputs", files={"file": ("a.png", sent, "image/png")}) for _ in range(20)]
        assert {response.status_code for response in await asyncio.gather(*uploads)} == {201}


async def test_a_form_in_another_encoding_is_refused_with_its_header(api: httpx.AsyncClient) -> None:
    """Starlette decodes names with any codec of Python, of which some raise what no route expects."""
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="+2AA-"\r\n\r\nx\r\n--x--\r\n'
    paths, charsets = ("/v1/inputs", "/v1/files", "/v1/images/edits"), ("undefined", "utf-7", "idna", "no-such-codec")
    for path, charset in product(paths, charsets):
        with row(path, charset):
            headers = {"Content-Type": f"multipart/form-data; boundary=x; charset={charset}"}
            response = await api.post(path, content=body, headers=headers)
            assert response.status_code == 415, response.text
            assert "Content-Type" in response.text
            assert charset in response.text


async def test_a_compressed_body_is_refused_with_its_header(api: httpx.AsyncClient) -> None:
    sent = gzip.compress(b'{"model": "tiny", "prompt": "a boat"}')
    types = {"/v1/jobs:bulk": "application/x-ndjson", "/v1/inputs": "multipart/form-data; boundary=x"}
    for path in (
        "/v1/jobs",
        "/v1/jobs:bulk",
        "/v1/images/generations",
        "/compat/replicate/v1/predictions",
        "/v1/inputs",
    ):
        with row(path):
            headers = {"Content-Type": types.get(path, "application/json"), "Content-Encoding": "gzip"}
            response = await api.post(path, content=sent, headers=headers)
            assert response.status_code == 415, response.text
            assert "Content-Encoding: gzip" in response.text


async def test_a_body_without_room_gets_503_and_when_to_come_back(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies.SharedPool, "take", lambda *_: False)
    response = await api.post("/v1/jobs", json={"model": "demo", "prompt": "a red circle"})
    assert (response.status_code, response.json()["code"]) == (503, "overloaded")
    assert "shared by all tenants" in response.json()["detail"]
    assert int(response.headers["retry-after"]) > 0


PREDICTIONS = "/compat/replicate/v1/models/any/demo/predictions"
WITH_IMAGE = ("/v1/jobs", "/v1/images/generations", "/v1/images/edits", "/v1/videos", PREDICTIONS)


async def test_a_data_url_has_one_limit_on_all_routes(fake_queue: Queue, tmp_path: Path) -> None:
    noise = io.BytesIO()
    Image.frombytes("RGB", (700, 700), random.Random(7).randbytes(3 * 700 * 700)).save(noise, "PNG")
    image = "data:image/png;base64," + base64.b64encode(noise.getvalue()).decode()
    async with serving(fake_queue, tmp_path, max_input_bytes=2_000_000) as api:
        body = {"model": "demo", "prompt": "a red circle", "image": image}
        assert (await api.post("/v1/jobs", json=body)).status_code == 202
        prediction = {"input": {"prompt": "a red circle", "image": image}}
        assert (await api.post(PREDICTIONS, json=prediction)).status_code == 201
        too_large = json.dumps({**body, "image": image + "A" * 2_400_000})
        for path in (*WITH_IMAGE, "/compat/huggingface/demo"):
            response = await api.post(path, content=too_large, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["code"]) == (413, "payload_too_large"), path
