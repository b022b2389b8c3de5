"""Retries, errors and events of the client."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest
from harness import canned

from fusequeue import AsyncClient, Busy, Invalid, JobFailed, NotFound, RefusedError, Unauthorized, Unreachable
from fusequeue.response_types import Job, event
from fusequeue.transport import delay_s, retry_after_s

Handler = Callable[[httpx.Request], httpx.Response]
PROBLEM = {"detail": "steps must be 1 to 100, not 900", "code": "invalid_request", "error": {"param": "steps"}}
JOB = {**canned.JOB, "status": "failed", "error": {"code": "non_finite", "message": "latents are not finite"}}


@pytest.mark.parametrize(
    ("attempt", "retry_after_s", "jitter", "expected"),
    [
        (0, None, 1.0, 0.25),  # the first delay is short
        (3, None, 1.0, 2.0),  # and doubles
        (3, None, 0.5, 1.0),  # with full jitter
        (20, None, 1.0, 8.0),  # up to a bound
        (0, 2.0, 0.0, 2.0),  # Retry-After is respected
        (0, 2.0, 1.0, 2.2),  # with jitter
        (0, 61.0, 0.0, None),  # up to a bound
    ],
)
def test_retry_delays(attempt: int, retry_after_s: float | None, jitter: float, expected: float | None) -> None:
    assert delay_s(attempt, retry_after_s, jitter) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("value", ["", "soon", "-5", "nan", "inf"])
def test_what_is_no_time_to_wait_is_left_out(value: str) -> None:
    assert retry_after_s({"retry-after": value}) is None


def test_a_proxy_says_in_seconds_or_by_a_date_when_to_try_again() -> None:
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert retry_after_s({"retry-after": "60"}) == 60
    assert retry_after_s({"retry-after": in_a_minute}) == pytest.approx(60, abs=30)
    assert retry_after_s({"retry-after": "Fri, 27 Nov 2020 12:02:00 GMT"}) == 0


def client(handler: Handler, retries: int = 2) -> AsyncClient:
    return AsyncClient("http://api.test", transport=httpx.MockTransport(handler), retries=retries)


async def test_a_submit_is_repeated_with_the_same_key_until_it_succeeds() -> None:
    """A lost response does not enqueue a job twice."""
    keys: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) == 1:
            raise httpx.ReadError("cut off")
        if len(keys) == 2:
            return httpx.Response(503, headers={"Retry-After": "0"})
        return httpx.Response(202, json={**JOB, "status": "queued"})

    async with client(handler) as api:
        assert (await api.submit("demo", "x")).status == "queued"
    assert len(keys) == 3
    assert len(set(keys)) == 1


@pytest.mark.parametrize("call", ["delete", "redrive", "purge"])
@pytest.mark.parametrize("status", [None, 502])
async def test_a_deletion_whose_response_was_lost_is_done(call: str, status: int | None) -> None:
    """Applied at the first attempt, the second one finds nothing; at a first attempt that is an error."""
    attempts = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            return httpx.Response(404, json={"detail": "there is no dead letter job_1", "code": "not_found"})
        if status is None:
            raise httpx.ReadError("cut off")
        return httpx.Response(status, headers={"Retry-After": "0"})

    async with client(handler) as api:
        await getattr(api, call)("job_1")
        assert attempts == 2
        with pytest.raises(NotFound):
            await getattr(api, call)("job_1")


@pytest.mark.parametrize(
    ("status", "expected"), [(400, Invalid), (401, Unauthorized), (404, NotFound), (422, Invalid), (418, RefusedError)]
)
async def test_an_invalid_request_is_not_retried(status: int, expected: type[RefusedError]) -> None:
    paths: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(status, json=PROBLEM, headers={"x-request-id": "req_9"})

    async with client(handler) as api:
        with pytest.raises(expected, match="steps must be") as caught:
            await api.submit("demo", "x", steps=900)
    assert (caught.value.param, caught.value.code, caught.value.request_id) == ("steps", "invalid_request", "req_9")
    assert len(paths) == 1


async def test_a_full_service_is_an_error_after_the_retries() -> None:
    async with client(lambda _: httpx.Response(429, text="busy", headers={"Retry-After": "0"})) as api:
        with pytest.raises(Busy) as caught:
            await api.get("job_1")
    assert caught.value.status == 429


async def test_an_unreachable_service_is_an_error_with_a_remedy() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with client(handler, retries=0) as api:
        with pytest.raises(Unreachable, match="fusequeue up"):
            await api.models()


def restarting(statuses: list[int | None]) -> Handler:
    """Return a service that responds with these statuses in turn, None for no response."""
    remaining = iter(statuses)

    def handler(_: httpx.Request) -> httpx.Response:
        status = next(remaining)
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, json=JOB)

    return handler


async def test_retries_continue_while_a_known_service_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart takes longer than a few retries, with or without a proxy."""
    monkeypatch.setattr("fusequeue.transport.random.random", lambda: 0.0)
    async with client(restarting([200, None, None, 502, 503, None, None, 200]), retries=2) as api:
        await api.get("job_1")
        assert (await api.get("job_1")).id == "job_1"


