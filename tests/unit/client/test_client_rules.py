"""What the client decides, and how it tells of errors."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from fusequeue import AsyncClient, Busy, Invalid, JobFailed, NotFound, RefusedError, Unauthorized, Unreachable
from fusequeue.models import Job, event
from fusequeue.transport import pause_s

Answer = Callable[[httpx.Request], httpx.Response]
PROBLEM = {"detail": "steps must be 1 to 100, not 900", "code": "invalid_request", "error": {"param": "steps"}}
JOB = {
    "id": "job_1",
    "status": "failed",
    "model": "demo",
    "prompt": "x",
    "seed": 1,
    "n": 1,
    "width": 64,
    "height": 64,
    "steps": 4,
    "guidance_scale": 2.0,
    "created_at": "2026-01-31T12:00:00.000Z",
    "error": {"code": "non_finite", "message": "latents are not finite"},
}


@pytest.mark.parametrize(
    ("attempt", "retry_after_s", "spread", "expected"),
    [
        (0, None, 1.0, 0.25),  # the first pause is short
        (3, None, 1.0, 2.0),  # and doubles
        (3, None, 0.5, 1.0),  # with full jitter
        (20, None, 1.0, 8.0),  # up to a bound
        (0, 2.0, 0.0, 2.0),  # a server that names a time is believed
        (0, 2.0, 1.0, 2.2),  # and not asked again by all at once
        (0, 61.0, 0.0, None),  # one that is away for long is not waited for
    ],
)
def test_pauses(attempt: int, retry_after_s: float | None, spread: float, expected: float | None) -> None:
    assert pause_s(attempt, retry_after_s, spread) == (None if expected is None else pytest.approx(expected))


def client(answer: Answer, retries: int = 2) -> AsyncClient:
    return AsyncClient("http://api.test", transport=httpx.MockTransport(answer), retries=retries)


async def test_a_submit_is_repeated_with_the_same_key_until_it_is_answered() -> None:
    """Nothing is enqueued twice by a client that lost an answer."""
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) == 1:
            raise httpx.ReadError("cut off")
        if len(keys) == 2:
            return httpx.Response(503, headers={"Retry-After": "0"})
        return httpx.Response(202, json={**JOB, "status": "queued"})

    async with client(answer) as api:
        assert (await api.submit("demo", "x")).status == "queued"
    assert len(keys) == 3
    assert len(set(keys)) == 1


@pytest.mark.parametrize(
    ("status", "expected"), [(400, Invalid), (401, Unauthorized), (404, NotFound), (422, Invalid), (418, RefusedError)]
)
async def test_an_error_of_the_request_is_told_at_once(status: int, expected: type[RefusedError]) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(status, json=PROBLEM, headers={"x-request-id": "req_9"})

    async with client(answer) as api:
        with pytest.raises(expected, match="steps must be") as caught:
            await api.submit("demo", "x", steps=900)
    assert (caught.value.param, caught.value.code, caught.value.request_id) == ("steps", "invalid_request", "req_9")
    assert len(asked) == 1


async def test_a_service_that_stays_full_is_told_after_the_retries() -> None:
    async with client(lambda _: httpx.Response(429, text="busy", headers={"Retry-After": "0"})) as api:
        with pytest.raises(Busy) as caught:
            await api.get("job_1")
    assert caught.value.status == 429


async def test_no_service_at_all_is_told_with_what_to_do() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async with client(answer, retries=0) as api:
        with pytest.raises(Unreachable, match="fusequeue up"):
            await api.models()


def replaced(answers: list[int | None]) -> Answer:
    """Return a service that answers with those statuses in turn, None being no answer at all."""
    left = iter(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        status = next(left)
        if status is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, json=JOB)

    return answer


async def test_a_service_that_has_answered_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is being replaced, which takes longer than a few retries, with a proxy before it or without."""
    monkeypatch.setattr("fusequeue.transport.random.random", lambda: 0.0)
    async with client(replaced([200, None, None, 502, 503, None, None, 200]), retries=2) as api:
        await api.get("job_1")
        assert (await api.get("job_1")).id == "job_1"


@pytest.mark.parametrize("answers", [[None] * 3, [200, *[None] * 3], [200, 503, None, 503]])
async def test_patience_ends(monkeypatch: pytest.MonkeyPatch, answers: list[int | None]) -> None:
    """With a service that never answered after the retries, with another once it is away for too long."""
    monkeypatch.setattr("fusequeue.transport.random.random", lambda: 0.0)
    monkeypatch.setattr("fusequeue.transport.COMES_BACK_S", 0.0)
    async with client(replaced(answers), retries=2) as api:
        if answers[0]:
            await api.get("job_1")
        with pytest.raises((Unreachable, Busy)):
            await api.get("job_1")


async def test_lines_refused_for_now_are_sent_again_in_their_place() -> None:
    """Their place is what the service knows a line by: what was accepted is a blank line the second time."""
    bodies: list[list[bytes]] = []
    full = {"code": "queue_full", "message": "full", "retryable": True, "retry_after_s": 0}

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content.splitlines())
        first = len(bodies) == 1
        told = b""
        for number, line in enumerate(bodies[-1], start=1):
            if line and first and number == 2:
                told += httpx.Response(200, json={"line": 2, "error": full}).content + b"\n"
            elif line:
                told += httpx.Response(200, json={"line": number, "id": f"job_{number}"}).content + b"\n"
        return httpx.Response(200, content=told)

    async with client(answer) as api:
        results = [result async for result in api.submit_many([{"prompt": str(at)} for at in range(3)])]
    assert [result.id for result in results] == ["job_1", "job_2", "job_3"]
    assert [bool(line) for line in bodies[1]] == [False, True, False]


def test_a_job_that_ended_otherwise_is_an_error_with_its_reason() -> None:
    with pytest.raises(JobFailed, match="latents are not finite"):
        Job.model_validate(JOB).require_success()
    with pytest.raises(ValueError, match="still running"):
        Job.model_validate({**JOB, "status": "running"}).require_success()


def test_the_last_event_carries_the_job() -> None:
    assert event(JOB).job is not None
    assert event({"id": "job_1", "status": "running", "progress": {"step": 1, "total": 4}}).job is None
