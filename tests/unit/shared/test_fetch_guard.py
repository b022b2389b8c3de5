"""Addresses and URLs that are allowed or refused."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import pytest

from shared.config.settings import Settings
from shared.errors import FetchFailed, FetchRefused
from shared.inputs.addresses import refusal
from shared.inputs.fetch_guard import FetchGuard, FetchRules

PUBLIC = "93.184.216.34"
PRIVATE_LAN = (ipaddress.ip_network("10.0.0.0/8"),)


@pytest.mark.parametrize(
    ("address", "word"),
    [
        (PUBLIC, None),
        ("2606:2800:220:1::1", None),
        ("9.255.255.255", None),
        ("172.32.0.1", None),
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("10.1.2.3", "private"),
        ("100.64.0.1", "carrier"),
        ("100.100.100.200", "carrier"),  # a metadata service lives there
        ("127.0.0.1", "loopback"),
        ("127.255.0.9", "loopback"),
        ("34.118.224.1", "cluster"),
        ("34.118.239.255", "cluster"),
        ("34.118.240.0", None),
        ("168.63.129.16", "metadata"),
        ("169.254.169.254", "link-local"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.0.0.192", "reserved"),
        ("192.168.1.1", "private"),
        ("198.18.0.1", "reserved"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:169.254.169.254", "link-local"),
        ("::ffff:93.184.216.34", None),
        ("::127.0.0.1", "reserved"),
        ("2002:7f00:0001::1", "loopback"),  # 6to4 of 127.0.0.1
        ("2002:c0a8:0101::1", "private"),
        ("64:ff9b::10.0.0.1", "private"),  # NAT64
        ("64:ff9b::93.184.216.34", None),
        ("64:ff9b:1::a00:1", "private"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "reserved"),  # Teredo
        ("2001:db8::1", "reserved"),
        ("fc00::1", "private"),
        ("fd00:ec2::254", "private"),  # a metadata service lives there
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("ff02::1", "multicast"),
        ("4000::1", "reserved"),
        ("localhost", "not an address"),
        ("", "not an address"),
    ],
)
def test_refusal(address: str, word: str | None) -> None:
    """Only public unicast addresses are allowed."""
    why = refusal(address)
    assert (why is None) == (word is None)
    assert word is None or word in str(why)


@pytest.mark.parametrize(
    ("address", "open_"),
    [("10.9.9.9", True), ("::ffff:10.9.9.9", True), ("192.168.0.1", False), ("11.0.0.1", True), ("127.0.0.1", False)],
)
def test_only_networks_of_the_operator_are_opened(address: str, open_: bool) -> None:
    """In every notation of their addresses."""
    assert (refusal(address, PRIVATE_LAN) is None) is open_


@pytest.mark.parametrize("address", ["10.1.0.9", "93.184.216.34", "::ffff:10.1.0.9"])
def test_networks_that_the_operator_refuses_are_closed(address: str) -> None:
    """Also within a network that is opened."""
    refused = tuple(map(ipaddress.ip_network, ("10.1.0.0/16", "93.184.216.0/24")))
    assert "operator refuses" in str(refusal(address, PRIVATE_LAN, refused))
    assert refusal("10.2.0.9", PRIVATE_LAN, refused) is None


async def test_internal_names_are_allowed_in_networks_that_the_operator_opens() -> None:
    url = "https://images.default.svc.cluster.local/"
    assert (await _guard("10.9.9.9", networks=PRIVATE_LAN).resolve_url(url)).addresses == ("10.9.9.9",)
    with pytest.raises(FetchRefused, match="name of a private network"):
        await _guard(PUBLIC, networks=PRIVATE_LAN).resolve_url(url)


def _guard(*addresses: str, **rules: object) -> FetchGuard:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return FetchGuard(FetchRules(**({"timeout_s": 2.0, "max_bytes": 1000, "ports": (443, 8443)} | rules)), resolve)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.com/a.png", "must start with https"),
        ("ftp://example.com/a.png", "must start with https"),
        ("file:///etc/passwd", "must start with https"),
        ("gopher://example.com", "must start with https"),
        ("//example.com/a.png", "must start with https"),
        ("https:///a.png", "has no host"),
        ("https://user:secret@example.com/", "user or password"),
        ("https://@example.com/", "user or password"),
        ("https://example.com\\@127.0.0.1/", "backslash"),
        ("https://example.com/a b", "space"),
        ("https://exa\nmple.com/", "control character"),
        ("https://example.com:22/", "port not allowed: 22; use one of 443, 8443"),
        ("https://example.com:0/", "port not allowed: 0"),
        ("https://example.com:99999/", "port not allowed: 99999"),
        ("https://2130706433/", "standard notation"),
        ("https://0x7f000001/", "standard notation"),
        ("https://0x7f.1/", "standard notation"),
        ("https://127.1/", "standard notation"),
        ("https://0177.0.0.1/", "the URL is invalid"),
        ("https://127%2e0.0.1/", "standard notation"),
        ("https://127.0.0.1/", "loopback"),
        ("https://127.0.0.1./", "loopback"),
        ("https://127。0。0。1/", "loopback"),
        ("https://0.0.0.0/", "unspecified"),
        ("https://169.254.169.254/latest/meta-data", "link-local"),
        ("https://[::1]/", "loopback"),
        ("https://[::ffff:127.0.0.1]/", "loopback"),
        ("https://[::ffff:7f00:1]/", "loopback"),
        ("https://[fe80::1%25eth0]/", "standard notation|link-local|is invalid"),
        ("https://redis.default.svc/", "name of a private network"),
        ("https://redis.default.svc.cluster.local./", "name of a private network"),
        ("https://Metadata.Google.Internal/", "name of a private network"),
        ("https://ⓛocalhost/", "the URL is invalid"),
        ("https://xn--a/", "the URL is invalid"),
        ("https://１２７.0.0.1/", "the URL is invalid"),
        ("https://exam_ple..com/", "standard notation|is invalid"),
        ("https://-/" + "a" * 3000, "characters"),
    ],
)
async def test_deceptive_url_is_refused(url: str, words: str) -> None:
    """Every notation of a forbidden address is refused before resolution."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        raise AssertionError(f"{host} was resolved")

    with pytest.raises(FetchRefused, match=words):
        await FetchGuard(FetchRules(timeout_s=2, max_bytes=1000, ports=(443, 8443)), resolve).resolve_url(url)


