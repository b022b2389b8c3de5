"""Errors over HTTP: one form for all, with the invalid field and without a traceback."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog
from harness.http_server import BODY, application, serving
from harness.tables import row

from api import app
from api.http import openapi
from shared.queue import Queue, QueueClient, Submission
from shared.storage.folder import FolderStorage

JSON = {"Content-Type": "application/json"}


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Check the form of an error, and return its status, code and field."""
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert set(problem) == {"type", "title", "status", "detail", "code", "request_id", "error", "errors"}
    assert set(problem["error"]) == {"message", "type", "param", "code"}
    assert problem["status"] == response.status_code
    assert problem["code"] == problem["error"]["code"]
    assert problem["detail"] == problem["error"]["message"]
    first = problem["error"]
    assert problem["errors"][0] == {name: first[name] for name in ("message", "param", "code")}
    assert problem["request_id"] == response.headers["x-request-id"]
    return response.status_code, problem["code"], problem["error"]["param"]


INVALID_FIELDS = [
    ({"model": "no-such"}, 404, "model_not_found", "model"),
    ({"model": None}, 422, "invalid_request", "model"),
    ({"prompt": ""}, 422, "invalid_request", "prompt"),
    ({"prompt": 5}, 422, "invalid_request", "prompt"),
    ({"prompt": "x" * 501}, 422, "invalid_request", "prompt"),
    ({"negative_prompt": ["x"]}, 422, "invalid_request", "negative_prompt"),
    ({"width": 72.5}, 422, "invalid_request", "width"),
    ({"width": "64"}, 422, "invalid_request", "width"),
    ({"width": 65}, 422, "invalid_request", "width"),
    ({"height": 136}, 422, "invalid_request", "height"),
    ({"width": 10**30}, 422, "invalid_request", "width"),
    ({"steps": 0}, 422, "invalid_request", "steps"),
    ({"steps": 101}, 422, "invalid_request", "steps"),
    ({"num_inference_steps": -1}, 422, "invalid_request", "num_inference_steps"),
    ({"n": 9}, 422, "invalid_request", "n"),
    ({"n": True}, 422, "invalid_request", "n"),
    ({"seed": -2}, 422, "invalid_request", "seed"),
    ({"seed": 2**63}, 422, "invalid_request", "seed"),
    ({"guidance_scale": 21}, 422, "invalid_request", "guidance_scale"),
    ({"guidance_scale": 10**400}, 422, "invalid_request", "guidance_scale"),
    ({"guidance_scale": "2"}, 422, "invalid_request", "guidance_scale"),
    ({"guidance_scale": True}, 422, "invalid_request", "guidance_scale"),
    ({"deadline_s": True}, 422, "invalid_request", "deadline_s"),
    ({"strength": "0.5"}, 422, "invalid_request", "strength"),
    ({"max_sequence_length": 513}, 422, "invalid_request", "max_sequence_length"),
    ({"metadata": {"": "x"}}, 422, "invalid_request", "metadata"),
    ({"metadata": {"k" * 65: "x"}}, 422, "invalid_request", f"metadata.{'k' * 65}"),
    ({"scheduler": "Nope"}, 422, "invalid_request", "scheduler"),
    ({"strength": 0.5}, 422, "invalid_request", "strength"),
    ({"image": "in_0123456789abcdef0123456789abcdef"}, 422, "invalid_input_image", "image"),
    ({"image": "data:image/png;base64,AAAA"}, 422, "invalid_input_image", "image"),
    ({"image": "file:///etc/passwd"}, 422, "invalid_input_image", "image"),
    ({"image": "https://127.0.0.1/a.png"}, 422, "invalid_input_image", "image"),
    ({"output_format": "gif"}, 422, "invalid_request", "output_format"),
    ({"priority": "now"}, 422, "invalid_request", "priority"),
    ({"deadline_s": 0}, 422, "invalid_request", "deadline_s"),
    ({"metadata": {"a": 1}}, 422, "invalid_request", "metadata.a"),
    ({"metadata": {str(key): "" for key in range(17)}}, 422, "invalid_request", "metadata"),
    ({"batch_id": "a b"}, 422, "invalid_request", "batch_id"),
    ({"no_such_field": 1}, 422, "invalid_request", "no_such_field"),
    ({"prompt": "a\0b"}, 422, "invalid_request", "prompt"),
]


