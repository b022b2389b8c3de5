"""Without keys only this machine reaches the API."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from api import auth as api_auth
from shared.config.settings import Settings
from shared.errors import ConfigurationError

HOSTS = [
    ("127.0.0.1", True),
    ("127.9.9.9", True),
    ("::1", True),
    ("[::1]", True),
    ("localhost", True),
    ("0.0.0.0", False),
    ("::", False),
    ("", False),
    ("10.0.0.1", False),
    ("localhost.evil.example", False),
    ("127.0.0.1.evil.example", False),
    ("::ffff:0.0.0.0", False),
]


@pytest.mark.parametrize(("host", "loopback"), HOSTS)
def test_only_local_addresses_are_loopback(host: str, loopback: bool) -> None:
    assert api_auth.is_loopback(host) is loopback


# auth, host, whether keys exist -> auth to serve with; None: refused
DECISIONS = [
    ("auto", "127.0.0.1", False, "auto"),
    ("auto", "127.0.0.1", True, "auto"),
    ("auto", "0.0.0.0", False, None),
    ("auto", "0.0.0.0", True, "keys"),
    ("keys", "0.0.0.0", False, "keys"),
    ("keys", "127.0.0.1", False, "keys"),
    ("insecure-no-keys", "0.0.0.0", True, "insecure-no-keys"),
    ("insecure-no-keys", "127.0.0.1", True, "insecure-no-keys"),
]


@pytest.mark.parametrize(("auth", "host", "exist", "served"), DECISIONS)
async def test_an_api_that_others_can_reach_requires_keys(
    monkeypatch: pytest.MonkeyPatch, auth: str, host: str, exist: bool, served: str | None
) -> None:
    async def keys_made(settings: Settings) -> bool:
        return exist

    monkeypatch.setattr(api_auth, "_keys_exist", keys_made)
    settings = Settings(auth=auth)  # type: ignore[arg-type]
    if served is not None:
        assert (await api_auth.secured(settings, host)).auth == served
        return
    with pytest.raises(ConfigurationError) as refused:
        await api_auth.secured(settings, host)
    for word in (host, "fusequeue keys create", "--insecure-no-keys", "FUSEQUEUE_AUTH=keys"):
        assert word in refused.value.message


async def test_keys_are_required_while_redis_is_unavailable(settings_for: Callable[..., Settings]) -> None:
    """A slow Redis must not open the API."""
    settings = settings_for("redis://127.0.0.1:1/0")
    assert (await api_auth.secured(settings, "0.0.0.0")).auth == "keys"


@pytest.mark.parametrize("origin", ["*", "shop.example", "https://a.example/path", "file://x", "https://A b"])
def test_an_origin_has_no_wildcard_or_path(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wildcard, pages of any site could use an API on this machine."""
    with pytest.raises(ValueError, match="cors_origins"):
        Settings(cors_origins=(origin,))
    monkeypatch.setenv("FUSEQUEUE_CORS_ORIGINS", "https://shop.example, http://localhost:3000")
    assert Settings().cors_origins == ("https://shop.example", "http://localhost:3000")
