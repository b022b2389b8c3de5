"""Keys, signed URLs and webhook signatures: what was made is accepted, and nothing that differs is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from api.auth import Authenticator
from api.keys_required import KeysRequired
from api.webhook_messages import headers
from shared.auth import ApiKey, Signer, digest_of, id_of, new_token
from shared.config.settings import Settings
from shared.errors import Unauthenticated, UrlRefused
from shared.runtime.clock import now_ms
from shared.webhooks import ROTATION_MS, SigningSecret, new_secret, rotate_secrets

near = settings(max_examples=80, deadline=None, derandomize=True)
TOKEN = new_token()
NOW = 1_700_000_000_000


@near
@given(at=st.integers(0, len(TOKEN) - 1), letter=st.characters(codec="latin-1"))
def test_a_key_with_one_other_letter_is_not_the_key(at: int, letter: str) -> None:
    other = TOKEN[:at] + letter + TOKEN[at + 1 :]
    key = ApiKey(id_of(TOKEN) or "", "default", frozenset(), "", 0, digest=digest_of(TOKEN))
    assert key.matches(other) is (other == TOKEN)
    if other[at] != TOKEN[at]:
        assert id_of(other) is None  # the checksum finds one wrong letter


@near
@given(values=st.lists(st.text(st.characters(codec="latin-1"), max_size=60), max_size=3))
async def test_any_authorization_header_without_a_key_is_refused_without_redis(values: Sequence[str]) -> None:
    nothing: Any = object()  # neither the queue nor the storage is used
    keyed = Settings(auth="keys")
    authenticator = Authenticator(nothing, keyed, KeysRequired(nothing, nothing, keyed))
    with pytest.raises(Unauthenticated) as caught:
        await authenticator.caller(values)
    assert not any(len(value) > 8 and value in caught.value.message for value in values)


@near
@given(
    job_id=st.text(max_size=30),
    index=st.integers(0, 64),
    expires=st.integers(-(10**12), 10**12),
    signature=st.text(max_size=64),
)
def test_a_url_is_valid_only_with_its_signature(job_id: str, index: int, expires: int, signature: str) -> None:
    signer = Signer(b"secret", 3600)
    with pytest.raises(UrlRefused):
        signer.check(job_id, index, expires=expires, signature=signature, now_ms=NOW)
    query = dict(part.split("=") for part in signer.query("job_a", 0, NOW).removeprefix("?").split("&"))
    signer.check("job_a", 0, expires=int(query["expires"]), signature=query["signature"], now_ms=NOW)
    if (job_id, index) != ("job_a", 0):
        with pytest.raises(UrlRefused):
            signer.check(job_id, index, expires=int(query["expires"]), signature=query["signature"], now_ms=NOW)


@near
@given(content=st.text(max_size=200), changed=st.text(min_size=1, max_size=5))
def test_a_webhook_is_verified_by_the_library_with_each_valid_secret(content: str, changed: str) -> None:
    body, first = content.encode("utf-8", "replace"), SigningSecret(secret=new_secret())
    secrets = rotate_secrets((first,), now_ms())
    sent = headers("msg_1", body, secrets, now_ms())
    for secret in secrets:
        Webhook(secret.secret).verify(body, sent) if _is_json(body) else None
        with pytest.raises(WebhookVerificationError):
            Webhook(secret.secret).verify(body + changed.encode("utf-8", "replace"), sent)
    later = headers("msg_1", body, secrets, now_ms() + ROTATION_MS + 1000)
    assert len(later["webhook-signature"].split()) == 1


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True