@pytest.mark.parametrize("addresses", [("127.0.0.1",), (PUBLIC, "10.0.0.1"), ("::1", PUBLIC), ("fe80::1%lo",)])
async def test_host_with_any_forbidden_address_is_refused(addresses: tuple[str, ...]) -> None:
    for url in ("https://localhost./", "https://half.example.com/"):
        with pytest.raises(FetchRefused, match=r"host not allowed: .* is"):
            await _guard(*addresses).resolve_url(url)


async def test_host_with_too_many_addresses_is_refused() -> None:
    with pytest.raises(FetchRefused, match="more than 16 addresses"):
        await _guard(*(f"93.184.216.{last}" for last in range(17))).resolve_url("https://example.com/")


async def test_public_host_is_resolved_to_checked_addresses() -> None:
    """The target keeps the name, without a trailing dot, for SNI and Host."""
    target = await _guard(PUBLIC, "2606:2800:220:1::1").resolve_url("https://Bücher.example.:8443/a?b#c")
    assert (target.host, target.port) == ("xn--bcher-kva.example", 8443)
    assert target.addresses == (PUBLIC, "2606:2800:220:1::1")


async def test_plain_http_needs_a_setting_and_allows_port_80() -> None:
    assert (await _guard(PUBLIC, allow_http=True).resolve_url("http://example.com/")).port == 80


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("label too long")])
async def test_resolver_errors_become_fetch_failures(error: Exception) -> None:

    async def resolve(host: str, port: int) -> Sequence[str]:
        raise error

    with pytest.raises(FetchFailed, match="cannot resolve"):
        await FetchGuard(FetchRules(timeout_s=2, max_bytes=1000), resolve).resolve_url("https://example.com/")


async def test_addresses_of_the_system_resolver_are_checked() -> None:
    """`localhost` is refused."""
    with pytest.raises(FetchRefused, match="loopback"):
        await FetchGuard(FetchRules(timeout_s=5, max_bytes=1000)).resolve_url("https://localhost/")


LOCAL_URLS = ["http://localhost:9000/hook", "http://127.0.0.1:9000/", "https://[::1]:9000/", "http://LOCALHOST/"]


@pytest.mark.parametrize("url", LOCAL_URLS)
def test_one_setting_opens_this_machine_for_webhooks_and_the_refusal_names_it(url: str) -> None:
    with pytest.raises(FetchRefused, match="is this machine; FUSEQUEUE_WEBHOOK_ALLOW_LOOPBACK=1 allows it"):
        FetchGuard(FetchRules.for_webhooks(Settings())).check_url(url)
    opened = Settings(webhook_allow_loopback=True)
    assert FetchGuard(FetchRules.for_webhooks(opened)).check_url(url).host in ("localhost", "127.0.0.1", "::1")
    with pytest.raises(FetchRefused):
        FetchGuard(FetchRules.for_inputs(opened)).check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://example.com:9000/",
        "http://10.0.0.1/",
        "https://169.254.169.254/",
        "ftp://[::1]/",
    ],
)
def test_an_open_machine_opens_no_other_host(url: str) -> None:
    with pytest.raises(FetchRefused):
        FetchGuard(FetchRules.for_webhooks(Settings(webhook_allow_loopback=True))).check_url(url)


def test_a_network_that_the_operator_refuses_stays_refused() -> None:
    refused = Settings(webhook_allow_loopback=True, refuse_networks=(ipaddress.ip_network("127.0.0.0/8"),))
    with pytest.raises(FetchRefused, match="operator refuses"):
        FetchGuard(FetchRules.for_webhooks(refused)).check_url("http://127.0.0.1:9000/")
