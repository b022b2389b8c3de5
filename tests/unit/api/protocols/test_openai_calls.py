"""Calls of OpenAI's routes: Idempotency-Key, statuses of errors, and calls that the service lacks."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, WORKER, application, png, serving, working
from harness.tables import row

from shared.job import State
from shared.job_record import Failure, Outcome
from shared.queue import Queue

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
KEY = {"Idempotency-Key": "order-12"}


async def jobs_of(api: httpx.AsyncClient) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = (await api.get("/v1/jobs")).json()["data"]
    return jobs


async def test_an_idempotency_key_is_one_job(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    """Of generations and edits, after the response too; with another body it is refused."""
    async with working(fake_queue, tmp_path):
        answers = [await api.post(GENERATIONS, json=BODY, headers=KEY) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert answers[0].json() == answers[1].json()
        assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true"]
        other = await api.post(GENERATIONS, json={**BODY, "seed": 1}, headers=KEY)
        assert (other.status_code, other.json()["code"]) == (400, "idempotency_key_reused")

        def edit(colour: str) -> Any:
            files, headers = {"image": ("a.png", png(colour=colour))}, {"Idempotency-Key": "edit-1"}
            return api.post(EDITS, data={"prompt": "x"}, files=files, headers=headers)

        edits = [await edit("red") for _ in range(2)]  # two boundaries of multipart
        assert edits[0].json()["id"] == edits[1].json()["id"]
        assert (await edit("blue")).status_code == 400
        assert len(await jobs_of(api)) == 2
        assert (await api.post(GENERATIONS, json=BODY)).json()["id"] != answers[0].json()["id"]
        invalid = await api.post(GENERATIONS, json=BODY, headers={"Idempotency-Key": "a b"})
        assert (invalid.status_code, invalid.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("fields", "names"),
    [({}, {"b64_json", "url"}), ({"response_format": "b64_json"}, {"b64_json"}), ({"response_format": "url"}, {"url"})],
)
async def test_an_image_is_base64_and_a_url_unless_one_is_asked_for(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, fields: dict[str, str], names: set[str]
) -> None:
    """Clients that name no format read one or the other: LangChain's wrapper reads the URL."""
    async with working(fake_queue, tmp_path):
        (entry,) = (await api.post(GENERATIONS, json={**BODY, **fields})).json()["data"]
    assert {name for name in ("b64_json", "url") if entry.get(name)} == names
    if len(names) == 2:
        assert base64.b64decode(entry["b64_json"]) == (await api.get(entry["url"])).content


