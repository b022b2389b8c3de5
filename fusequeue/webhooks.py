"""Deliveries of webhooks, verified and signed after the Standard Webhooks specification (1.0.0)."""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import datetime

from pydantic import JsonValue, ValidationError

from fusequeue.errors import InvalidArgument, InvalidDelivery
from fusequeue.response_types import Resource

TOLERANCE_S = 300.0
"""Age of a delivery beyond which it is refused: it may be a copy of an earlier one."""
_PREFIX = "whsec_"


class WebhookEvent(Resource):
    """An event of a job, or OpenAI's of a batch or video; `data` has the `id` of what it is about."""

    type: str
    data: dict[str, JsonValue]
    timestamp: datetime | None = None


def verify(
    body: bytes | str, headers: Mapping[str, str], secret: str, *, tolerance_s: float = TOLERANCE_S
) -> WebhookEvent:
    """Return the event of a delivery that `secret` has signed; raises `InvalidDelivery` for any other.

    `body` is the body as received, not parsed; `headers` are those of the request, in any case. A receiver also drops
    a `webhook-id` that it has seen.
    """
    content = body.encode() if isinstance(body, str) else bytes(body)
    given = {name.lower(): value for name, value in headers.items()}
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    if missing := [name for name in names if not given.get(name)]:
        raise InvalidDelivery(f"the delivery has no header {missing[0]}")
    message_id, timestamp, signatures = (given[name] for name in names)
    _check_time(timestamp, tolerance_s)
    expected = _signature(message_id, timestamp, content, secret).encode()
    if not any(hmac.compare_digest(expected, one.encode()) for one in signatures.split()):
        raise InvalidDelivery("the signature is not of this body and secret")
    try:
        return WebhookEvent.model_validate_json(content)
    except ValidationError as error:
        raise InvalidDelivery("the body is no event: it needs a type and data") from error


def sign(body: bytes | str, secret: str, message_id: str) -> dict[str, str]:
    """Return the headers of a delivery that is sent now: for tests of a receiver, or to hand a delivery on."""
    content = body.encode() if isinstance(body, str) else bytes(body)
    timestamp = str(int(time.time()))
    return {
        "content-type": "application/json",
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": _signature(message_id, timestamp, content, secret),
    }


def _signature(message_id: str, timestamp: str, content: bytes, secret: str) -> str:
    digest = hmac.digest(_key(secret), f"{message_id}.{timestamp}.".encode() + content, hashlib.sha256)
    return f"v1,{b64encode(digest).decode()}"


def _check_time(timestamp: str, tolerance_s: float) -> None:
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) < 20):
        raise InvalidDelivery("webhook-timestamp is no time")
    if abs(time.time() - int(timestamp)) > tolerance_s:
        raise InvalidDelivery(f"the delivery was not sent within {tolerance_s:g} s from now; compare the clocks")


def _key(secret: str) -> bytes:
    """Return the key in a secret; an empty one would verify what anyone can sign."""
    try:
        found = b64decode(secret.removeprefix(_PREFIX), validate=True) if secret.startswith(_PREFIX) else b""
    except ValueError:
        found = b""
    if not found:
        raise InvalidArgument("secret: it is not the secret of a webhook endpoint, whsec_...")
    return found
