"""Bodies, signatures and retries of webhooks."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from api.webhook_messages import MAX_BODY_BYTES, WebhookEvent, body, headers
from shared.job import Job, State
from shared.job_record import Artifact, Failure, JobRecord
from shared.webhooks import (
    SCHEDULE_S,
    AttemptOutcome,
    DeliveryState,
    SigningSecret,
    attempt_outcome,
    new_secret,
    retry_after_s,
    rotate_secrets,
)


def now_ms() -> int:
    """Return the time of the call; the verifying library refuses timestamps older than five minutes."""
    return int(datetime.now(UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("attempts", "status", "retry_after_s", "jitter", "expected"),
    [
        (1, 204, None, 0.5, AttemptOutcome(DeliveryState.DELIVERED)),  # any 2xx
        (1, 500, None, 0.5, AttemptOutcome(DeliveryState.PENDING, 5)),  # a short first delay
        (1, None, None, 0.0, AttemptOutcome(DeliveryState.PENDING, 4)),  # no response; jitter: a fifth less
        (2, 500, None, 1.0, AttemptOutcome(DeliveryState.PENDING, 360)),  # a fifth more
        (1, 302, None, 0.5, AttemptOutcome(DeliveryState.PENDING, 5)),  # a redirect is not followed
        (1, 429, None, 0.5, AttemptOutcome(DeliveryState.PENDING, 10)),  # rate limited: twice the delay
        (1, 503, 60, 0.5, AttemptOutcome(DeliveryState.PENDING, 60)),  # Retry-After is honoured
        (3, 503, 1, 0.5, AttemptOutcome(DeliveryState.PENDING, 1800)),  # but does not shorten the delay
        (1, 503, 10**9, 0.5, AttemptOutcome(DeliveryState.PENDING, 86_400)),  # and is bounded
        (1, 410, None, 0.5, AttemptOutcome(DeliveryState.FAILED, gone=True)),  # the endpoint is gone
        (len(SCHEDULE_S), 500, None, 0.5, AttemptOutcome(DeliveryState.PENDING, SCHEDULE_S[-1])),
        (len(SCHEDULE_S) + 1, 500, None, 0.5, AttemptOutcome(DeliveryState.FAILED)),  # the schedule ends
    ],
)
def test_the_outcome_of_an_attempt(
    attempts: int, status: int | None, retry_after_s: float | None, jitter: float, expected: AttemptOutcome
) -> None:
    outcome = attempt_outcome(attempts, status, retry_after_s, jitter)
    assert (outcome.state, outcome.gone) == (expected.state, expected.gone)
    assert outcome.retry_s == (None if expected.retry_s is None else pytest.approx(expected.retry_s))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        ("Fri, 27 Nov 2026 12:02:00 GMT", 120.0),
        ("Friday, 27-Nov-26 12:02:00 GMT", 120.0),
        ("Fri, 27 Nov 2026 11:00:00 GMT", 0.0),
        ("Fri, 27 Nov 2026 12:02:00 -0000", 120.0),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("1e9", None),
        ("Fri, 99 Nov 2026 12:02:00 GMT", None),
    ],
)
def test_a_receiver_says_in_seconds_or_by_a_date_when_to_try_again(value: str, seconds: float | None) -> None:
    assert retry_after_s(value, datetime(2026, 11, 27, 12, tzinfo=UTC)) == seconds


def test_both_secrets_verify_during_a_rotation() -> None:
    """The old secret signs for a day; after that, only the new one."""
    at_ms = now_ms()
    old = (SigningSecret(secret=new_secret()),)
    both = rotate_secrets(old, at_ms)
    content = b'{"a": "\xc3\xbc"}'
    during = headers("msg_1", content, both, at_ms)
    for secret in both:
        assert Webhook(secret.secret).verify(content.decode(), during) == {"a": "ü"}
    later = headers("msg_1", content, both, at_ms + 90_000_000) | {"webhook-timestamp": str(at_ms // 1000)}
    with pytest.raises(WebhookVerificationError):
        Webhook(old[0].secret).verify(content.decode(), later)


def artifacts(count: int) -> tuple[Artifact, ...]:
    artifact = Artifact(
        index=0, key="jobs/secret/1/0.png", content_type="image/png", bytes=9, width=8, height=8, seed=1
    )
    return tuple(artifact.model_copy(update={"index": index}) for index in range(count))


def test_a_body_has_the_facts_of_the_job(make_job: Callable[..., Job]) -> None:
    job = make_job(metadata={"order": "7"}, group="nightly")
    record = JobRecord(job=job, state=State.SUCCEEDED, artifacts=artifacts(2))
    event = json.loads(
        body(WebhookEvent("job.succeeded", 1_769_860_800_000, job.id, record, None, "https://images.test"))
    )
    assert (event["type"], event["timestamp"]) == ("job.succeeded", "2026-01-31T12:00:00.000Z")
    assert event["data"]["artifacts"][1]["url"] == f"https://images.test/v1/jobs/{job.id}/artifacts/1"
    named = [event["data"][name] for name in ("id", "metadata", "group")]
    assert named == [job.id, {"order": "7"}, "nightly"]
    assert "jobs/secret" not in json.dumps(event)


def test_a_body_is_bounded(make_job: Callable[..., Job]) -> None:
    """A large body keeps the job's URL and its group."""
    job = make_job(group="nightly")
    failure = Failure(code="inference_failed", message="x" * 900)
    record = JobRecord(job=job, state=State.FAILED, error=failure, artifacts=artifacts(200))
    encoded = body(WebhookEvent("job.failed", now_ms(), job.id, record, None, ""))
    assert len(encoded) <= MAX_BODY_BYTES
    data = json.loads(encoded)["data"]
    assert (data["url"], data["group"]) == (f"/v1/jobs/{job.id}", "nightly")


def test_the_body_of_a_deleted_job_has_its_id() -> None:
    assert json.loads(body(WebhookEvent("job.expired", now_ms(), "job_1", None, None, "")))["data"] == {
        "id": "job_1",
        "object": "job",
        "status": "expired",
    }
