"""What Replicate's clients need of a service with keys."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from harness.http_server import StreamingCall, bearer, claimed, deliver, finish, png, serving

from api import app
from api.routes import events
from shared.auth import Scope
from shared.queue import Queue

PREDICTIONS = "/compat/replicate/v1/predictions"
INPUT = {"prompt": "a red circle on a blue ground, left", "seed": 7}
BODY = {"version": "demo", "input": INPUT}


async def test_a_prediction_is_streamed_by_its_signed_url(fake_queue: Queue, tmp_path: Path) -> None:
    """The client for JavaScript sends no key there."""
    mine = await bearer(fake_queue)
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        made, other = [(await api.post(PREDICTIONS, json=BODY, headers=mine)).json() for _ in range(2)]
        await finish(fake_queue, tmp_path, made["id"])
        url = made["urls"]["stream"]
        streamed = await api.get(url)
        assert streamed.status_code == 200, streamed.text
        assert [line for line in streamed.text.splitlines() if line.startswith("event: ")] == [
            "event: logs",
            "event: output",
            "event: done",
        ]
        for changed in (url.replace(made["id"], other["id"]), url + "0"):
            assert (await api.get(changed)).status_code == 403, changed
        path = url.partition("?")[0]
        assert (await api.get(path)).status_code == 401
        assert (await api.get(path, headers=mine)).status_code == 200
        assert (await api.get(path, headers=await bearer(fake_queue))).status_code == 200
        write_only = await bearer(fake_queue, scopes=[Scope.JOBS_WRITE])
        assert (await api.get(path, headers=write_only)).status_code == 403


async def test_a_stream_has_urls_where_its_images_find_no_memory(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data URLs count as memory of responses until the stream has been read."""
    outputs = []
    for memory in (2**20, 16):
        monkeypatch.setattr(app, "RESPONSE_BYTES", memory)
        async with serving(fake_queue, tmp_path) as api:
            made = (await api.post(PREDICTIONS, json=BODY)).json()
            await finish(fake_queue, tmp_path, made["id"])
            streamed = (await api.get(made["urls"]["stream"])).text
        outputs.append(streamed.partition("event: output\ndata: ")[2].partition("\n")[0])
    assert outputs[0].startswith("data:image/png;base64,")
    assert outputs[1].startswith("http://")


async def test_a_stream_ends_when_its_url_expires(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = await bearer(fake_queue)
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        made = (await api.post(PREDICTIONS, json=BODY, headers=mine)).json()
        stream = StreamingCall(api, made["urls"]["stream"].removeprefix("http://localhost"))
        await stream.wait_for("event: logs")
        monkeypatch.setattr(events, "now_ms", lambda: 10**15)
        assert "event: error" in await stream.read_all()
        assert "the URL has expired" in stream.text


async def test_a_file_has_a_time_when_it_is_read(fake_queue: Queue, tmp_path: Path) -> None:
    """The client for Python needs one, also while a job uses the file."""
    async with serving(fake_queue, tmp_path) as api:
        files = {"content": ("a.png", png(80), "image/png")}
        created = (await api.post("/compat/replicate/v1/files", files=files)).json()
        url = created["urls"]["get"]
        found = (await api.get(url)).json()
        assert abs(seconds(found["created_at"]) - seconds(created["created_at"])) < 60
        body = {"version": "demo", "input": {**INPUT, "image": url}}
        assert (await api.post(PREDICTIONS, json=body)).status_code == 201
        assert seconds((await api.get(url)).json()["created_at"]) >= 0


def seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


async def test_one_key_for_predictions_of_two_models_is_refused(fake_queue: Queue, tmp_path: Path) -> None:
    """Their bodies are equal: the path names the model."""
    models = tmp_path / "models.toml"
    entry = '[[model]]\nid = "{name}"\nsource = "none"\n'
    models.write_text("".join(entry.format(name=name) for name in ("one", "two")))
    async with serving(fake_queue, tmp_path, models=models) as api:
        statuses = []
        for model in ("one", "one", "two"):
            path = f"/compat/replicate/v1/models/any/{model}/predictions"
            made = await api.post(path, json={"input": INPUT}, headers={"Idempotency-Key": "k"})
            statuses.append(made.status_code)
        assert statuses == [201, 201, 422]


async def test_a_repeated_prediction_that_is_waited_for_is_starting_until_its_end(
    fake_queue: Queue, tmp_path: Path
) -> None:
    """The clients take any other status for the end; without a wait they poll until the end."""
    async with serving(fake_queue, tmp_path) as api:
        key, wait = {"Idempotency-Key": "k"}, {"Prefer": "wait=1"}
        job_id = (await api.post(PREDICTIONS, json=BODY, headers=key)).json()["id"]
        claim = await claimed(fake_queue, job_id)
        waited = await api.post(PREDICTIONS, json=BODY, headers={**key, **wait})
        assert (waited.json()["id"], waited.json()["status"]) == (job_id, "starting")
        assert waited.headers["Idempotent-Replayed"] == "true"
        assert (await api.post(PREDICTIONS, json=BODY, headers=key)).json()["status"] == "processing"
        await deliver(fake_queue, tmp_path, claim)
        assert (await api.post(PREDICTIONS, json=BODY, headers={**key, **wait})).json()["status"] == "succeeded"
