"""OpenAI's webhooks of batches and videos, and the chore that advances batches."""

from api.protocols.chore_part import ChorePart, PeriodicChore
from api.webhook_messages import WebhookEvent, encode

_EVENTS = (
    *("batch.completed", "batch.failed", "batch.expired", "batch.cancelled"),
    *("video.completed", "video.failed"),
)
ADVANCE = PeriodicChore("advance", "api.protocols.openai.batches.batch_pass.advance", 2)


def _webhook_body(event: WebhookEvent) -> bytes | None:
    """Return the event of a batch or a video, whose id is the job id with another prefix."""
    if event.type not in _EVENTS:
        return None
    kind, _, status = event.type.partition(".")
    number = event.job_id.partition("_")[2]
    object_id, path = f"{kind}_{number}", {"batch": "batches", "video": "videos"}[kind]
    data = {"id": object_id, "object": kind, "status": status, "url": f"{event.base_url}/v1/{path}/{object_id}"}
    names = {"id": f"evt_{number}", "object": "event", "created_at": event.at_ms // 1000, "type": event.type}
    return encode({**names, "data": data})


OPENAI = ChorePart(_webhook_body, _EVENTS, (ADVANCE,))
