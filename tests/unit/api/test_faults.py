"""All faults of a body in one response."""

from __future__ import annotations

import json
from typing import Any

import httpx
from harness.http_server import BODY
from harness.tables import row


def params(problem: dict[str, Any]) -> list[str]:
    return [fault["param"] for fault in problem["errors"]]


FAULTS = [
    ({"stpes": 8, "prompt": 5}, ["prompt", "stpes"]),
    ({"width": 65, "height": 136, "steps": 101}, ["width", "height", "steps"]),
    ({"stpes": 8, "width": 65, "scheduler": "Nope"}, ["stpes", "width", "scheduler"]),
    ({"prompt": "", "n": 99}, ["prompt", "n"]),
    ({"model": "no-such", "stpes": 8}, ["stpes", "model"]),
    ({"model": 3, "width": 65}, ["model"]),
    ({"strength": 0.5, "seed": 2**63 - 1}, ["strength", "seed"]),
    ({"batch_id": "batch_" + 26 * "0", "webhook": "ftp://a", "n": 99}, ["webhook", "batch_id", "n"]),
    ({"webhook": 5, "webhook_events": ["job.succeeded"]}, ["webhook"]),
    ({"on_deadline": "run"}, ["on_deadline"]),
    ({"deadline_s": 5, "on_deadline": "wait"}, ["on_deadline"]),
]


async def test_all_faults_of_a_body_are_named(api: httpx.AsyncClient) -> None:
    for changed, named in FAULTS:
        with row(changed):
            response = await api.post("/v1/jobs", json={**BODY, **changed})
            problem = response.json()
            assert params(problem) == named, problem
            assert problem["detail"] == problem["errors"][0]["message"]
            assert problem["error"]["param"] == named[0]


async def test_all_faults_of_a_bulk_line_are_named(api: httpx.AsyncClient) -> None:
    body = json.dumps({**BODY, "stpes": 8, "width": 65}) + "\n" + json.dumps(BODY)
    response = await api.post("/v1/jobs:bulk", content=body, headers={"Content-Type": "application/x-ndjson"})
    first, second = map(json.loads, response.text.splitlines())
    assert params(first["error"]) == ["stpes", "width"]
    assert first["error"]["param"] == "stpes"
    assert second["id"].startswith("job_")


PREDICTIONS = "/compat/replicate/v1/models/any/demo/predictions"
GARBAGE = "data:image/png;base64,AAAA"


OWN_FIELDS = [
    (
        "/v1/images/generations",
        {
            "prompt": "",
            "size": "wide",
            "response_format": "gif",
            "steps": 101,
            "stpes": 8,
            "background": "transparent",
        },
        ["response_format", "background", "size", "stpes", "prompt", "steps"],
    ),
    (
        "/v1/images/generations",
        {"prompt": "x", "background": "transparent", "size": "65x64", "n": 0},
        ["background", "n", "size"],
    ),
    ("/v1/images/edits", {"prompt": "x", "image": "sketch", "quality": 5}, ["quality", "image"]),
    (
        PREDICTIONS,
        {"input": {"prompt": "x", "aspect_ratio": "wide", "num_outputs": 0, "steps": 5, "num_inference_steps": 6}},
        ["input.num_inference_steps", "input.aspect_ratio", "input.num_outputs"],
    ),
    (
        PREDICTIONS,
        {
            "input": {
                "size": "wide",
                "lora_weights": "ink",
                "num_inference_steps": 101,
                "batch_id": "a",
                "go_fast": 3,
            }
        },
        [
            "input.batch_id",
            "input.go_fast",
            "input.size",
            "input.prompt",
            "input.num_inference_steps",
            "input.lora_weights",
        ],
    ),
    (
        "/compat/huggingface/demo",
        {
            "inputs": "",
            "parameters": {"stpes": 8, "num_inference_steps": 101, "target_size": {"width": 64}, "n": 2},
        },
        ["inputs", "height", "n", "stpes", "steps"],
    ),
    ("/v1/jobs", {**BODY, "num_inference_steps": 0, "width": 65}, ["num_inference_steps", "width"]),
    ("/v1/jobs", {**BODY, "image": "sketch", "mask": "job_x", "n": 0}, ["n", "image", "mask"]),
    (
        "/v1/webhooks",
        {"url": 1, "events": ["job.done", "job.failed", "batch.done"]},
        ["url", "events.0", "events.2"],
    ),
]


async def test_faults_of_a_protocols_own_fields_do_not_hide_others(api: httpx.AsyncClient) -> None:
    for path, body, named in OWN_FIELDS:
        with row(path, body):
            problem = (await api.post(path, json=body)).json()
            assert params(problem) == named, problem


async def test_fals_errors_have_all_faults(api: httpx.AsyncClient) -> None:
    body = {"prompt": "", "image_size": "wide", "sync_mode": True, "num_images": 99, "num_inference_steps": 101}
    response = await api.post("/compat/fal/any/demo", json=body)
    named = [fault["loc"] for fault in response.json()["detail"]]
    fields = ["sync_mode", "image_size", "prompt", "num_inference_steps", "num_images"]
    assert named == [["body", field] for field in fields], response.text


async def test_all_images_that_cannot_be_used_are_named(api: httpx.AsyncClient) -> None:
    body = {**BODY, "image": GARBAGE, "mask": "in_" + 32 * "0"}
    problem = (await api.post("/v1/jobs", json=body)).json()
    assert problem["code"] == "invalid_input_image"
    assert [fault["message"] for fault in problem["errors"]] == [
        "image: unsupported image; send a PNG, JPEG or WebP",
        f"mask: unknown or expired input: in_{32 * '0'}; upload it again",
    ]
    files = {"image": ("a.png", b"no image"), "mask": ("b.png", b"")}
    form = {"prompt": "x", "model": "demo"}
    problem = (await api.post("/v1/images/edits", data=form, files=files)).json()
    assert params(problem) == ["image", "mask"], problem


async def test_a_field_name_with_a_backslash_is_named_in_the_error_of_a_prediction(api: httpx.AsyncClient) -> None:
    values = {"prompt": "x", "\\": 1, "a\\g<9>": 1}
    response = await api.post("/compat/replicate/v1/models/any/demo/predictions", json={"input": values})
    assert response.status_code == 422, response.text
    assert params(response.json()) == ["input.\\", "input.a\\g<9>"]


async def test_all_faults_of_a_query_are_named(api: httpx.AsyncClient) -> None:
    response = await api.get("/v1/jobs", params={"limit": "many", "batch_id": "a b"})
    assert sorted(params(response.json())) == ["batch_id", "limit"]


async def test_a_body_with_thousands_of_faults_gets_a_bounded_answer(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/jobs", json={**BODY, **{f"x{number}": 1 for number in range(900)}})
    assert len(response.json()["errors"]) == 32


async def test_an_error_of_another_kind_is_its_only_fault(api: httpx.AsyncClient) -> None:
    problem = (await api.get("/v1/jobs/no-such")).json()
    assert problem["errors"] == [{"message": problem["detail"], "param": "id", "code": "not_found"}]
