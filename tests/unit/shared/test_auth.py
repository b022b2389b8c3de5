"""What a key looks like, and the words of those who make one."""

from __future__ import annotations

import re

import pytest

from shared.auth import ApiKey, Scope, digest_of, id_of, new_token, parse_duration, parse_scopes, tenant_name
from shared.errors import InvalidRequest


def test_a_key_is_what_secret_scanners_look_for() -> None:
    tokens = {new_token() for _ in range(200)}
    assert len(tokens) == 200
    assert all(re.fullmatch(r"fq_[0-9A-Za-z]{48}", token) for token in tokens)
    assert all(id_of(token) == token[3:13] for token in tokens)


def test_a_slip_in_any_place_is_noticed_without_asking_anybody() -> None:
    """Every character changed in turn, one lost, two swapped, one too many."""
    token = new_token()
    for at in range(3, len(token)):
        other = "a" if token[at] != "a" else "b"
        assert id_of(token[:at] + other + token[at + 1 :]) is None
    swapped = token[:20] + token[21] + token[20] + token[22:]
    assert token[20] == token[21] or id_of(swapped) is None
    for wrong in (token[:-1], token + "a", token[3:], token.replace("fq_", "sk_"), "", "fq_", token + "\n"):
        assert id_of(wrong) is None


def test_a_key_is_known_by_its_digest_alone() -> None:
    token = new_token()
    key = ApiKey(token[3:13], "default", frozenset(Scope), "", 0, digest=digest_of(token))
    assert key.matches(token)
    assert not key.matches(new_token())
    assert not key.matches("\ud800")
    assert token[13:] not in repr(key)
    assert key.digest not in repr(key)


@pytest.mark.parametrize("name", ["", "-a", "A", "a|b", "a/b", "*", "a" * 64, "a b", "ä", "a\n"])
def test_a_tenant_has_a_name_that_no_key_or_path_is_broken_by(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tenant_name(name)
    assert caught.value.param == "tenant"
    assert tenant_name("a-b_9") == "a-b_9"


def test_scopes_are_named_by_commas() -> None:
    assert parse_scopes("jobs:read, admin") == {Scope.JOBS_READ, Scope.ADMIN}
    for wrong in ("", ",", "jobs", "jobs:read,root"):
        with pytest.raises(InvalidRequest, match="jobs:read, jobs:write, admin"):
            parse_scopes(wrong)


@pytest.mark.parametrize(("text", "seconds"), [("45s", 45), ("30m", 1800), ("12h", 43_200), ("90d", 7_776_000)])
def test_a_life_has_a_unit(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "d", "0d", "-1d", "1.5h", "999999999d", "1y"])
def test_a_life_that_cannot_be_read_is_no_life(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_duration(text)
