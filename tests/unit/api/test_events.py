"""Event streams of jobs over HTTP."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, StreamingCall, bearer, claimed, deliver, finish, serving

from api.http import connections
from shared.job import Phase
from shared.job_record import Progress
from shared.queue import ProgressReport, Queue
from shared.runtime import metrics


@dataclass
class ParsedEvent:
    """One parsed event."""

    id: str | None
    kind: str
    data: dict[str, Any]


def read(text: str) -> list[ParsedEvent]:
    """Return the events of a stream, without comments; each must have data, as strict parsers require."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append(ParsedEvent(fields.get("id"), fields["event"], json.loads(fields["data"])))
    return events


async def test_a_stream_has_every_event_and_ends_with_the_whole_job(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    reader = StreamingCall(api, f"/v1/jobs/{job_id}/events")
    await reader.wait_for('"status":"queued"')
    await reader.wait_for("\n: keep-alive\n")
    claim = await claimed(fake_queue, job_id)
    await reader.wait_for('"status":"running"')
    while "event: progress" not in reader.text:  # progress is not stored, so it is reported until received
        await fake_queue.claims.report_progress(
            ProgressReport(job_id, claim.epoch, Phase.DENOISING, Progress(step=6, total=12))
        )
        await asyncio.sleep(0.01)
    await deliver(fake_queue, tmp_path, claim)
    text = await reader.read_all()
    assert reader.headers["content-type"].startswith("text/event-stream")
    assert reader.headers["cache-control"] == "no-store"
    assert text.replace(": keep-alive\n\n", "").startswith("retry: 2000\nid: ")
    assert text.count("retry: ") == 1
    events = read(text)
    states = [event.data["status"] for event in events if event.kind == "state"]
    assert states == ["queued", "running", "succeeded"]
    assert all(event.id for event in events if event.kind == "state")
    progress = [event for event in events if event.kind == "progress"]
    assert progress[0].data["progress"] == {"step": 6, "total": 12, "percent": 50}
    assert (progress[0].data["phase"], progress[0].data["status"]) == ("denoising", "running")
    assert events[-1].data == (await api.get(f"/v1/jobs/{job_id}")).json()


async def test_a_stream_of_an_ended_job_has_its_end_at_once(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    (event,) = read((await api.get(f"/v1/jobs/{job_id}/events")).text)
    assert (event.kind, event.data["status"]) == ("state", "succeeded")
    assert event.data["artifacts"]


async def test_a_reconnecting_client_gets_the_missed_events(
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


async def test_a_client_that_has_the_last_event_gets_204(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await finish(fake_queue, tmp_path, job_id)
    (event,) = read((await api.get(f"/v1/jobs/{job_id}/events")).text)
    again = await api.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": event.id or ""})
    assert again.status_code == 204


async def test_an_empty_event_id_is_none(api: httpx.AsyncClient) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await api.post(f"/v1/jobs/{job_id}/cancel")
    response = await api.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": ""})
    assert (response.status_code, '"canceled"' in response.text) == (200, True)


async def test_an_invalid_event_id_is_refused(api: httpx.AsyncClient) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    response = await api.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (422, "Last-Event-ID")


def test_the_limit_of_open_files_is_raised_to_what_streams_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        raised = connections.open_files()
        assert raised == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised == min(hard, connections.WANTED_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_streams_cause_few_full_garbage_collections() -> None:
    """Each stops the process for as long as it takes to look at all objects."""
    code = """
import gc
from api.__main__ import limit_full_collections
full = []
gc.callbacks.append(lambda phase, info: full.append(info) if phase == "stop" and info["generation"] == 2 else None)
limit_full_collections()
full.clear()
streams = [[] for _ in range(200 * 2_500)]
print(len(full))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(ran.stdout) <= 1


async def test_fewer_connections_allow_fewer_waiters(fake_queue: Queue, tmp_path: Path) -> None:
    """Otherwise new connections of any kind would fail before the limit of waiters is reached."""
    async with serving(fake_queue, tmp_path, max_connections=1) as api:
        job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
        reader = StreamingCall(api, f"/v1/jobs/{job_id}/events")
        await reader.wait_for('"status":"queued"')
        assert (await api.get(f"/v1/jobs/{job_id}/events")).status_code == 503
        await finish(fake_queue, tmp_path, job_id)
        await reader.read_all()
        assert (await api.get(f"/v1/jobs/{job_id}/events")).status_code == 200


async def test_too_many_waiters_get_retry_after(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.connections.MAX_WAITERS", 0)
    async with serving(fake_queue, tmp_path) as api:
        job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
        response = await api.get(f"/v1/jobs/{job_id}/events")
        assert (response.status_code, response.json()["code"]) == (503, "too_many_streams")
        assert response.headers["retry-after"]
        assert (await api.get(f"/v1/jobs/{job_id}", params={"wait": 5})).status_code == 503
        submitted = await api.post("/v1/jobs", json=BODY, headers={"Prefer": "wait=5"})
        assert submitted.status_code == 202, "the job was accepted"


def subscribers() -> float:
    """Return the number of streams and waiting requests of this process."""
    return metrics.REGISTRY.get_sample_value("fusequeue_event_subscribers") or 0


@pytest.mark.parametrize("kind", ["stream", "wait"])
async def test_a_tenant_that_takes_all_it_can_leaves_places_for_others(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One tenant's streams took all places of the process."""
    monkeypatch.setattr("api.http.connections.MAX_WAITERS", 8)
    keys = {tenant: await bearer(fake_queue, tenant) for tenant in ("greedy", "modest")}
    async with serving(fake_queue, tmp_path) as api:
        jobs = {name: (await api.post("/v1/jobs", json=BODY, headers=key)).json()["id"] for name, key in keys.items()}
        greedy = f"/v1/jobs/{jobs['greedy']}" + ("/events" if kind == "stream" else "?wait=60")
        calls: list[asyncio.Future[httpx.Response]] = []
        for number in range(8):
            calls.append(asyncio.ensure_future(api.get(greedy, headers=keys["greedy"])))
            async with asyncio.timeout(10):
                while not calls[-1].done() and subscribers() <= number:
                    await asyncio.sleep(0.01)
        refused = [call.result() for call in calls if call.done()]
        assert len(refused) == 4
        assert {(response.status_code, response.json()["code"]) for response in refused} == {(503, "too_many_streams")}
        assert all(response.headers["retry-after"] for response in refused)
        assert "4 streams and waiting requests of this tenant" in refused[0].json()["detail"]

        modest = f"/v1/jobs/{jobs['modest']}"
        stream = StreamingCall(api, f"{modest}/events", headers=keys["modest"])
        await stream.wait_for('"status":"queued"')
        waited = await asyncio.wait_for(api.get(f"{modest}?wait=0.2", headers=keys["modest"]), 10)
        assert waited.status_code == 200
        for name, job in jobs.items():
            await api.post(f"/v1/jobs/{job}/cancel", headers=keys[name])
        await stream.read_all()
        assert {response.status_code for response in await asyncio.gather(*calls)} == {200, 503}
        assert (await api.get(greedy, headers=keys["greedy"])).status_code == 200
        assert subscribers() == 0


async def test_without_keys_one_tenant_can_use_all_places(
    fake_queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.http.connections.MAX_WAITERS", 2)
    async with serving(fake_queue, tmp_path) as api:
        job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
        streams = [StreamingCall(api, f"/v1/jobs/{job_id}/events") for _ in range(2)]
        for stream in streams:
            await stream.wait_for('"status":"queued"')
        assert (await api.get(f"/v1/jobs/{job_id}/events")).status_code == 503
        await finish(fake_queue, tmp_path, job_id)
        for stream in streams:
            await stream.read_all()


async def test_a_tenants_requests_in_flight_leave_room_for_others(fake_queue: Queue, tmp_path: Path) -> None:
    """Behind a proxy all clients have one address; a tenant's slow uploads could hold every connection."""
    keys = {
        tenant: await bearer(fake_queue, tenant) | {"Content-Type": "application/json"}
        for tenant in ("greedy", "modest")
    }
    release = asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        yield b"{"
        await release.wait()

    async with serving(fake_queue, tmp_path, max_connections=8) as api:
        done = (await api.post("/v1/jobs", json=BODY, headers=keys["greedy"])).json()["id"]
        await finish(fake_queue, tmp_path, done)
        image = (await api.get(f"/v1/jobs/{done}", headers=keys["greedy"])).json()["artifacts"][0]["url"]
        uploads = [
            asyncio.ensure_future(api.post("/v1/jobs", content=slow_body(), headers=keys["greedy"])) for _ in range(8)
        ]
        async with asyncio.timeout(10):
            while sum(upload.done() for upload in uploads) < 4:
                await asyncio.sleep(0.01)
        refused = [upload.result() for upload in uploads if upload.done()]
        assert {(response.status_code, response.json()["code"]) for response in refused} == {(503, "overloaded")}
        assert "requests of this tenant" in refused[0].json()["detail"]
        async with asyncio.timeout(10):
            assert (await api.get("/v1/jobs", headers=keys["modest"])).status_code == 200
        assert (await api.get(image)).status_code == 503, "a signed URL counts for its tenant"
        release.set()
        assert {response.status_code for response in await asyncio.gather(*uploads)} == {400, 503}
        assert (await api.get("/v1/jobs", headers=keys["greedy"])).status_code == 200
        assert (await api.get(image)).status_code == 200
