"""Requests that no client of ours sends: each gets a documented refusal or succeeds, never an internal error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, png, serving

from shared.queue import Queue

SURROGATE = r'{"a": "\ud800"}'
JSON = {"content-type": "application/json"}


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path) as client:
        yield client


async def test_metadata_that_is_no_text_is_refused(api: httpx.AsyncClient) -> None:
    upload = {"content": ("a.png", png(), "image/png"), "metadata": (None, SURROGATE, "application/json")}
    response = await api.post("/compat/replicate/v1/files", files=upload)
    assert (response.status_code, response.json()["errors"][0]["param"]) == (422, "a")


@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("GET", "/v1/jobs?created_after=0001-01-01T00:00:00%2B14:00", {}),
        ("GET", "/v1/jobs?created_before=9999-12-31T23:59:59-14:00", {}),
        ("GET", "/v1/jobs?after=%ff%00", {}),
        ("GET", "/v1/jobs?batch_id=%00", {}),
        ("GET", "/v1/jobs?metadata.%ff=%00", {}),
        ("GET", "/v1/jobs?wait=nan&limit=%D9%A3", {}),
        ("GET", "/v1/files?after=%00", {}),
        ("GET", "/v1/batches?after=%ff", {}),
        ("GET", "/v1/videos?after=%ff", {}),
        ("GET", "/v1/dead-letters?after=%ff%00", {}),
        ("GET", "/v1/dead-letters/%00", {}),
        ("GET", "/v1/webhooks/%ff", {}),
        ("GET", "/v1/webhooks/deliveries?endpoint=%00", {}),
        ("POST", "/v1/webhooks/deliveries/%ff/redeliver", {}),
        ("POST", "/v1/webhooks/deliveries/1-1.we_%C2%B2/redeliver", {}),
        ("GET", "/v1/models/%ff%00", {}),
        ("GET", "/v1/scale/%ff", {}),
        ("GET", "/compat/replicate/v1/predictions?cursor=%ff", {}),
        ("GET", "/compat/replicate/v1/predictions/%00", {}),
        ("POST", "/compat/huggingface/%00", {"content": "{}", "headers": JSON}),
        ("POST", "/v1/jobs", {"content": r'{"model": "demo", "prompt": "\ud800"}', "headers": JSON}),
        ("POST", "/v1/jobs", {"content": r'{"model": "\ud800", "prompt": "a"}', "headers": JSON}),
        ("POST", "/v1/jobs", {"content": r'{"model": "demo", "prompt": "a", "\ud800": 1}', "headers": JSON}),
        ("POST", "/v1/jobs", {"content": r'{"model": "demo", "prompt": "a", "image": "\ud800"}', "headers": JSON}),
        ("POST", "/v1/webhooks", {"content": r'{"url": "https://\ud800"}', "headers": JSON}),
        ("POST", "/v1/batches", {"content": r'{"input_file_id": "\ud800", "endpoint": "/v1/jobs"}', "headers": JSON}),
        ("POST", "/v1/images/generations", {"content": r'{"prompt": "a", "size": "\ud800"}', "headers": JSON}),
        (
            "POST",
            "/compat/replicate/v1/predictions",
            {"content": r'{"version": "demo", "input": {"prompt": "a", "\ud800": "\ud800"}}', "headers": JSON},
        ),
        (
            "POST",
            "/compat/huggingface/demo",
            {"content": r'{"inputs": "a", "parameters": {"\ud800": "\ud800"}}', "headers": JSON},
        ),
        ("POST", "/v1/jobs", {"json": BODY, "headers": {"Prefer": "wait=²".encode("latin-1")}}),
        ("POST", "/v1/jobs:bulk", {"content": SURROGATE, "headers": {"content-type": "application/x-ndjson"}}),
        ("POST", "/v1/inputs", {"content": b"--a\r\n\r\n", "headers": {"content-type": "multipart/form-data"}}),
        (
            "POST",
            "/v1/inputs",
            {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=²".encode("latin-1")}},
        ),
        (
            "POST",
            "/v1/files",
            {
                "files": {
                    "file": ("\udcff\u2028.jsonl".encode("utf-8", "replace").decode(), b"{}", "a/b"),
                    "purpose": (None, "batch"),
                }
            },
        ),
    ],
)
async def test_an_odd_request_is_no_internal_error(
    api: httpx.AsyncClient, method: str, path: str, options: dict[str, Any]
) -> None:
    response = await api.request(method, path, **options)
    assert response.status_code < 500, response.text


@pytest.mark.parametrize(
    "event_id", ["9" * 20 + "-1", "1-" + "9" * 20, "0-0", "18446744073709551615-18446744073709551615"]
)
async def test_a_stream_after_any_event_id_is_no_internal_error(api: httpx.AsyncClient, event_id: str) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await api.post(f"/v1/jobs/{job_id}/cancel")
    response = await api.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": event_id})
    assert response.status_code in (200, 204, 422), response.text
    assert response.status_code != 200 or '"canceled"' in response.text