async def test_a_stream_is_repeated_by_its_key(api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    async with working(fake_queue, tmp_path):
        streams = [await api.post(GENERATIONS, json={**BODY, "stream": True}, headers=KEY) for _ in range(2)]
    first, second = (stream.text.replace(": keep-alive\n\n", "") for stream in streams)
    assert first == second
    assert "image_generation.completed" in first


async def test_the_images_of_a_stream_count_as_memory_of_responses(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that do not read their streams cannot fill the memory of the process."""
    monkeypatch.setattr("api.app.RESPONSE_BYTES", 16)
    async with serving(fake_queue, tmp_path) as api, working(fake_queue, tmp_path):
        stream = await api.post(GENERATIONS, json={**BODY, "stream": True})
    assert "event: error" in stream.text
    assert '"code":"overloaded"' in stream.text


@pytest.mark.parametrize(("headers", "state"), [({}, State.CANCELED), (KEY, State.QUEUED)])
async def test_a_stream_that_is_interrupted_leaves_no_job_without_a_key(
    fake_queue: Queue, tmp_path: Path, headers: dict[str, str], state: State
) -> None:
    """No SDK repeats a stream that has begun; with a key, its client can."""
    app = application(fake_queue, tmp_path)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as api:
            streaming = asyncio.create_task(api.post(GENERATIONS, json={**BODY, "stream": True}, headers=headers))
            async with asyncio.timeout(60):
                while not (jobs := await jobs_of(api)) or not app.state.services.waiters.held(None):
                    await asyncio.sleep(0.01)
            app.state.services.closing.set()
            stream = await streaming
        assert "event: error" in stream.text
        assert "send the request again" in stream.text
        record = await fake_queue.jobs.get(jobs[0]["id"])
        assert record is not None
        assert record.state is state


REFUSED_FORMS = [
    ({"image": "in_" + 32 * "a"}, "image"),
    ({"batch_id": "batch_" + 26 * "0"}, "batch_id"),
    ({"webhook": "http://127.0.0.1/"}, "webhook"),
]


async def test_a_form_that_is_refused_stores_no_image(api: httpx.AsyncClient) -> None:
    for fields, param in REFUSED_FORMS:
        with row(fields, param):
            files = {"image": ("a.png", png())}
            response = await api.post(EDITS, data={"prompt": "x", **fields}, files=files)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
            assert (await api.get("/v1/inputs")).json()["data"] == []


REFUSED_VIDEO_FORMS = [({"image": "in_" + 32 * "a"}, "input_reference"), ({"webhook": "http://127.0.0.1/"}, "webhook")]


async def test_a_form_for_a_video_that_is_refused_stores_no_image(fake_queue: Queue, tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[[model]]\nid = "film"\nsource = "none"\ntasks = ["image_to_video"]\nlimits.max_frames = 81\n')
    async with serving(fake_queue, tmp_path, models=models) as api:
        for fields, param in REFUSED_VIDEO_FORMS:
            with row(fields):
                files = {"input_reference": ("a.png", png())}
                response = await api.post("/v1/videos", data={"prompt": "x", **fields}, files=files)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
                assert (await api.get("/v1/inputs")).json()["data"] == []


INVALID_REQUESTS = [
    ("POST", GENERATIONS, {"model": "demo"}, "prompt"),
    ("POST", GENERATIONS, {**BODY, "background": "transparent"}, "background"),
    ("POST", GENERATIONS, {**BODY, "image": "data:image/png;base64,AAAA"}, "image"),
    ("POST", EDITS, BODY, "image"),
    ("POST", "/v1/videos", {"model": "demo", "prompt": "x"}, "task"),
    ("POST", "/v1/batches", {"input_file_id": "file_a", "endpoint": "/v1/other"}, "endpoint"),
    ("GET", "/v1/files?limit=0", None, "limit"),
    ("GET", "/v1/batches?limit=0", None, "limit"),
    ("GET", "/v1/videos?order=up", None, "order"),
]


async def test_an_invalid_request_is_400(api: httpx.AsyncClient) -> None:
    """As OpenAI has it; the same fault of a native route is 422."""
    for method, path, body, param in INVALID_REQUESTS:
        with row(method, path, body):
            response = await api.request(method, path, json=body)
            assert (response.status_code, response.json()["status"]) == (400, 400)
            assert response.json()["error"]["param"] == param
            assert (await api.post("/v1/jobs", json={"model": "demo"})).status_code == 422


async def test_an_image_that_the_model_refuses_is_400(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    """Such as one smaller than the model edits; its pipeline finds it."""
    image = {"image": ("a.png", png(8, 8))}
    waiting = asyncio.create_task(api.post(EDITS, data={"prompt": "x"}, files=image))
    async with asyncio.timeout(60):
        while not (claims := await fake_queue.claims.claim(WORKER, ["demo"], 1)):
            await asyncio.sleep(0.01)
    failure = Failure(code="invalid_input_image", message="model 'demo' refuses the input image", param="image")
    outcome = Outcome(state=State.FAILED, error=failure)
    assert await fake_queue.claims.settle(WORKER, claims[0].job.id, claims[0].epoch, outcome)
    response = await waiting
    assert (response.status_code, response.json()["code"]) == (400, "invalid_input_image")
    assert response.json()["error"]["param"] == "image"


async def test_errors_of_openai_routes_are_documented(api: httpx.AsyncClient) -> None:
    paths = (await api.get("/openapi.json")).json()["paths"]
    for path in (GENERATIONS, EDITS, "/v1/videos", "/v1/files", "/v1/batches"):
        responses = paths[path]["post"]["responses"]
        assert "invalid_request" in responses["400"]["description"]
        assert "422" not in responses


@pytest.mark.parametrize("name", ["image", "image[]", "image[0]"])
async def test_an_image_of_a_list_can_have_an_index_and_a_field_in_which_no_file_was_chosen_is_left_out(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, name: str
) -> None:
    """As PHP's and browsers' forms send them."""
    empty = b'--x\r\nContent-Disposition: form-data; name="mask"; filename=""\r\n\r\n\r\n'
    prompt = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na boat\r\n'
    image = f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'.encode() + png()
    async with working(fake_queue, tmp_path):
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        response = await api.post(EDITS, content=empty + prompt + image + b"\r\n--x--\r\n", headers=headers)
    assert response.status_code == 200, response.text
    assert [job["task"] for job in await jobs_of(api)] == ["image_to_image"]


MISSING_CALLS = [
    ("/v1/images/variations", "/v1/images/edits"),
    ("/v1/videos/video_a/remix", "/v1/videos"),
    ("/v1/videos/edits", "input_reference"),
    ("/v1/videos/extensions", "input_reference"),
    ("/v1/videos/characters", "adapter"),
    ("/v1/uploads", "/v1/files"),
    ("/v1/uploads/upload_a/parts", "/v1/files"),
    ("/v1/chat/completions", "/v1/images/generations"),
    ("/v1/responses", "/v1/images/generations"),
]


async def test_a_call_that_the_service_lacks_names_another(api: httpx.AsyncClient) -> None:
    for path, instead in MISSING_CALLS:
        with row(path):
            response = await api.post(path, json={})
            assert response.status_code == 404
            message = response.json()["error"]["message"]
            assert "not supported; " in message
            assert instead in message
