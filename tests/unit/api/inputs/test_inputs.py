"""Input images over HTTP."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from pathlib import Path

import httpx
import pytest
from harness.http_server import BODY, png, serving
from harness.tables import row

from shared.queue import Queue


def bomb(side: int = 50_000) -> bytes:
    """Return a PNG of a few bytes whose header has `side` x `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(b"\0" * 100_000))
        + chunk(b"IEND", b"")
    )


async def test_the_id_of_an_upload_depends_on_its_content(api: httpx.AsyncClient) -> None:
    first = await api.post("/v1/inputs", files={"file": ("a.png", png(80, 48), "image/png")})
    again = await api.post("/v1/inputs", files={"file": ("b.gif", png(80, 48), "image/gif")})
    stored = first.json()
    assert first.status_code == 201
    assert (stored["width"], stored["height"], stored["content_type"]) == (80, 48, "image/png")
    assert stored["bytes"] == len(png(80, 48))
    assert stored["expires_at"].endswith("Z")
    assert "key" not in stored
    assert again.json()["id"] == stored["id"]


INVALID_IMAGES = [b"", b"no image", b"GIF89a", png()[:100], bomb(), b"\x89PNG\r\n\x1a\n", b"\0" * 100_000]


async def test_invalid_images_are_refused_and_not_stored(api: httpx.AsyncClient, tmp_path: Path) -> None:
    for data in INVALID_IMAGES:
        with row(data):
            response = await api.post("/v1/inputs", files={"file": ("a.png", data, "image/png")})
            assert (response.status_code, response.json()["code"]) == (422, "invalid_input_image")
            assert response.json()["error"]["param"] == "file"
            assert not [path for path in (tmp_path / "storage").rglob("*") if path.is_file()]


async def test_a_replay_does_not_read_its_image(api: httpx.AsyncClient, tmp_path: Path) -> None:
    """The key identifies the job, even if its image has been removed or is slow to fetch."""
    image = (await api.post("/v1/inputs", files={"file": png()})).json()["id"]
    key = {"Idempotency-Key": "k1"}
    first = await api.post("/v1/jobs", json={**BODY, "image": image}, headers=key)
    lines = (json.dumps({**BODY, "image": image}) + "\n").encode()
    head = {"Content-Type": "application/x-ndjson", **key}
    first_line = (await api.post("/v1/jobs:bulk", content=lines, headers=head)).json()
    shutil.rmtree(tmp_path / "storage" / "inputs")
    again = await api.post("/v1/jobs", json={**BODY, "image": image}, headers=key)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert again.headers["idempotent-replayed"] == "true"
    again_line = (await api.post("/v1/jobs:bulk", content=lines, headers=head)).json()
    assert again_line == {**first_line, "replayed": True}
    other = await api.post("/v1/jobs", json={**BODY, "image": image, "n": 2}, headers=key)
    assert other.json()["code"] == "idempotency_key_reused"
    without_key = await api.post("/v1/jobs", json={**BODY, "image": image})
    assert without_key.json()["code"] == "invalid_input_image"


async def test_a_too_large_upload_is_refused(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, max_input_bytes=10_000) as api:
        a_little = await api.post("/v1/inputs", files={"file": b"x" * 10_001})
        much = await api.post("/v1/inputs", files={"file": b"x" * 200_000})
    assert (a_little.status_code, a_little.json()["error"]["param"]) == (422, "file")
    assert (much.status_code, much.json()["code"]) == (413, "payload_too_large")


async def test_an_upload_without_its_file_is_refused(api: httpx.AsyncClient) -> None:
    other_name = await api.post("/v1/inputs", files={"image": png()})
    text = await api.post("/v1/inputs", files={"file": (None, "text")})
    for response in (other_name, text):
        assert (response.status_code, response.json()["error"]["param"]) == (422, "file")


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=a", b"garbage", 400),
        ("multipart/form-data; boundary=a", b"--a\r\nContent-Disposition: form-data\r\n\r\nx\r\n--a--\r\n", 400),
        ("multipart/form-data; boundary=a", b"", 422),
        ("multipart/form-data; boundary=" + "a" * 10_000, b"x", 400),
    ],
)
async def test_a_body_without_an_upload_is_refused(
    api: httpx.AsyncClient, content_type: str, body: bytes, status: int
) -> None:
    response = await api.post("/v1/inputs", content=body, headers={"Content-Type": content_type})
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"


async def test_an_upload_of_many_parts_is_refused(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/inputs", files=[("file", png()) for _ in range(3)])
    assert response.status_code == 400
