"""HEAD: what monitors and link checkers send."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from harness.http_server import BODY, png
from harness.tables import row

from api.http.head_requests import HeadRequests

PATHS = [
    "/healthz",
    "/readyz",
    "/v1/models",
    "/v1/models/demo",
    "/v1/jobs",
    "/v1/jobs/{id}",
    "/v1/nothing",
    "/v1/jobs?limit=0",
]


async def test_head_is_get_without_its_body(api: httpx.AsyncClient) -> None:
    """With the same status and headers, also of an error."""
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    for path in PATHS:
        with row(path):
            head, get = [await api.request(method, path.format(id=job_id)) for method in ("HEAD", "GET")]
            assert (head.status_code, head.content) == (get.status_code, b"")
            same = ("content-type", "content-length", "cache-control")
            assert [head.headers.get(name) for name in same] == [get.headers.get(name) for name in same]
            assert head.headers["x-request-id"]


async def test_head_ignores_ranges(api: httpx.AsyncClient) -> None:
    """They count for GET only."""
    uploaded = (await api.post("/v1/inputs", files={"file": ("a.png", png())})).json()
    path, part = f"/v1/inputs/{uploaded['id']}/content", {"Range": "bytes=0-3"}
    assert (await api.get(path, headers=part)).status_code == 206
    head = await api.head(path, headers=part)
    assert (head.status_code, head.headers["content-length"]) == (200, str(uploaded["bytes"]))
    assert "content-range" not in head.headers


async def test_head_of_a_stream_ends(api: httpx.AsyncClient) -> None:
    """The transport of this test returns a response at its end."""
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    head = await api.head(f"/v1/jobs/{job_id}/events")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


async def test_head_of_what_cannot_be_read_is_not_allowed(api: httpx.AsyncClient) -> None:
    response = await api.head("/v1/jobs:bulk")
    assert response.status_code == 405
    assert "HEAD" not in response.headers["allow"]
    assert "HEAD" in (await api.put("/v1/jobs")).headers["allow"]


async def test_what_a_failed_request_has_to_release_is_known() -> None:
    """Its place among its tenant's requests is released at its end, by what its scope holds."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        scope["held"] = "a place"
        raise ConnectionError

    async def unused(*_: Any) -> Any:
        raise AssertionError

    scope = {"type": "http", "method": "HEAD", "path": "/"}
    with pytest.raises(ConnectionError):
        await HeadRequests(fails, own=())(scope, unused, unused)
    assert scope == {"type": "http", "method": "HEAD", "path": "/", "held": "a place"}
