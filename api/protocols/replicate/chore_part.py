"""Webhooks of predictions."""

from api.protocols.chore_part import ChorePart
from api.protocols.replicate.predictions import webhook_body
from api.webhook_messages import WebhookEvent


def _webhook_body(event: WebhookEvent) -> bytes | None:
    """Return the prediction of an event for the webhook of a prediction."""
    if event.record is None or event.webhook is None or event.webhook.version is None:
        return None
    return webhook_body(event.record, event.webhook.version, event.type, event.base_url)


REPLICATE = ChorePart(_webhook_body)
