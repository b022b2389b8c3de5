"""Lines of a bulk request that name others by their keys."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, finish, png, serving

from api.routes.bulk import CHUNK_LINES
from shared.queue import Queue, QueueClient


async def send(api: httpx.AsyncClient, *lines: dict[str, Any], name: str | None = None) -> list[dict[str, Any]]:
    headers = {"Content-Type": "application/x-ndjson"} | ({} if name is None else {"Idempotency-Key": name})
    content = "\n".join(json.dumps({**BODY, **line}) for line in lines)
    response = await api.post("/v1/jobs:bulk", content=content, headers=headers)
    assert response.status_code == 200, response.text
    return [json.loads(one) for one in response.text.splitlines()]


async def jobs(api: httpx.AsyncClient, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [(await api.get(f"/v1/jobs/{result['id']}")).json() for result in results]


async def test_lines_name_earlier_ones_by_their_keys(api: httpx.AsyncClient) -> None:
    other = (await send(api, {}))[0]["id"]
    lines = [{"key": "a"}, {"key": "b", "after": ["a"]}, {}, {"key": "c.1", "after": ["b", other, "a"]}]
    results = await send(api, *lines)
    assert [(result["line"], result.get("key")) for result in results] == [(1, "a"), (2, "b"), (3, None), (4, "c.1")]
    a, b, _, c = await jobs(api, results)
    assert (a["after"], b["after"], c["after"]) == ([], [a["id"]], [b["id"], other, a["id"]])
    assert [job["queue"]["reason"] == "waiting" for job in (a, b, c)] == [False, True, True]


async def test_keys_hold_for_the_whole_request_and_no_longer(api: httpx.AsyncClient) -> None:
    results = await send(api, {"key": "a"}, *[{"key": str(at)} for at in range(CHUNK_LINES)], {"after": ["a", "7"]})
    (last,) = await jobs(api, results[-1:])
    assert last["after"] == [results[0]["id"], results[8]["id"]]
    (alone,) = await send(api, {"after": ["a"]})
    assert (alone["error"]["param"], "'a'" in alone["error"]["message"]) == ("after.0", True)


async def test_a_chain_of_lines_is_submitted_in_order(api: httpx.AsyncClient) -> None:
    chain = [{"key": str(at), **({"after": [str(at - 1)]} if at else {})} for at in range(20)]
    made = await jobs(api, await send(api, *chain))
    assert [job["after"] for job in made[1:]] == [[job["id"]] for job in made[:-1]]


async def test_a_line_can_wait_for_one_whose_image_is_stored_first(api: httpx.AsyncClient) -> None:
    uploaded = (await api.post("/v1/inputs", files={"file": png()})).json()["id"]
    first, second = await jobs(api, await send(api, {"key": "a", "image": uploaded}, {"after": ["a"]}))
    assert second["after"] == [first["id"]]


async def test_a_line_cannot_name_itself_or_a_later_one(api: httpx.AsyncClient) -> None:
    results = await send(api, {"key": "a", "after": ["b"]}, {"key": "b", "after": ["b"]}, {"after": [7]}, {})
    errors = [(result.get("error") or {"param": "none", "message": ""}) for result in results]
    assert [error["param"] for error in errors] == ["after.0", "after.0", "after.0", "none"]
    assert errors[0]["message"].startswith("after.0: no line before this one has the key 'b'")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        *((name, {name: {"job": "b"}}) for name in ("image", "mask", "last_image", "video", "face_video", "audio")),
        ("images.1", {"images": ["in_1", {"job": "b", "artifact": 1}]}),
        ("controls.0.image", {"controls": [{"id": "c", "image": {"job": "b"}}, 7]}),
    ],
)
async def test_an_image_names_an_earlier_line_too(api: httpx.AsyncClient, param: str, fields: dict[str, Any]) -> None:
    (unknown,) = await send(api, fields)
    assert (unknown["error"]["param"], "the key 'b'" in unknown["error"]["message"]) == (param, True)
    _, refused = await send(api, {"key": "b", "steps": 900}, fields)
    assert (refused["error"]["code"], refused["error"]["param"]) == ("parent_refused", param)


async def test_a_graph_of_images_is_submitted_at_once(api: httpx.AsyncClient) -> None:
    lines = [{"key": "a", "n": 2}, {"key": "b", "image": {"job": "a", "artifact": 1}}, {"image": {"job": "b"}}]
    results = await send(api, *({"strength": 0.5 if "image" in line else None, **line} for line in lines))
    a, b, c = await jobs(api, results)
    assert (b["image"]["job"], b["image"]["artifact"], c["image"]["job"]) == (a["id"], 1, b["id"])
    assert [job["queue"]["reason"] == "waiting" for job in (a, b, c)] == [False, True, True]
    again = await send(api, {"key": "a"}, {"image": {"job": "a", "artifact": 1}, "strength": 0.5})
    assert (again[1]["error"]["code"], again[1]["error"]["param"]) == ("invalid_input_image", "image")


async def test_an_image_is_the_result_of_a_line_that_was_sent_before(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Whose job has ended since."""
    lines = [{"key": "a"}, {"image": {"job": "a"}, "strength": 0.5}]
    (first,) = await send(api, *lines[:1], name="n")
    data = await finish(fake_queue, tmp_path, first["id"])
    _, second = await jobs(api, await send(api, *lines, name="n"))
    assert second["image"]["id"] == f"in_{hashlib.sha256(data).hexdigest()[:32]}"


