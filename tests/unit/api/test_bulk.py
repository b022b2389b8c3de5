"""Bulk requests over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, png, serving

from api.routes.bulk import CHUNK_LINES
from shared.errors import RedisUnavailable
from shared.queue import Queue, QueueClient, Submission

NDJSON = {"Content-Type": "application/x-ndjson"}


def line(**fields: Any) -> bytes:
    return json.dumps({**BODY, **fields}).encode()


async def send(api: httpx.AsyncClient, *lines: bytes, **headers: str) -> list[dict[str, Any]]:
    all_headers = {**NDJSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
    response = await api.post("/v1/jobs:bulk", content=b"\n".join(lines), headers=all_headers)
    assert response.status_code == 200, response.text
    return [json.loads(one) for one in response.text.splitlines()]


async def test_each_line_gets_its_result_in_order(api: httpx.AsyncClient) -> None:
    results = await send(api, *(line(seed=seed) for seed in range(30)))
    assert [result["line"] for result in results] == list(range(1, 31))
    for seed, result in enumerate(results):
        assert (await api.get(result["url"])).json()["seed"] == seed
        assert result["replayed"] is False


async def test_a_bad_line_gets_an_error_and_the_others_are_submitted(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    results = await send(
        api,
        line(),
        line(steps=900),
        b"",
        b"no json",
        b'{"prompt": "\xff"}',
        line(model="none"),
        line(image="in_0123456789abcdef0123456789abcdef"),
        b'{"model": "demo", "prompt": "x", "prompt": "y"}',
        line(prompt="x" * 2_000_000),
        b"[" * 50_000,
        line(),
    )
    outcomes = [(result["line"], (result.get("error") or {"code": "ok", "param": None})) for result in results]
    assert [(number, error["code"], error["param"]) for number, error in outcomes] == [
        (1, "ok", None),
        (2, "invalid_request", "steps"),
        (4, "invalid_json", None),
        (5, "invalid_json", None),
        (6, "model_not_found", "model"),
        (7, "invalid_input_image", "image"),
        (8, "invalid_request", "prompt"),
        (9, "payload_too_large", "line"),
        (10, "invalid_json", None),
        (11, "ok", None),
    ]
    assert len((await fake_queue.jobs.page("default"))[0]) == 2


async def test_a_bulk_request_sent_again_enqueues_nothing_twice(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    lines = [line(seed=seed) for seed in range(5)]
    first = await send(api, *lines, Idempotency_Key="b1")
    again = await send(api, *lines, Idempotency_Key="b1")
    assert [result["id"] for result in again] == [result["id"] for result in first]
    assert all(result["replayed"] for result in again)
    changed = await send(api, line(seed=0), line(seed=77), Idempotency_Key="b1")
    assert changed[0]["id"] == first[0]["id"]
    assert changed[1]["error"]["code"] == "idempotency_key_reused"
    assert len((await fake_queue.jobs.page("default"))[0]) == 5


async def test_an_interrupted_bulk_request_is_completed_by_sending_it_again(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    lines = [line(seed=seed) for seed in range(6)]
    part = await send(api, *lines[:2], Idempotency_Key="b1")
    complete = await send(api, *lines, Idempotency_Key="b1")
    assert [result["id"] for result in complete[:2]] == [result["id"] for result in part]
    assert [result["replayed"] for result in complete] == [True, True, False, False, False, False]


async def test_no_script_submits_more_than_a_chunk(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    submit = fake_queue.jobs.submit

    async def counted(submissions: Sequence[Submission]) -> Any:
        sizes.append(len(submissions))
        return await submit(submissions)

    monkeypatch.setattr(fake_queue.jobs, "submit", counted)
    results = await send(api, *(line() for _ in range(2 * CHUNK_LINES + 50)))
    assert all("id" in result for result in results)
    assert sum(sizes) == 2 * CHUNK_LINES + 50
    assert max(sizes) <= CHUNK_LINES


async def test_lines_get_retry_after_when_the_queue_is_full(fake_queue: Queue, tmp_path: Path) -> None:
    settings = fake_queue.client.settings.model_copy(update={"max_queued_jobs": 3})
    full = Queue(QueueClient(fake_queue.client.redis, namespace="full", settings=settings))
    async with serving(full, tmp_path) as api:
        results = await send(api, *(line() for _ in range(5)))
    assert ["id" in result for result in results] == [True, True, True, False, False]
    assert {result["error"]["code"] for result in results[3:]} == {"queue_full"}
    assert all(result["error"]["retry_after_s"] >= 1 and result["error"]["retryable"] for result in results[3:])


async def test_lines_beyond_the_limit_are_not_read(fake_queue: Queue, tmp_path: Path) -> None:
    async with serving(fake_queue, tmp_path, max_bulk_lines=4) as api:
        results = await send(api, *(line() for _ in range(10)))
    assert ["id" in result for result in results] == [True] * 4 + [False]
    assert (results[4]["line"], results[4]["error"]["code"]) == (5, "too_many_lines")
    assert len((await fake_queue.jobs.page("default"))[0]) == 4


async def test_lines_get_an_error_while_redis_is_unavailable(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(submissions: Sequence[Submission]) -> Any:
        raise RedisUnavailable("cannot reach Redis: 10.0.0.7:6379 refused")

    monkeypatch.setattr(fake_queue.jobs, "submit", unavailable)
    async with serving(fake_queue, tmp_path) as api:
        results = await send(api, line(), line(steps=0), line())
    assert [result["error"]["code"] for result in results] == [
        "redis_unavailable",
        "invalid_request",
        "redis_unavailable",
    ]
    assert results[0]["error"]["retryable"]
    assert results[0]["error"]["message"] == "redis: cannot be reached"


async def test_lines_can_have_input_images(api: httpx.AsyncClient) -> None:
    uploaded = (await api.post("/v1/inputs", files={"file": png()})).json()["id"]
    results = await send(api, *(line(image=uploaded, seed=seed) for seed in range(20)))
    jobs = [(await api.get(result["url"])).json() for result in results]
    assert [job["seed"] for job in jobs] == list(range(20))
    assert {job["image"]["id"] for job in jobs} == {uploaded}


@pytest.mark.parametrize("body", [b"", b"\n\n\n", b"   \r\n"])
async def test_an_empty_bulk_request_has_an_empty_response(api: httpx.AsyncClient, body: bytes) -> None:
    response = await api.post("/v1/jobs:bulk", content=body, headers=NDJSON)
    assert (response.status_code, response.content) == (200, b"")


async def test_another_content_type_is_refused(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/jobs:bulk", content=line(), headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (415, "Content-Type")


async def test_a_request_without_memory_for_its_body_ends_with_an_error_line(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with an internal error in the middle of the response, a traceback in the log, and memory kept by it."""
    monkeypatch.setattr("api.http.bodies.SharedPool.take", lambda *_: False)
    response = await api.post("/v1/jobs:bulk", content=line() + b"\n", headers=NDJSON)
    error = json.loads(response.text)["error"]
    assert (response.status_code, error["code"], error["status"]) == (200, "overloaded", 503)
    assert error["retryable"]
