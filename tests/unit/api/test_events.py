"""Events of a job over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, StreamingCall, claimed, deliver, finish, serving

from shared.job import Phase, Progress
from shared.queue import ProgressReport, Queue


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path) as client:
        yield client


@dataclass
class Told:
    """One event as a client reads it."""

    id: str | None
    kind: str
    data: dict[str, Any]


def read(text: str) -> list[Told]:
    """Return the events of a stream; comments and the reconnection time are none."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            events.append(Told(fields.get("id"), fields["event"], json.loads(fields["data"])))
    return events


async def test_a_stream_tells_a_jobs_life_and_ends_with_the_whole_job(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    following = StreamingCall(api, f"/v1/jobs/{job_id}/events")
    await following.wait_for('"status":"queued"')
    await following.wait_for("\n: keep-alive\n")
    claim = await claimed(fake_queue, job_id)
    await following.wait_for('"status":"running"')
    while "event: progress" not in following.text:  # nobody keeps what is told of progress: it is said until heard
        await fake_queue.claims.report_progress(
            ProgressReport(job_id, claim.epoch, Phase.DENOISING, Progress(step=6, total=12))
        )
        await asyncio.sleep(0.01)
    await deliver(fake_queue, tmp_path, claim)
    text = await following.read_all()
    assert following.headers["content-type"].startswith("text/event-stream")
    assert following.headers["cache-control"] == "no-store"
    assert text.startswith("retry: ")
    events = read(text)
    states = [event.data["status"] for event in events if event.kind == "state"]
    assert states == ["queued", "running", "succeeded"]
    assert all(event.id for event in events if event.kind == "state")
    progress = [event for event in events if event.kind == "progress"]
    assert progress[0].data["progress"] == {"step": 6, "total": 12, "percent": 50}
    assert (progress[0].data["phase"], progress[0].data["status"]) == ("denoising", "running")
    assert events[-1].data == (await api.get(f"/v1/jobs/{job_id}")).json()


async def test_a_stream_of_a_job_that_has_ended_tells_so_at_once(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    (event,) = read((await api.get(f"/v1/jobs/{job_id}/events")).text)
    assert (event.kind, event.data["status"]) == ("state", "succeeded")
    assert event.data["artifacts"]


async def test_whoever_comes_back_is_told_what_was_missed(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    claim = await claimed(fake_queue, job_id)
    await deliver(fake_queue, tmp_path, claim)
    events = await fake_queue.client.redis.xrange(fake_queue.client.redis_keys.events)
    first = events[0][0]
    again = read((await api.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": first})).text)
    assert [event.data["status"] for event in again] == ["running", "succeeded"]
    assert all(event.id != first for event in again)


async def test_whoever_has_seen_the_end_is_told_to_stop_asking(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    (event,) = read((await api.get(f"/v1/jobs/{job_id}/events")).text)
    again = await api.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": event.id or ""})
    assert again.status_code == 204


async def test_an_event_id_that_is_none_is_refused(api: httpx.AsyncClient) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    answer = await api.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "Last-Event-ID")


async def test_too_many_followers_are_told_to_come_back(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.waiting.MAX_WAITERS", 0)
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    answer = await api.get(f"/v1/jobs/{job_id}/events")
    assert (answer.status_code, answer.json()["code"]) == (503, "too_many_streams")
    assert answer.headers["retry-after"]
    assert (await api.get(f"/v1/jobs/{job_id}", params={"wait": 5})).status_code == 503
    submitted = await api.post("/v1/jobs", json=BODY, headers={"Prefer": "wait=5"})
    assert submitted.status_code == 202, "a job that is accepted is no error"