@pytest.mark.parametrize("key", ["", "-a", "a b", "a" * 65, 7, None, ["a"], "job_00000000000000000000000000"])
async def test_what_can_be_no_key_is_refused(api: httpx.AsyncClient, key: Any) -> None:
    (result,) = await send(api, {"key": key, "steps": 0})
    assert [fault["param"] for fault in result["error"]["errors"]] == ["key", "steps"]


async def test_a_key_is_that_of_one_line(api: httpx.AsyncClient) -> None:
    results = await send(api, {"key": "a"}, {"key": "a"}, {"after": ["a"]})
    assert (results[1]["error"]["param"], "line 1" in results[1]["error"]["message"]) == ("key", True)
    (child,) = await jobs(api, results[2:])
    assert child["after"] == [results[0]["id"]]


async def test_lines_that_name_a_refused_one_are_refused_with_its_reason(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    results = await send(api, {"key": "a", "steps": 900}, {"key": "b", "after": ["a"]}, {"after": ["b"]})
    reason = results[0]["error"]["message"]
    for number, (key, result) in enumerate(zip("ab", results[1:], strict=True), 1):
        error = result["error"]
        assert (error["code"], error["param"], error["retryable"]) == ("parent_refused", "after.0", False)
        assert error["message"] == f"after.0: line {number}, {key}, was refused: {reason}"
    assert (await fake_queue.jobs.page("default"))[0] == []


async def test_lines_that_name_one_without_room_can_be_sent_again(fake_queue: Queue, tmp_path: Path) -> None:
    settings = fake_queue.client.settings.model_copy(update={"max_queued_jobs": 2})
    full = Queue(QueueClient(fake_queue.client.redis, namespace="full", settings=settings))
    lines = [{}, {}, {"key": "a"}, {"after": ["a"]}]
    async with serving(full, tmp_path) as api:
        results = await send(api, *lines, name="n")
        assert [result.get("error", {}).get("code") for result in results[2:]] == ["queue_full", "parent_refused"]
        assert results[3]["error"]["retryable"]
        for result in results[:2]:
            await api.post(f"/v1/jobs/{result['id']}/cancel")
        _, _, first, second = await jobs(api, await send(api, *lines, name="n"))
    assert second["after"] == [first["id"]]


async def test_a_request_sent_again_has_the_same_jobs_and_links(api: httpx.AsyncClient) -> None:
    lines = [{"key": "a"}, {"key": "b", "after": ["a"]}, {"after": ["a", "b"]}]
    part = await send(api, *lines[:1], name="n")
    whole = await send(api, *lines, name="n")
    again = await send(api, *lines, name="n")
    assert [result["replayed"] for result in whole] == [True, False, False]
    assert [{**result, "replayed": False} for result in again] == [{**result, "replayed": False} for result in whole]
    a, b, c = await jobs(api, whole)
    assert (a["id"], b["after"], c["after"]) == (part[0]["id"], [a["id"]], [a["id"], b["id"]])
