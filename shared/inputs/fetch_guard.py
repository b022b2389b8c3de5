"""Requests to addresses that clients name: the guard against being sent into our own network.

A URL is parsed once, its name is resolved once, every address it resolves to is judged, and the connection goes to
an address that was judged; so a name that resolves differently a moment later changes nothing. Redirects are not
followed and the environment's proxies are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial

import httpx

from shared.config.settings import Settings
from shared.errors import FetchFailed, FetchRefused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_URL_CHARS = 2048
_MAX_ADDRESSES = 16  # judged; more is no ordinary name
_TRIED_ADDRESSES = 2  # connected to, one after the other
_CONNECT_S = 5.0
_RESOLVE_S = 5.0
# Threads of their own: a name server that keeps silent holds one far beyond our timeout.
_resolvers = ThreadPoolExecutor(8, "resolve")
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_]([a-z0-9_-]{0,62}))*")
_NUMERIC_END = re.compile(r"(^|\.)(0x[0-9a-f]*|[0-9]+)$")

# IANA's special-purpose registries: addresses that no public server has, with the word told to the client.
_REFUSED_V4 = [
    (ipaddress.ip_network(cidr), word)
    for cidr, word in (
        ("0.0.0.0/8", "an unspecified address"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "a carrier's private address"),
        ("127.0.0.0/8", "a loopback address"),
        ("168.63.129.16/32", "a cloud's metadata address"),  # Azure's, which is no reserved range
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.0.2.0/24", "a reserved address"),
        ("192.88.99.0/24", "a reserved address"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "a reserved address"),
        ("198.51.100.0/24", "a reserved address"),
        ("203.0.113.0/24", "a reserved address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
]
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_REFUSED_V6 = [
    (ipaddress.ip_network(cidr), word)
    for cidr, word in (
        ("::/128", "an unspecified address"),
        ("::1/128", "a loopback address"),
        ("64:ff9b:1::/48", "a private address"),
        ("2001::/23", "a reserved address"),  # Teredo and other experiments
        ("2001:db8::/32", "a reserved address"),
        ("3fff::/20", "a reserved address"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a private address"),
        ("ff00::/8", "a multicast address"),
    )
]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def refusal(address: str, allowed: Sequence[Network] = ()) -> str | None:
    """Return why no connection may be made to `address`, None if one may.

    `allowed` are the networks that an operator opens. An IPv4 address that travels inside an IPv6 one (mapped,
    6to4, NAT64) is judged as itself too.
    """
    try:
        parsed: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "no address"
    if any(parsed in network for network in allowed):
        return None
    if isinstance(parsed, ipaddress.IPv4Address):
        return next((word for network, word in _REFUSED_V4 if parsed in network), None)
    inner = _embedded(parsed)
    if inner is not None:
        return refusal(str(inner), allowed)
    word = next((word for network, word in _REFUSED_V6 if parsed in network), None)
    return word or (None if parsed in _GLOBAL_V6 else "a reserved address")


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


@dataclass(frozen=True)
class FetchRules:
    """What may be fetched: `timeout_s` bounds everything from the name's resolution to the last byte."""

    timeout_s: float
    max_bytes: int
    ports: tuple[int, ...] = (443,)
    allow_http: bool = False
    networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> FetchRules:
        """Return the rules for input images."""
        return cls(
            timeout_s=settings.fetch_timeout_s,
            max_bytes=settings.max_input_bytes,
            ports=settings.fetch_ports,
            allow_http=settings.fetch_allow_http,
            networks=settings.fetch_allow_networks,
        )

    @classmethod
    def for_webhooks(cls, settings: Settings) -> FetchRules:
        """Return the rules for what is told of events; of an answer, no more than its beginning matters."""
        return cls(
            timeout_s=settings.webhook_timeout_s,
            max_bytes=64 * 1024,
            ports=settings.webhook_ports,
            allow_http=settings.webhook_allow_http,
            networks=settings.webhook_allow_networks,
        )