async def test_an_invalid_field_is_named(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    for changed, status, code, param in INVALID_FIELDS:
        with row(changed):
            response = await api.post("/v1/jobs", content=json.dumps({**BODY, **changed}), headers=JSON)
            assert error_of(response) == (status, code, param)
            assert (await fake_queue.jobs.page("default"))[0] == []


NO_JOBS = [
    (b"{", 400, "invalid_json", None),
    (b'{"model":"demo","prompt":"x","guidance_scale":NaN}', 400, "invalid_json", None),
    (b'{"model":"demo","prompt":"x","guidance_scale":1e999}', 422, "invalid_request", "guidance_scale"),
    (b'{"model":"demo","prompt":' + b"[" * 900 + b"]" * 900 + b"}", 422, "invalid_request", "prompt"),
    (b'{"model":"demo","prompt":"x","prompt":"y"}', 422, "invalid_request", "prompt"),
    (b"[]", 422, "invalid_request", None),
    (b"null", 422, "invalid_request", None),
    (b'"text"', 422, "invalid_request", None),
]


async def test_a_body_without_a_job_is_refused(api: httpx.AsyncClient) -> None:
    for raw, status, code, param in NO_JOBS:
        with row(raw):
            response = await api.post("/v1/jobs", content=raw, headers=JSON)
            assert error_of(response) == (status, code, param)


async def test_a_long_field_name_is_shortened_in_the_error(api: httpx.AsyncClient) -> None:
    response = await api.post("/v1/jobs", json={**BODY, "x" * 500_000: 1})
    assert error_of(response)[0] == 422
    assert len(response.content) < 4_000


async def test_error_messages_are_plain(api: httpx.AsyncClient) -> None:
    unknown = await api.post("/v1/jobs", json={**BODY, "cfg": 2})
    assert unknown.json()["detail"] == "cfg: there is no such field"
    array = await api.post("/v1/jobs", json=[BODY])
    assert array.json()["detail"] == "body: it must be a JSON object"


CONTENT_TYPES = ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"]


async def test_another_content_type_is_refused(api: httpx.AsyncClient) -> None:
    for content_type in CONTENT_TYPES:
        with row(content_type):
            response = await api.post("/v1/jobs", content=json.dumps(BODY), headers={"Content-Type": content_type})
            assert error_of(response) == (415, "unsupported_media_type", "Content-Type")


async def test_a_content_type_can_have_parameters(api: httpx.AsyncClient) -> None:
    response = await api.post(
        "/v1/jobs", content=json.dumps(BODY), headers={"Content-Type": "Application/JSON; charset=utf-8"}
    )
    assert response.status_code == 202


async def test_a_too_large_body_is_refused_with_and_without_content_length(fake_queue: Queue, tmp_path: Path) -> None:
    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1_000

    async with serving(fake_queue, tmp_path, max_body_bytes=10_000) as api:
        announced = await api.post("/v1/webhooks", content=b" " * 10_001, headers=JSON)
        streamed = await api.post("/v1/webhooks", content=unannounced(), headers=JSON)
        fits = await api.post("/v1/jobs", content=json.dumps(BODY) + " " * 9_000, headers=JSON)
    assert error_of(announced) == error_of(streamed) == (413, "payload_too_large", "body")
    assert fits.status_code == 202


UNKNOWN_PATHS = [
    ("GET", "/nothing", 404, "not_found"),
    ("POST", "/", 405, "method_not_allowed"),
    ("GET", "/v1/nothing", 404, "not_found"),
    ("GET", "/v1/jobs/", 404, "not_found"),
    ("GET", "/v1/jobs/no-such", 404, "not_found"),
    ("GET", "/v1/jobs/job_00000000000000000000000000", 404, "not_found"),
    ("GET", "/v1/jobs/job_%00", 404, "not_found"),
    ("GET", "/v1/jobs/%ff%fe", 404, "not_found"),
    ("GET", "/v1/jobs/job_00000000000000000000000000/artifacts/0", 404, "not_found"),
    ("GET", "/v1/jobs/job_00000000000000000000000000/artifacts/x", 404, "not_found"),
    ("GET", "/v1/models/no-such", 404, "model_not_found"),
    ("PUT", "/v1/jobs", 405, "method_not_allowed"),
    ("POST", "/v1/models", 405, "method_not_allowed"),
    ("GET", "/v1/jobs:bulk", 405, "method_not_allowed"),
]


async def test_an_unknown_path_has_the_same_form_of_error(api: httpx.AsyncClient) -> None:
    for method, path, status, code in UNKNOWN_PATHS:
        with row(method, path):
            response = await api.request(method, path)
            assert error_of(response)[:2] == (status, code)
            assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/scale", "there is /v1/scale/{namespace}"),
        ("/v1/scale/", "there is /v1/scale/{namespace}"),
        ("/v1/scales", "GET /openapi.json lists the paths"),
    ],
)
async def test_the_error_of_a_path_that_lacks_a_name_has_the_whole_path(
    api: httpx.AsyncClient, path: str, hint: str
) -> None:
    assert (await api.get(path)).json()["detail"] == f"no such path: {path}; {hint}"


