"""JSON responses with stored objects: complete, of the stated length, and with little of them in memory."""

from __future__ import annotations

import base64
import json
import random
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import Request

from api.http.base64_json import Base64Json
from shared.config.settings import Settings
from shared.errors import NotFound, Overloaded
from shared.runtime.shares import SharedPool
from shared.storage import CHUNK_BYTES, Storage, connect


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    opened = connect(Settings(storage_dir=tmp_path))
    yield opened
    await opened.close()


def request_with(memory_bytes: int) -> Request:
    """Return a request to an API with so much memory for responses."""
    services = SimpleNamespace(responses=SharedPool("response_memory", memory_bytes))
    return Request({"type": "http", "app": SimpleNamespace(state=SimpleNamespace(services=services))})


@pytest.mark.parametrize("sizes", [(), (1,), (2, 3, 4), (CHUNK_BYTES,), (CHUNK_BYTES + 1, 5, 2 * CHUNK_BYTES + 2)])
async def test_the_response_has_the_objects_as_base64(storage: Storage, sizes: tuple[int, ...]) -> None:
    """Whatever their sizes are: chunks do not end where groups of three bytes do."""
    objects = [random.Random(size).randbytes(size) for size in sizes]
    body = Base64Json(request_with(256 * 1024 * 1024), storage)
    images = []
    for at, data in enumerate(objects):
        await storage.put(f"a/{at}.png", data, "image/png")
        images.append("data:image/png;base64," + body.add(f"a/{at}.png", len(data)))
    content = {"before": 'é"', "data": images, "after": [1, None]}
    response = await body.response(content, param="data", status=201, headers={"x-a": "b"})
    sent = b"".join([piece async for piece in response.pieces])
    assert (response.status_code, response.headers["x-a"]) == (201, "b")
    assert response.headers["content-length"] == str(len(sent))
    encoded = ["data:image/png;base64," + base64.b64encode(data).decode() for data in objects]
    assert json.loads(sent) == {**content, "data": encoded}


async def test_an_object_that_is_gone_is_an_error_before_the_response(storage: Storage) -> None:
    body = Base64Json(request_with(256 * 1024 * 1024), storage)
    content = {"data": [body.add("a/0.png", 10)]}
    with pytest.raises(NotFound) as failed:
        await body.response(content, param="data")
    assert failed.value.param == "data"


async def test_a_response_without_memory_is_refused_before_it_is_read(storage: Storage) -> None:
    await storage.put("a/0.png", bytes(CHUNK_BYTES), "image/png")
    body = Base64Json(request_with(CHUNK_BYTES), storage)
    content = {"data": [body.add("a/0.png", CHUNK_BYTES)]}
    with pytest.raises(Overloaded):
        await body.response(content, param="data")


async def test_a_client_that_reads_slowly_holds_little_memory(storage: Storage) -> None:
    """Eight images of 4 MB would be 43 MB of JSON."""
    body, size = Base64Json(request_with(256 * 1024 * 1024), storage), 4 * 1024 * 1024
    await storage.put("a/0.png", bytes(size), "image/png")
    tracemalloc.start()
    response = await body.response({"data": [body.add("a/0.png", size) for _ in range(8)]}, param="data")
    sent = 0
    async for piece in response.pieces:
        sent += len(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sent > 8 * size
    assert peak < size / 2
