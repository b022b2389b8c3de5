"""Bodies and headers of webhooks, after the Standard Webhooks specification (1.0.0)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from standardwebhooks import Webhook

from shared.job import Webhook as JobWebhook
from shared.job_record import JobRecord
from shared.webhooks import SigningSecret

MAX_BODY_BYTES = 20_000


@dataclass(frozen=True)
class WebhookEvent:
    """An event to send. `record` is None for a deleted job, `webhook` is the job's own, None for an endpoint.

    `job_id` can be the id of a batch.
    """

    type: str
    at_ms: int
    job_id: str
    record: JobRecord | None
    webhook: JobWebhook | None
    base_url: str


def headers(message_id: str, body: bytes, secrets: Sequence[SigningSecret], now_ms: int) -> dict[str, str]:
    """Return the headers of one attempt, with a signature per valid secret."""
    at = datetime.fromtimestamp(now_ms // 1000, UTC)
    valid = [secret for secret in secrets if secret.until_ms is None or secret.until_ms > now_ms]
    signatures = [Webhook(secret.secret).sign(message_id, at, body.decode()) for secret in valid]
    return {
        "content-type": "application/json",
        "user-agent": "fusequeue-webhooks/1",
        "webhook-id": message_id,
        "webhook-timestamp": str(now_ms // 1000),
        "webhook-signature": " ".join(signatures),
    }


def body(event: WebhookEvent) -> bytes:
    """Return the body of an event, under 20 kB: facts of the job and URLs, no images.

    The body of a deleted job has only its id.
    """
    record = event.record
    data: dict[str, Any] = {"id": event.job_id, "object": "job", "status": event.type.partition(".")[2]}
    if record is not None:
        url = f"{event.base_url}/v1/jobs/{event.job_id}"
        data |= record.job.model_dump(mode="json", include={"model", "task", "batch_id", "group", "metadata", "seed"})
        data["url"] = url
        dumps = [
            one.model_dump(mode="json", exclude={"key", "thumbnail"}, exclude_none=True) for one in record.artifacts
        ]
        data["artifacts"] = [dump | {"url": f"{url}/artifacts/{dump['index']}"} for dump in dumps]
        data["error"] = None if record.error is None else record.error.model_dump(mode="json")
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    encoded = encode({"type": event.type, "timestamp": at, "data": data})
    if len(encoded) > MAX_BODY_BYTES:  # many images or a long error: clients read the rest at `url`
        data = {key: data[key] for key in ("id", "object", "status", "url", "model", "batch_id", "group")}
        encoded = encode({"type": event.type, "timestamp": at, "data": data})
    return encoded


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as compact JSON."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
