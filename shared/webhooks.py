"""Webhooks after the Standard Webhooks specification (1.0.0): what is sent, how it is signed, when it is sent again."""

from __future__ import annotations

import json
import secrets as chance
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field
from standardwebhooks import Webhook

from shared.job import Artifact, JobRecord, State

JobEvent = Literal["job.queued", "job.running", "job.succeeded", "job.failed", "job.canceled", "job.expired"]
EVENTS: dict[JobEvent, State] = {name: State(name.partition(".")[2]) for name in get_args(JobEvent)}
"""The events there are, and the state that each tells of."""

TerminalEvent = Literal[
    "batch.completed", "batch.failed", "batch.expired", "batch.cancelled", "video.completed", "video.failed"
]
"""How batches and videos end, as OpenAI names it: for endpoints that ask for it."""

ENDPOINT_EVENTS: dict[str, State | TerminalEvent] = {
    **dict[str, State | TerminalEvent](EVENTS.items()),
    **{name: name for name in get_args(TerminalEvent)},
}

TERMINAL_EVENTS: tuple[JobEvent, ...] = tuple(name for name, state in EVENTS.items() if state.terminal)
MAX_BODY_BYTES = 20_000
SECRET_BYTES = 32
ROTATION_MS = 86_400_000
"""How long a secret that was replaced still signs beside its successor."""

SCHEDULE_S = (5, 300, 1_800, 7_200, 18_000, 36_000, 36_000, 50_400)
"""Seconds after each failed attempt; after the last one a delivery has failed. 44 hours in all."""

DISABLED_AFTER_S = 5 * 86_400
"""An endpoint whose every attempt failed for so long is disabled."""

MOST_RETRY_AFTER_S = 86_400
_SLOW_DOWN = frozenset((429, 502, 504))


class SigningSecret(BaseModel):
    """A signing secret; `until_ms` is when a replaced one ends."""

    model_config = ConfigDict(frozen=True)

    secret: str = Field(repr=False)
    until_ms: int | None = None


class WebhookEndpoint(BaseModel):
    """Where a tenant is told of its jobs and batches. `failing_since` is in ms; None while deliveries succeed."""

    model_config = ConfigDict(frozen=True)

    id: str
    url: str
    states: tuple[State | TerminalEvent, ...]
    secrets: tuple[SigningSecret, ...]
    enabled: bool = True
    description: str = ""
    created_at_ms: int
    failing_since: float | None = None
    disabled_reason: str | None = None


class DeliveryState(StrEnum):
    """What becomes of a delivery after an attempt."""

    DELIVERED = "delivered"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True)
class AttemptOutcome:
    """`again_s` is set while the delivery is pending; `gone` says that the endpoint wants no more of any."""

    step: DeliveryState
    again_s: float | None = None
    gone: bool = False


def attempt_outcome(attempts: int, status: int | None, retry_after_s: float | None, spread: float) -> AttemptOutcome:
    """Return what follows from an attempt.

    `attempts` counts this one too; `status` is None where no answer came; `spread`, drawn from 0 to 1, is the jitter:
    a fifth either way. A redirect is a failure: its target was not vetted, and would get what is not signed for it.
    """
    if status is not None and 200 <= status < 300:
        return AttemptOutcome(DeliveryState.DELIVERED)
    if status == 410:
        return AttemptOutcome(DeliveryState.FAILED, gone=True)
    if attempts > len(SCHEDULE_S):
        return AttemptOutcome(DeliveryState.FAILED)
    pause_s = SCHEDULE_S[attempts - 1] * (0.8 + 0.4 * spread) * (2 if status in _SLOW_DOWN else 1)
    if retry_after_s is not None:
        pause_s = max(pause_s, min(retry_after_s, MOST_RETRY_AFTER_S))
    return AttemptOutcome(DeliveryState.PENDING, again_s=pause_s)


def new_secret() -> str:
    """Return a fresh signing secret."""
    return "whsec_" + b64encode(chance.token_bytes(SECRET_BYTES)).decode()


def rotate_secrets(old: Sequence[SigningSecret], now_ms: int) -> tuple[SigningSecret, ...]:
    """Return the secrets with a fresh one before the present one, which goes on signing for a day."""
    present = old[0].model_copy(update={"until_ms": now_ms + ROTATION_MS})
    return (SigningSecret(secret=new_secret()), present)


def headers(message_id: str, body: bytes, secrets: Sequence[SigningSecret], now_ms: int) -> dict[str, str]:
    """Return the headers of one attempt: a signature of each secret that is still good."""
    at = datetime.fromtimestamp(now_ms // 1000, UTC)
    good = [one for one in secrets if one.until_ms is None or one.until_ms > now_ms]
    signatures = [Webhook(one.secret).sign(message_id, at, body.decode()) for one in good]
    return {
        "content-type": "application/json",
        "user-agent": "fusequeue-webhooks/1",
        "webhook-id": message_id,
        "webhook-timestamp": str(now_ms // 1000),
        "webhook-signature": " ".join(signatures),
    }


def body(event: str, at_ms: int, job_id: str, record: JobRecord | None, base_url: str) -> bytes:
    """Return what is sent of an event: what a client acts on, and URLs, never pictures; under 20 kB.

    `record` is None where the job is known no longer: then only its id is told. `job_id` may be that of a batch.
    """
    at = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if event.startswith(("batch.", "video.")):
        return _of_end(event, at_ms, job_id, base_url)
    data: dict[str, Any] = {"id": job_id, "object": "job", "status": event.partition(".")[2]}
    if record is not None:
        data |= _facts(record, f"{base_url}/v1/jobs/{job_id}")
    made = _encoded({"type": event, "timestamp": at, "data": data})
    if len(made) > MAX_BODY_BYTES:  # many pictures, or long words of an error: the rest is at `url`
        data = {key: data[key] for key in ("id", "object", "status", "url", "model", "batch_id")}
        made = _encoded({"type": event, "timestamp": at, "data": data})
    return made


def _of_end(event: str, at_ms: int, job_id: str, base_url: str) -> bytes:
    """Return the body of an event of a batch or a video, whose id is that of its job under another name."""
    kind, _, status = event.partition(".")
    number = job_id.partition("_")[2]
    made, paths = f"{kind}_{number}", {"batch": "batches", "video": "videos"}
    data = {"id": made, "object": kind, "status": status, "url": f"{base_url}/v1/{paths[kind]}/{made}"}
    told = {"id": f"evt_{number}", "object": "event", "created_at": at_ms // 1000}
    return _encoded({**told, "type": event, "data": data})


def _facts(record: JobRecord, url: str) -> dict[str, Any]:
    job, error = record.job, record.error
    return {
        "url": url,
        "model": job.model,
        "task": job.task.value,
        "batch_id": job.batch_id,
        "metadata": job.metadata,
        "seed": job.seed,
        "artifacts": [_artifact(artifact, url) for artifact in record.artifacts],
        "error": None if error is None else error.model_dump(mode="json"),
    }


def _artifact(artifact: Artifact, url: str) -> dict[str, Any]:
    told = artifact.model_dump(mode="json", exclude={"key", "thumbnail"}, exclude_none=True)
    return {**told, "url": f"{url}/artifacts/{artifact.index}"}


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