@pytest.mark.parametrize("statuses", [[None] * 3, [200, *[None] * 3], [200, 503, None, 503]])
async def test_retries_end(monkeypatch: pytest.MonkeyPatch, statuses: list[int | None]) -> None:
    """After the retries if the service never responded, else after the time for a restart."""
    monkeypatch.setattr("fusequeue.transport.random.random", lambda: 0.0)
    monkeypatch.setattr("fusequeue.transport.RESTART_S", 0.0)
    async with client(restarting(statuses), retries=2) as api:
        if statuses[0]:
            await api.get("job_1")
        with pytest.raises((Unreachable, Busy)):
            await api.get("job_1")


async def test_temporarily_refused_lines_are_sent_again_at_their_position() -> None:
    """The service identifies lines by position: accepted lines are blank the second time."""
    bodies: list[list[bytes]] = []
    full = {"code": "queue_full", "message": "full", "retryable": True, "retry_after_s": 0}

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content.splitlines())
        first = len(bodies) == 1
        content = b""
        for number, line in enumerate(bodies[-1], start=1):
            if line and first and number == 2:
                content += httpx.Response(200, json={"line": 2, "error": full}).content + b"\n"
            elif line:
                content += httpx.Response(200, json={"line": number, "id": f"job_{number}"}).content + b"\n"
        return httpx.Response(200, content=content)

    async with client(handler) as api:
        results = [result async for result in api.submit_many([{"prompt": str(at)} for at in range(3)])]
    assert [result.id for result in results] == ["job_1", "job_2", "job_3"]
    assert [bool(line) for line in bodies[1]] == [False, True, False]


def test_a_failed_job_is_an_error_with_its_reason() -> None:
    with pytest.raises(JobFailed, match="latents are not finite"):
        Job.model_validate(JOB).require_success()
    with pytest.raises(ValueError, match="still running"):
        Job.model_validate({**JOB, "status": "running"}).require_success()


def test_the_last_event_contains_the_job() -> None:
    assert event(JOB).job is not None
    assert event({"id": "job_1", "status": "running", "progress": {"step": 1, "total": 4}}).job is None


def stream(statuses: list[int]) -> Handler:
    """Return a service with a failed job; its event streams have these statuses in turn."""
    remaining = iter(statuses)

    def handler(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/events"):
            return httpx.Response(200, json={**JOB, "status": "running"} if request.url.query == b"" else JOB)
        status = next(remaining)
        if status != 200:
            return httpx.Response(status, headers={"Retry-After": "0"})
        events = f"data: {json.dumps(JOB)}\n\n"
        return httpx.Response(200, text=events, headers={"Content-Type": "text/event-stream"})

    return handler


async def test_a_stream_that_is_refused_for_now_is_opened_again() -> None:
    async with client(stream([429, 503, 200])) as api:
        assert [event.status async for event in api.events("job_1")] == ["failed"]
    async with client(stream([429, 429, 429]), retries=2) as api:
        with pytest.raises(Busy):
            await anext(api.events("job_1"))


async def test_a_wait_with_progress_goes_on_without_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are limited, waits are not."""
    monkeypatch.setattr("fusequeue.transport.random.random", lambda: 0.0)
    events: list[object] = []
    async with client(stream([503, 503, 503]), retries=2) as api:
        assert (await api.wait("job_1", on_progress=events.append)).status == "failed"
    assert events == []


async def test_a_download_of_an_old_job_uses_new_urls(tmp_path: Path) -> None:
    """Signed URLs expire after an hour; a refusal that stays one is an error."""
    paths: list[str] = []
    artifact = {"content_type": "image/png", "bytes": 3, "width": 64, "height": 64, "seed": 1}

    def job(signature: str) -> dict[str, object]:
        urls = [f"/artifacts/{index}?signature={signature}" for index in range(2)]
        artifacts = [{**artifact, "index": index, "url": url} for index, url in enumerate(urls)]
        return {**JOB, "status": "succeeded", "artifacts": artifacts}

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path.decode())
        if request.url.path == "/v1/jobs/job_1":
            return httpx.Response(200, json=job("new"))
        if request.url.params["signature"] != "new":
            return httpx.Response(403, json={"detail": "the URL has expired", "code": "invalid_signature"})
        return httpx.Response(200, content=request.url.path.encode())

    async with client(handler) as api:
        files = await api.download(Job.model_validate(job("old")), tmp_path)
        assert [file.read_bytes() for file in files] == [b"/artifacts/0", b"/artifacts/1"]
        assert paths == [
            "/artifacts/0?signature=old",
            "/v1/jobs/job_1",
            "/artifacts/0?signature=new",
            "/artifacts/1?signature=new",
        ]
    refusal = {"detail": "the URL was changed", "code": "invalid_signature"}
    jobs = {"/v1/jobs/job_1": httpx.Response(200, json=job("new"))}
    async with client(lambda request: jobs.get(request.url.path, httpx.Response(403, json=refusal))) as api:
        with pytest.raises(Unauthorized, match="the URL was changed"):
            await api.download("job_1", tmp_path)