INVALID_QUERIES = [
    ("/v1/jobs?limit=0", "limit"),
    ("/v1/jobs?limit=many", "limit"),
    ("/v1/jobs?status=done", "status"),
    ("/v1/jobs?batch_id=a%20b", "batch_id"),
    ("/v1/jobs?created_after=yesterday", "created_after"),
    ("/v1/jobs?after=nothing", "after"),
    ("/v1/jobs?stauts=queued", "stauts"),
    ("/v1/jobs/job_00000000000000000000000000?wait=nan", "wait"),
    ("/v1/jobs/job_00000000000000000000000000?wait=-1", "wait"),
]


async def test_an_invalid_query_parameter_is_named(api: httpx.AsyncClient) -> None:
    for path, param in INVALID_QUERIES:
        with row(path):
            assert error_of(await api.get(path)) == (422, "invalid_request", param)


INVALID_KEYS = ["", " ", "a b", "k" * 256, "k\u00e9"]


async def test_an_invalid_idempotency_key_is_named(api: httpx.AsyncClient) -> None:
    for key in INVALID_KEYS:
        with row(key):
            response = await api.post("/v1/jobs", json=BODY, headers={"Idempotency-Key": key.encode("latin-1")})
            assert error_of(response) == (422, "invalid_request", "Idempotency-Key")


async def test_a_full_queue_returns_retry_after(fake_queue: Queue, tmp_path: Path, settings_for: Any) -> None:
    settings = fake_queue.client.settings.model_copy(update={"max_queued_jobs": 1})
    full = Queue(QueueClient(fake_queue.client.redis, namespace="full", settings=settings))
    async with serving(full, tmp_path) as api:
        assert (await api.post("/v1/jobs", json=BODY)).status_code == 202
        response = await api.post("/v1/jobs", json=BODY)
    assert error_of(response)[:2] == (429, "queue_full")
    assert int(response.headers["retry-after"]) >= 1


async def test_a_used_up_quota_is_named(fake_queue: Queue, tmp_path: Path) -> None:
    """Submits, images and files; the response says what makes room, and deleting makes room."""
    limits = {"max_kept_jobs_per_tenant": 1, "max_stored_bytes_per_tenant": 10}
    settings = fake_queue.client.settings.model_copy(update=limits)
    full = Queue(QueueClient(fake_queue.client.redis, namespace="kept", settings=settings))
    async with serving(full, tmp_path) as api:
        job = (await api.post("/v1/jobs", json=BODY)).json()
        assert (await api.post(f"/v1/jobs/{job['id']}/cancel")).is_success
        response = await api.post("/v1/jobs", json=BODY)
        upload = {"file": ("a.jsonl", b'{"line": 1}\n', "application/jsonl")}
        files = await api.post("/v1/files", files=upload, data={"purpose": "batch"})
        described = (await api.get("/openapi.json")).json()["paths"]
        assert (await api.delete(f"/v1/jobs/{job['id']}")).is_success
        again = await api.post("/v1/jobs", json=BODY)
    for refused, quota in ((response, "kept_jobs"), (files, "stored_bytes")):
        assert error_of(refused)[:2] == (429, "quota_exceeded")
        assert quota in refused.json()["detail"]
        assert "delete" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
    assert again.status_code == 202
    for path in ("/v1/jobs", "/v1/jobs/bulk", "/v1/inputs", "/v1/files"):
        assert path not in described or "429" in described[path]["post"]["responses"], path


PLACES: list[dict[str, Any]] = [
    {"storage_dir": "loop"},
    {"s3_bucket": "private-bucket", "s3_endpoint_url": "http://127.0.0.1:1", "storage_timeout_s": 2.0},
]


