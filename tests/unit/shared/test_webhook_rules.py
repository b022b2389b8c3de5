"""What is sent of an event, how it is signed, and when it is sent again."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from shared.job import Artifact, Failure, Job, JobRecord, State
from shared.webhooks import (
    MAX_BODY_BYTES,
    SCHEDULE_S,
    AttemptOutcome,
    DeliveryState,
    SigningSecret,
    attempt_outcome,
    body,
    headers,
    new_secret,
    rotate_secrets,
)


def present_ms() -> int:
    """The library that receivers use refuses what is older than five minutes: it is not taken at import."""
    return int(datetime.now(UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("attempts", "status", "retry_after_s", "spread", "expected"),
    [
        (1, 204, None, 0.5, AttemptOutcome(DeliveryState.DELIVERED)),  # any 2xx will do
        (1, 500, None, 0.5, AttemptOutcome(DeliveryState.PENDING, 5)),  # the first time may be a hiccup
        (1, None, None, 0.0, AttemptOutcome(DeliveryState.PENDING, 4)),  # no answer; a fifth less by chance
        (2, 500, None, 1.0, AttemptOutcome(DeliveryState.PENDING, 360)),  # or a fifth more
        (1, 302, None, 0.5, AttemptOutcome(DeliveryState.PENDING, 5)),  # a redirect is not followed
        (1, 429, None, 0.5, AttemptOutcome(DeliveryState.PENDING, 10)),  # who is busy is asked half as often
        (1, 503, 60, 0.5, AttemptOutcome(DeliveryState.PENDING, 60)),  # a time that is told is kept to
        (3, 503, 1, 0.5, AttemptOutcome(DeliveryState.PENDING, 1800)),  # but does not hurry us
        (1, 503, 10**9, 0.5, AttemptOutcome(DeliveryState.PENDING, 86_400)),  # nor hold us up for ever
        (1, 410, None, 0.5, AttemptOutcome(DeliveryState.FAILED, gone=True)),  # gone
        (len(SCHEDULE_S), 500, None, 0.5, AttemptOutcome(DeliveryState.PENDING, SCHEDULE_S[-1])),
        (len(SCHEDULE_S) + 1, 500, None, 0.5, AttemptOutcome(DeliveryState.FAILED)),  # the schedule ends
    ],
)
def test_what_follows_from_an_attempt(
    attempts: int, status: int | None, retry_after_s: float | None, spread: float, expected: AttemptOutcome
) -> None:
    found = attempt_outcome(attempts, status, retry_after_s, spread)
    assert (found.state, found.gone) == (expected.state, expected.gone)
    assert found.retry_s == (None if expected.retry_s is None else pytest.approx(expected.retry_s))


def test_a_receiver_verifies_with_either_secret_while_one_replaces_the_other() -> None:
    """The old one signs for a day; after that, only the new one."""
    now_ms = present_ms()
    old = (SigningSecret(secret=new_secret()),)
    both = rotate_secrets(old, now_ms)
    content = b'{"a": "\xc3\xbc"}'
    during = headers("msg_1", content, both, now_ms)
    for secret in both:
        assert Webhook(secret.secret).verify(content.decode(), during) == {"a": "ü"}
    later = headers("msg_1", content, both, now_ms + 90_000_000) | {"webhook-timestamp": str(now_ms // 1000)}
    with pytest.raises(WebhookVerificationError):
        Webhook(old[0].secret).verify(content.decode(), later)


def artifacts(count: int) -> tuple[Artifact, ...]:
    one = Artifact(index=0, key="jobs/secret/1/0.png", content_type="image/png", bytes=9, width=8, height=8, seed=1)
    return tuple(one.model_copy(update={"index": at}) for at in range(count))


def test_a_body_tells_what_a_client_acts_on(make_job: Callable[..., Job]) -> None:
    job = make_job(metadata={"order": "7"})
    record = JobRecord(job=job, state=State.SUCCEEDED, artifacts=artifacts(2))
    told = json.loads(body("job.succeeded", 1_769_860_800_000, job.id, record, "https://pictures.test"))
    assert (told["type"], told["timestamp"]) == ("job.succeeded", "2026-01-31T12:00:00.000Z")
    assert told["data"]["artifacts"][1]["url"] == f"https://pictures.test/v1/jobs/{job.id}/artifacts/1"
    assert (told["data"]["id"], told["data"]["metadata"]) == (job.id, {"order": "7"})
    assert "jobs/secret" not in json.dumps(told)


def test_a_body_stays_small(make_job: Callable[..., Job]) -> None:
    """What does not fit is at the job's URL."""
    job = make_job()
    failure = Failure(code="inference_failed", message="x" * 900)
    record = JobRecord(job=job, state=State.FAILED, error=failure, artifacts=artifacts(200))
    made = body("job.failed", present_ms(), job.id, record, "")
    assert len(made) <= MAX_BODY_BYTES
    assert json.loads(made)["data"]["url"] == f"/v1/jobs/{job.id}"


def test_a_job_that_is_known_no_longer_is_told_by_its_id() -> None:
    assert json.loads(body("job.expired", present_ms(), "job_1", None, ""))["data"] == {
        "id": "job_1",
        "object": "job",
        "status": "expired",
    }
