"""Without keys the API serves only this machine, and no page of another origin."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from harness.http_server import bearer, png, serving
from harness.tables import row

from api import keys_required
from api.keyless import check_keyless, host_of, is_loopback
from shared.config.settings import Settings
from shared.errors import ConfigurationError, FusequeueError
from shared.queue import Queue

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
    assert is_loopback(host) is loopback


RAW_HOSTS = [
    (["localhost"], "localhost"),
    (["LOCALHOST:8000"], "localhost"),
    (["[::1]:8000"], "[::1]"),
    (["a-b.example:1"], "a-b.example"),
    (["my_box"], "my_box"),
    ([], None),
    ([""], None),
    (["localhost", "localhost"], None),
    (["evil.example@localhost"], None),
    (["evil.example/@localhost"], None),
    (["evil.example#@localhost:8000"], None),
    (["localhost:"], None),
    (["localhost:80:80"], None),
    (["localhost:x"], None),
    (["localhost, evil.example"], None),
    (["localhost\n"], None),
    (["[::1"], None),
    (["::1"], None),
    (["évil"], None),
]


@pytest.mark.parametrize(("values", "host"), RAW_HOSTS)
def test_a_host_header_is_one_valid_host_with_an_optional_port(values: list[str], host: str | None) -> None:
    assert host_of(values) == host


LOCAL = ("host", "localhost:8000")
HERE = ("127.0.0.1", 50_000)
NO_KEYS = "insecure-no-keys"
# auth, method, headers, client, HTTP version -> error code; None: served
REQUESTS: list[tuple[str, str, list[tuple[str, str]], tuple[str, int] | None, str, str | None]] = [
    ("auto", "GET", [LOCAL], HERE, "1.1", None),
    ("auto", "POST", [LOCAL], ("::1", 1), "1.1", None),
    # Hosts
    ("auto", "GET", [("host", "images.example")], HERE, "1.1", None),
    ("auto", "GET", [("host", "evil.example")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [("host", "evil.example@localhost")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [("host", "not a host")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, LOCAL], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [], HERE, "1.1", "host_not_allowed"),
    (NO_KEYS, "POST", [("host", "evil.example")], HERE, "1.1", None),
    # Proxies and other machines
    ("auto", "GET", [LOCAL, ("x-forwarded-for", "203.0.113.9")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("x-forwarded-host", "localhost")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [("host", "images.example"), ("x-forwarded-proto", "https")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("forwarded", "for=203.0.113.9")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("x-real-ip", "203.0.113.9")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("via", "1.1 proxy")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("cf-connecting-ip", "203.0.113.9")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("true-client-ip", "203.0.113.9")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("x-amzn-oidc-identity", "a")], HERE, "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL, ("x-amzn-trace-id", "1b4e28ba")], HERE, "1.1", None),  # Hugging Face's client sends it
    ("auto", "GET", [LOCAL], HERE, "1.0", "host_not_allowed"),
    ("auto", "GET", [LOCAL], ("192.168.0.7", 1), "1.1", "host_not_allowed"),
    ("auto", "GET", [LOCAL], None, "1.1", "host_not_allowed"),
    (NO_KEYS, "GET", [LOCAL, ("x-forwarded-for", "203.0.113.9")], ("192.168.0.7", 1), "1.0", None),
    # Pages
    ("auto", "POST", [LOCAL, ("origin", "http://localhost:8000")], HERE, "1.1", None),
    ("auto", "POST", [LOCAL, ("origin", "https://shop.example"), ("sec-fetch-site", "cross-site")], HERE, "1.1", None),
    ("auto", "POST", [LOCAL, ("origin", "https://images.example")], HERE, "1.1", None),
    ("auto", "GET", [LOCAL, ("sec-fetch-site", "same-origin")], HERE, "1.1", None),
    ("auto", "GET", [LOCAL, ("sec-fetch-site", "none")], HERE, "1.1", None),
    ("auto", "POST", [LOCAL, ("origin", "https://evil.example")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "POST", [LOCAL, ("origin", "http://localhost:3000")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "POST", [LOCAL, ("origin", "http://localhost")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "POST", [LOCAL, ("origin", "null")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "POST", [LOCAL, ("origin", "null"), ("sec-fetch-site", "same-origin")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "POST", [LOCAL, ("origin", "")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "POST", [LOCAL, *[("origin", "http://localhost:8000")] * 2], HERE, "1.1", "origin_not_allowed"),
    ("auto", "POST", [LOCAL, ("sec-fetch-site", "cross-site")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "GET", [LOCAL, ("sec-fetch-site", "same-site")], HERE, "1.1", "origin_not_allowed"),
    ("auto", "GET", [LOCAL, ("sec-fetch-site", "other")], HERE, "1.1", "origin_not_allowed"),
    (NO_KEYS, "POST", [LOCAL, ("origin", "https://evil.example")], HERE, "1.1", "origin_not_allowed"),
    (NO_KEYS, "DELETE", [LOCAL, ("sec-fetch-site", "cross-site")], HERE, "1.1", "origin_not_allowed"),
    (NO_KEYS, "GET", [LOCAL, ("sec-fetch-site", "cross-site")], HERE, "1.1", None),
]


@pytest.mark.parametrize(("auth", "method", "headers", "client", "version", "refused"), REQUESTS)
def test_a_request_without_a_key_comes_from_this_machine_and_from_no_foreign_page(
    auth: str,
    method: str,
    headers: list[tuple[str, str]],
    client: tuple[str, int] | None,
    version: str,
    refused: str | None,
) -> None:
    settings = Settings(auth=auth, public_url="https://images.example:443", cors_origins=("https://shop.example",))  # type: ignore[arg-type]
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "headers": raw, "client": client, "http_version": version}
    if refused is None:
        check_keyless(scope, settings)
        return
    with pytest.raises(FusequeueError) as error:
        check_keyless(scope, settings)
    assert error.value.code == refused
    assert "fusequeue keys create" in error.value.message


FORMS = [
    "/v1/images/edits",
    "/v1/inputs",
    "/v1/files",
    "/v1/videos",
    "/v1/webhooks/secret/rotate",
    "/v1/webhooks/deliveries/x/redeliver",
    "/v1/jobs/job_00000000000000000000000000/cancel",
    "/compat/replicate/v1/files",
    "/compat/replicate/v1/predictions/x/cancel",
]


async def test_no_page_of_another_origin_can_post_a_form(fake_queue: Queue, tmp_path: Path) -> None:
    """A form with a file needs no CORS: what it would do is done although the page cannot read the response."""
    form = {"file": ("a.png", png(), "image/png")}
    pages = ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"})
    async with serving(fake_queue, tmp_path) as api:
        for path, page in product(FORMS, pages):
            with row(path, page):
                response = await api.post(path, files=form, headers=page)
                assert (response.status_code, response.json()["code"]) == (403, "origin_not_allowed")
    async with serving(fake_queue, tmp_path, auth="keys") as api:
        headers = await bearer(fake_queue) | {"Origin": "https://app.example"}
        for path in FORMS:
            assert (await api.post(path, files=form, headers=headers)).status_code != 403, "no page has a key by itself"


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

    monkeypatch.setattr(keys_required, "_keys_exist", keys_made)
    settings = Settings(auth=auth)  # type: ignore[arg-type]
    if served is not None:
        assert (await keys_required.secured(settings, host)).auth == served
        return
    with pytest.raises(ConfigurationError) as refused:
        await keys_required.secured(settings, host)
    for word in (host, "fusequeue keys create", "--insecure-no-keys", "FUSEQUEUE_AUTH=keys"):
        assert word in refused.value.message


async def test_keys_are_required_while_redis_is_unavailable(settings_for: Callable[..., Settings]) -> None:
    """A slow Redis must not open the API."""
    settings = settings_for("redis://127.0.0.1:1/0")
    assert (await keys_required.secured(settings, "0.0.0.0")).auth == "keys"


@pytest.mark.parametrize("origin", ["*", "shop.example", "https://a.example/path", "file://x", "https://A b"])
def test_an_origin_has_no_wildcard_or_path(origin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wildcard, pages of any site could use an API on this machine."""
    with pytest.raises(ValueError, match="cors_origins"):
        Settings(cors_origins=(origin,))
    monkeypatch.setenv("FUSEQUEUE_CORS_ORIGINS", "https://shop.example, http://localhost:3000")
    assert Settings().cors_origins == ("https://shop.example", "http://localhost:3000")
