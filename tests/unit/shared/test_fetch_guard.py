"""Which addresses and URLs may be called: the table of the guard's decisions, and the ways around it that fail."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import pytest

from shared.errors import FetchFailed, FetchRefused
from shared.inputs.fetch_guard import FetchGuard, FetchRules, refusal

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
        ("localhost", "no address"),
        ("", "no address"),
    ],
)
def test_refusal(address: str, word: str | None) -> None:
    """Public unicast may be called; everything else is refused with a word that fits it."""
    why = refusal(address)
    assert (why is None) == (word is None)
    assert word is None or word in str(why)


@pytest.mark.parametrize(
    ("address", "open_"),
    [("10.9.9.9", True), ("::ffff:10.9.9.9", True), ("192.168.0.1", False), ("11.0.0.1", True), ("127.0.0.1", False)],
)
def test_an_operators_network_is_open_and_no_other(address: str, open_: bool) -> None:
    """The allow-list opens its own networks, in whatever form an address of theirs comes."""
    assert (refusal(address, PRIVATE_LAN) is None) is open_


def _guard(*addresses: str, **rules: object) -> FetchGuard:
    async def resolve(host: str, port: int) -> Sequence[str]:
        return addresses

    return FetchGuard(FetchRules(**({"timeout_s": 2.0, "max_bytes": 1000, "ports": (443, 8443)} | rules)), resolve)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.com/a.png", "must begin with https"),
        ("ftp://example.com/a.png", "must begin with https"),
        ("file:///etc/passwd", "must begin with https"),
        ("gopher://example.com", "must begin with https"),
        ("//example.com/a.png", "must begin with https"),
        ("https:///a.png", "names no host"),
        ("https://user:secret@example.com/", "user or password"),
        ("https://@example.com/", "user or password"),
        ("https://example.com\\@127.0.0.1/", "backslash"),
        ("https://example.com/a b", "space"),
        ("https://exa\nmple.com/", "control character"),
        ("https://example.com:22/", "port 22 may not be called; allowed: 443, 8443"),
        ("https://example.com:0/", "port 0"),
        ("https://example.com:99999/", "port 99999"),
        ("https://2130706433/", "usual form"),
        ("https://0x7f000001/", "usual form"),
        ("https://0x7f.1/", "usual form"),
        ("https://127.1/", "usual form"),
        ("https://0177.0.0.1/", "cannot be read"),
        ("https://127%2e0.0.1/", "usual form"),
        ("https://127.0.0.1/", "loopback"),
        ("https://127.0.0.1./", "loopback"),
        ("https://127。0。0。1/", "loopback"),
        ("https://0.0.0.0/", "unspecified"),
        ("https://169.254.169.254/latest/meta-data", "link-local"),
        ("https://[::1]/", "loopback"),
        ("https://[::ffff:127.0.0.1]/", "loopback"),
        ("https://[::ffff:7f00:1]/", "loopback"),
        ("https://[fe80::1%25eth0]/", "usual form|link-local|cannot be read"),
        ("https://ⓛocalhost/", "cannot be read"),
        ("https://１２７.0.0.1/", "cannot be read"),
        ("https://exam_ple..com/", "usual form|cannot be read"),
        ("https://-/" + "a" * 3000, "characters"),
    ],
)
async def test_a_url_that_is_not_what_it_seems_is_refused(url: str, words: str) -> None:
    """Every spelling of a forbidden place is refused before anything is resolved."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        raise AssertionError(f"{host} was resolved")

    with pytest.raises(FetchRefused, match=words):
        await FetchGuard(FetchRules(timeout_s=2, max_bytes=1000, ports=(443, 8443)), resolve).vet(url)


@pytest.mark.parametrize("addresses", [("127.0.0.1",), (PUBLIC, "10.0.0.1"), ("::1", PUBLIC), ("fe80::1%lo",)])
async def test_a_name_with_any_forbidden_address_is_refused(addresses: tuple[str, ...]) -> None:
    """One public address does not wash a private one: `localhost.` and a half-private name are the same."""
    for url in ("https://localhost./", "https://half.example.com/"):
        with pytest.raises(FetchRefused, match="may not be called: it is"):
            await _guard(*addresses).vet(url)


async def test_a_name_of_countless_addresses_is_refused() -> None:
    """Judging is bounded."""
    with pytest.raises(FetchRefused, match="more than 16 addresses"):
        await _guard(*(f"93.184.216.{last}" for last in range(17))).vet("https://example.com/")


async def test_a_public_name_is_vetted_with_its_addresses() -> None:
    """The target keeps the name for SNI and Host, its closing dot dropped, and the addresses that were judged."""
    target = await _guard(PUBLIC, "2606:2800:220:1::1").vet("https://Bücher.example.:8443/a?b#c")
    assert (target.host, target.port) == ("xn--bcher-kva.example", 8443)
    assert target.addresses == (PUBLIC, "2606:2800:220:1::1")


async def test_http_is_an_operators_choice_and_brings_port_80() -> None:
    """Plain http is off unless it is asked for."""
    assert (await _guard(PUBLIC, allow_http=True).vet("http://example.com/")).port == 80


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("label too long")])
async def test_a_name_that_does_not_resolve_is_a_failure(error: Exception) -> None:
    """What the resolver raises is told as one thing."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        raise error

    with pytest.raises(FetchFailed, match="cannot be resolved"):
        await FetchGuard(FetchRules(timeout_s=2, max_bytes=1000), resolve).vet("https://example.com/")


async def test_the_systems_resolver_is_judged_alike() -> None:
    """`localhost` resolves without our help, and is refused all the same."""
    with pytest.raises(FetchRefused, match="loopback"):
        await FetchGuard(FetchRules(timeout_s=5, max_bytes=1000)).vet("https://localhost/")