@dataclass(frozen=True)
class FetchTarget:
    """A URL that may be called, and the addresses, all judged, at which it may be."""

    url: httpx.URL
    host: str
    port: int
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class FetchResponse:
    """An answer: `body` is whole, or None where it was longer than the rules allow."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None


async def system_resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of `host`, in the order in which the system would try them."""
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers, lookup)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@cache
def _system_tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@dataclass(frozen=True)
class FetchGuard:
    """Calls URLs under `rules`; `resolve` and `tls` are there for servers with names and authorities of their own."""

    rules: FetchRules
    resolve: Resolve = system_resolve
    tls: ssl.SSLContext = field(default_factory=_system_tls)

    async def vet(self, url: str) -> FetchTarget:
        """Return where `url` may be called, or raise `FetchRefused`; resolves its name once."""
        parsed = self._parse(url)
        host, port = _where(parsed)
        self._check_port(port)
        literal = _literal(host)
        addresses = (literal,) if literal else await self._addresses(host, port)
        for address in addresses:
            self._check_address(host, address)
        return FetchTarget(parsed, host, port, addresses[:_TRIED_ADDRESSES])

    def consider(self, url: str) -> None:
        """Raise `FetchRefused` for a URL that would not be called whatever its name resolves to; resolves nothing."""
        parsed = self._parse(url)
        host, port = _where(parsed)
        self._check_port(port)
        literal = _literal(host)
        if literal:
            self._check_address(host, literal)

    async def get(self, url: str) -> bytes:
        """Return what `url` holds, or raise `FetchRefused` or `FetchFailed`."""
        reply = await self.send("GET", url, headers={"accept": "image/png, image/jpeg, image/webp"})
        if reply.status in (301, 302, 303, 307, 308):
            raise FetchFailed("the URL redirects; give the address it leads to")
        if reply.status != 200:
            raise FetchFailed(f"the URL answers {reply.status}")
        if reply.body is None:
            raise FetchFailed(f"the URL holds more than {self.rules.max_bytes} bytes")
        return reply.body

    async def send(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, content: bytes | None = None
    ) -> FetchResponse:
        """Make one request, following no redirect, and return the answer whatever its status."""
        try:
            async with asyncio.timeout(self.rules.timeout_s):
                target = await self.vet(url)
                return await self._call(target, method, headers or {}, content)
        except TimeoutError as error:
            raise FetchFailed(f"the URL did not answer in full within {self.rules.timeout_s:g} s") from error

    def _check_port(self, port: int) -> None:
        if port not in self.rules.ports and not (port == 80 and self.rules.allow_http):
            raise FetchRefused(f"port {port} may not be called; allowed: {_listed(self.rules.ports)}")

    def _check_address(self, host: str, address: str) -> None:
        why = refusal(address, self.rules.networks)
        if why is not None:
            raise FetchRefused(f"{host} may not be called: it is {why}")

    def _parse(self, url: str) -> httpx.URL:
        if len(url) > MAX_URL_CHARS:
            raise FetchRefused(f"the URL has more than {MAX_URL_CHARS} characters")
        if any(character <= " " or character in "\\\x7f" for character in url):
            raise FetchRefused("the URL has a space, a backslash or a control character")
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise FetchRefused("the URL cannot be read") from error
        if parsed.scheme != "https" and not (parsed.scheme == "http" and self.rules.allow_http):
            raise FetchRefused("the URL must begin with https://")
        if parsed.userinfo or "@" in re.split("[/?#]", url.partition("//")[2])[0]:
            raise FetchRefused("the URL must not hold a user or password")
        if not parsed.host:
            raise FetchRefused("the URL names no host")
        return parsed

    async def _addresses(self, host: str, port: int) -> tuple[str, ...]:
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = tuple(await self.resolve(host, port))
        except (OSError, UnicodeError, TimeoutError) as error:
            raise FetchFailed(f"{host} cannot be resolved") from error
        if not found:
            raise FetchFailed(f"{host} cannot be resolved")
        if len(found) > _MAX_ADDRESSES:
            raise FetchRefused(f"{host} has more than {_MAX_ADDRESSES} addresses")
        return found

    async def _call(
        self, target: FetchTarget, method: str, headers: Mapping[str, str], content: bytes | None
    ) -> FetchResponse:
        for last, address in enumerate(target.addresses, start=1):
            try:
                return await self._call_at(address, target, method, dict(headers), content)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last == len(target.addresses):
                    raise FetchFailed(f"{target.host} cannot be reached") from error
            except httpx.HTTPError as error:
                raise FetchFailed(f"{target.host} broke off: {type(error).__name__}") from error
        raise FetchFailed(f"{target.host} cannot be reached")

    async def _call_at(
        self, address: str, target: FetchTarget, method: str, headers: dict[str, str], content: bytes | None
    ) -> FetchResponse:
        # A client of its own: a pooled connection would be found by its address and serve another name's request.
        headers |= {"host": target.url.netloc.decode("ascii"), "accept-encoding": "identity"}
        async with (
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(verify=self.tls, trust_env=False, retries=0),
                timeout=httpx.Timeout(self.rules.timeout_s, connect=min(_CONNECT_S, self.rules.timeout_s)),
                follow_redirects=False,
                trust_env=False,
            ) as client,
            client.stream(
                method,
                target.url.copy_with(host=address),
                headers=headers,
                content=content,
                extensions={"sni_hostname": target.host},
            ) as answer,
        ):
            return FetchResponse(answer.status_code, answer.headers, await self._read(answer))

    async def _read(self, answer: httpx.Response) -> bytes | None:
        declared = answer.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.rules.max_bytes:
            return None
        body = bytearray()
        async for piece in answer.aiter_raw():  # raw: what a server compresses unasked is not unpacked
            body += piece
            if len(body) > self.rules.max_bytes:
                return None
        return bytes(body)


def _where(url: httpx.URL) -> tuple[str, int]:
    port = (443 if url.scheme == "https" else 80) if url.port is None else url.port
    return url.raw_host.decode("ascii").lower().removesuffix("."), port


def _literal(host: str) -> str | None:
    """Return the address that `host` spells, None for a name; an unusual spelling of an address is refused."""
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if _NUMERIC_END.search(host) or not _HOST.fullmatch(host):
        raise FetchRefused("the URL's host is neither a name nor an address in its usual form")
    return None


def _listed(ports: tuple[int, ...]) -> str:
    return ", ".join(map(str, sorted(ports)))