@pytest.mark.parametrize("storage", PLACES, ids=["folder", "bucket"])
async def test_errors_name_no_address_path_or_bucket(
    tmp_path: Path, settings_for: Any, storage: dict[str, Any]
) -> None:
    """Clients learn which part is at fault, and how; the log has the rest."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")  # a folder that no read can follow
    if "storage_dir" in storage:
        storage = {"storage_dir": tmp_path / "loop"}
    queue = Queue.connect(settings_for("redis://:password@127.0.0.1:1/0"))
    try:
        async with serving(queue, tmp_path, auth="insecure-no-keys", **storage) as api:
            with structlog.testing.capture_logs() as lines:
                ready, read = await api.get("/readyz"), await api.get("/v1/jobs")
    finally:
        await queue.close()
    assert error_of(ready)[:2] == (503, "not_ready")
    assert error_of(read)[:2] == (503, "redis_unavailable")
    assert read.json()["detail"] == "redis: cannot be reached"
    assert re.fullmatch(r"redis: cannot be reached; storage: [a-z ]+", ready.json()["detail"])
    for place in ("127.0.0.1", ":1", "password", str(tmp_path), "loop", "private-bucket"):
        assert place not in ready.text + read.text
    reasons = " ".join(line.get("reason", "") for line in lines)
    assert "127.0.0.1:1" in reasons
    assert str(storage.get("storage_dir", "private-bucket")) in reasons


async def test_an_internal_error_shows_only_its_request_id(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(submissions: Sequence[Submission]) -> Any:
        raise ZeroDivisionError("secret words")

    monkeypatch.setattr(fake_queue.jobs, "submit", broken)
    async with serving(fake_queue, tmp_path) as api:
        with structlog.testing.capture_logs() as lines:
            response = await api.post("/v1/jobs", json=BODY, headers={"X-Request-Id": "trace-7"})
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["request_crashed"]
    assert error_of(response) == (500, "internal_error", None)
    assert response.headers["x-request-id"] == "trace-7"
    assert "secret" not in response.text
    assert "Traceback" not in response.text


INVALID_REQUEST_IDS = ["a b", "x" * 129, "id\u00e9", ""]


async def test_an_invalid_request_id_is_replaced(api: httpx.AsyncClient) -> None:
    for sent in INVALID_REQUEST_IDS:
        with row(sent):
            response = await api.get("/healthz", headers={"X-Request-Id": sent.encode("latin-1")})
            assert response.headers["x-request-id"].startswith("req_")
            assert len(response.headers.get_list("x-request-id")) == 1


async def test_every_documented_error_has_the_form_of_its_protocol(fake_queue: Queue, tmp_path: Path) -> None:
    forms = {"huggingface": "TextProblem", "replicate": "TextProblem", "fal": "FalProblem"}
    page = application(fake_queue, tmp_path).openapi()
    for path, operations in page["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert "HTTPValidationError" not in json.dumps(responses), path
            for status, response in responses.items():
                if status == "default" or int(status) >= 400:
                    model = forms.get(path.split("/")[2] if path.startswith("/compat/") else "", "Problem")
                    kind = "application/json" if model == "FalProblem" else "application/problem+json"
                    schema = response["content"][kind]["schema"]
                    # fal has a 400 that is no error: what a cancellation of a completed request returns.
                    schemas = schema.get("anyOf", [schema])
                    assert {"$ref": f"#/components/schemas/{model}"} in schemas, (path, status)
                    assert len(schemas) == 1 or path.endswith("/cancel"), (path, status)
    assert {"Problem", "TextProblem", "JobObject", "JobRequest"} <= set(page["components"]["schemas"])


async def test_a_method_not_allowed_response_names_the_allowed_ones(api: httpx.AsyncClient) -> None:
    response = await api.put("/v1/jobs/job_00000000000000000000000000")
    assert response.headers["allow"] == "DELETE, GET, HEAD, PATCH"
    assert (await api.put("/v1/jobs")).headers["allow"] == "DELETE, GET, HEAD, POST"
    assert (await api.post("/v1/pauses/models/demo")).headers["allow"] == "DELETE, PUT"
    assert (await api.delete("/v1/models/demo:load")).headers["allow"] == "POST"
    assert (await api.post("/v1/models/demo")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_the_api_description_has_an_etag(api: httpx.AsyncClient, path: str) -> None:
    first = await api.get(path)
    assert first.status_code == 200
    again = await api.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert (await api.get(path, headers={"If-None-Match": '"other"'})).content == first.content


async def test_the_api_description_is_built_once(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first build takes a second of the process, and a request for it needs no key."""
    built: Counter[str] = Counter()

    def counted(name: str, build: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            built[name] += 1
            return build(*args, **kwargs)

        return run

    monkeypatch.setattr(app, "_document", functools.cache(app._document.__wrapped__))  # of a new process
    monkeypatch.setattr(openapi, "_add_security", counted("document", openapi._add_security))
    monkeypatch.setattr(openapi, "json", SimpleNamespace(dumps=counted("text", json.dumps)))
    async with serving(fake_queue, tmp_path) as api:
        assert (await api.get("/openapi.json")).status_code == 200
        first = dict(built)
        assert first["document"] == 1
        for _ in range(3):
            await api.get("/openapi.json")
            await api.put("/v1/jobs")
        assert dict(built) == first


async def test_requests_for_readiness_share_one_check(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check writes to the storage, and needs no key: a flood of them would keep the storage from everybody."""
    checks, check = 0, FolderStorage.check

    async def counted(storage: FolderStorage) -> None:
        nonlocal checks
        checks += 1
        await check(storage)

    monkeypatch.setattr(FolderStorage, "check", counted)
    async with serving(fake_queue, tmp_path) as api:
        responses = await asyncio.gather(*(api.get("/readyz") for _ in range(200)))
    assert {response.status_code for response in responses} == {200}
    assert checks <= 3
