"""API keys, and parsing of tenants, scopes and durations."""

from __future__ import annotations

import re

import pytest

from shared.auth import ApiKey, Scope, digest_of, id_of, new_token, parse_scopes, tenant_name
from shared.errors import InvalidRequest


def test_keys_match_the_pattern_of_secret_scanners() -> None:
    tokens = {new_token() for _ in range(200)}
    assert len(tokens) == 200
    assert all(re.fullmatch(r"fq_[0-9A-Za-z]{48}", token) for token in tokens)
    assert all(id_of(token) == token[3:13] for token in tokens)


def test_checksum_detects_mistyped_keys() -> None:
    """Each character changed, one missing, two swapped, one too many."""
    token = new_token()
    for at in range(3, len(token)):
        other = "a" if token[at] != "a" else "b"
        assert id_of(token[:at] + other + token[at + 1 :]) is None
    swapped = token[:20] + token[21] + token[20] + token[22:]
    assert token[20] == token[21] or id_of(swapped) is None
    for wrong in (token[:-1], token + "a", token[3:], token.replace("fq_", "sk_"), "", "fq_", token + "\n"):
        assert id_of(wrong) is None


def test_key_matches_by_digest_and_is_not_in_its_repr() -> None:
    token = new_token()
    key = ApiKey(token[3:13], "default", frozenset(Scope), "", 0, digest=digest_of(token))
    assert key.matches(token)
    assert not key.matches(new_token())
    assert not key.matches("\ud800")
    assert token[13:] not in repr(key)
    assert key.digest not in repr(key)


@pytest.mark.parametrize("name", ["", "-a", "A", "a|b", "a/b", "*", "a" * 64, "a b", "ä", "a\n"])
def test_invalid_tenant_name_is_rejected(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tenant_name(name)
    assert caught.value.param == "tenant"
    assert tenant_name("a-b_9") == "a-b_9"


def test_scopes_are_comma_separated() -> None:
    assert parse_scopes("jobs:read, admin") == {Scope.JOBS_READ, Scope.ADMIN}
    for wrong in ("", ",", "jobs", "jobs:read,root"):
        with pytest.raises(InvalidRequest, match="jobs:read, jobs:write, metrics, admin"):
            parse_scopes(wrong)
