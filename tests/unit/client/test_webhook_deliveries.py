"""Verifying deliveries as a receiver does, of headers and bodies that the service makes."""

from __future__ import annotations

import json
import time

import pytest
from standardwebhooks import Webhook

from api.webhook_messages import headers
from fusequeue import InvalidArgument, InvalidDelivery, WebhookEvent, webhooks
from shared.webhooks import SigningSecret, new_secret

BODY = json.dumps({"type": "job.succeeded", "timestamp": "2026-01-31T12:00:00Z", "data": {"id": "job_1"}}).encode()
SECRETS = {name: new_secret() for name in ("old", "new", "other")}


def signed(body: bytes = BODY) -> dict[str, str]:
    """Return the headers of a delivery while a secret is rotated: both sign."""
    at_ms = int(time.time() * 1000)
    secrets = [SigningSecret(secret=SECRETS["new"]), SigningSecret(secret=SECRETS["old"], until_ms=at_ms + 60_000)]
    return headers("msg_1", body, secrets, at_ms)


@pytest.mark.parametrize("name", ["old", "new"])
def test_a_delivery_is_verified_and_typed(name: str) -> None:
    given = {header.title(): value for header, value in signed().items()}
    event = webhooks.verify(BODY, given, SECRETS[name])
    assert isinstance(event, WebhookEvent)
    assert (event.type, event.data["id"]) == ("job.succeeded", "job_1")
    assert event.timestamp is not None
    assert webhooks.verify(BODY.decode(), signed(), SECRETS[name]) == event


@pytest.mark.parametrize(
    ("received", "changed", "name", "message"),
    [
        (BODY + b" ", {}, "new", "signature"),
        (BODY, {}, "other", "signature"),
        (BODY, {"webhook-id": "msg_2"}, "new", "signature"),
        (BODY, {"webhook-signature": "v1,ä"}, "new", "signature"),
        (BODY, {"webhook-id": ""}, "new", "no header webhook-id"),
        (BODY, {"webhook-timestamp": "1700000000"}, "new", "not sent within 300 s"),
        (BODY, {"webhook-timestamp": "soon"}, "new", "no time"),
    ],
)
def test_any_other_delivery_is_refused(received: bytes, changed: dict[str, str], name: str, message: str) -> None:
    with pytest.raises(InvalidDelivery, match=message):
        webhooks.verify(received, {**signed(), **changed}, SECRETS[name])


def test_what_the_client_signs_is_verified_by_the_client_and_by_other_libraries() -> None:
    made = webhooks.sign(BODY, SECRETS["new"], "msg_1")
    assert webhooks.verify(BODY, made, SECRETS["new"]).data["id"] == "job_1"
    assert Webhook(SECRETS["new"]).verify(BODY, made)["type"] == "job.succeeded"


def test_a_signed_body_that_is_no_event_is_refused() -> None:
    with pytest.raises(InvalidDelivery, match="no event"):
        webhooks.verify(b"[]", signed(b"[]"), SECRETS["new"])


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_ä", "fq_key"])
def test_what_is_no_secret_is_named(secret: str) -> None:
    with pytest.raises(InvalidArgument, match="secret"):
        webhooks.verify(BODY, signed(), secret)
