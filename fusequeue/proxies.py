"""Requests through the proxies of the environment: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, but for NO_PROXY.

Not httpx' own: it matches no networks, and raises for `fd00::/8` and `[::1]`, which other programs know.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias
from urllib.request import getproxies

import httpx

from fusequeue.errors import InvalidArgument

Network: TypeAlias = IPv4Network | IPv6Network

_ENTRY = re.compile(
    r"((?P<scheme>[a-z]+)://)?(?P<host>\[[0-9a-f:.]+\]|[0-9a-f]*:[0-9a-f:.]*:[0-9a-f:.]*|[^:/\[\]]+)"
    r"(/(?P<bits>[0-9]{1,3}))?(:(?P<port>[0-9]{1,5}))?/?",
    re.IGNORECASE,
)
_PORTS = {"http": 80, "https": 443}
_SCHEMES = ("http", "https", "socks5", "socks5h")


@dataclass(frozen=True)
class Exemption:
    """Entry of NO_PROXY: a network, or the end of a host name; with a scheme or a port only those."""

    network: Network | None
    name: str
    subdomains_only: bool = False
    scheme: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, entry: str) -> Exemption | None:
        """Return an entry, or None for one that names no host or network."""
        parts = _ENTRY.fullmatch(entry)
        if parts is None:
            return None
        host, bits = parts["host"].strip("[]"), parts["bits"]
        scheme = None if parts["scheme"] in (None, "all") else parts["scheme"].lower()
        port = None if parts["port"] is None else int(parts["port"])
        try:
            return cls(ip_network(host if bits is None else f"{host}/{bits}", strict=False), "", False, scheme, port)
        except ValueError:
            name = _ascii_name(host.removeprefix("*").removeprefix("."))
        if bits is not None or not name:
            return None
        return cls(None, name, host.startswith((".", "*.")), scheme, port)

    def covers(self, url: httpx.URL) -> bool:
        """Return whether requests to `url` use no proxy."""
        if self.scheme not in (None, url.scheme) or self.port not in (None, url.port or _PORTS.get(url.scheme)):
            return False
        host = url.raw_host.decode("ascii").lower().rstrip(".")
        if self.network is not None:
            address = _address(host)
            return address is not None and address in self.network
        return host.endswith(f".{self.name}") or (host == self.name and not self.subdomains_only)


@dataclass(frozen=True)
class Proxies:
    """The proxies of an environment, by scheme, `all` for the others, and what is exempt from them."""

    urls: dict[str, str]
    exemptions: tuple[Exemption, ...] = ()

    @classmethod
    def of_environment(cls) -> Proxies:
        """Read the variables, or what else the system has. Entries of NO_PROXY that name nothing are ignored."""
        found = getproxies()
        entries = [entry for entry in re.split(r"[,\s]+", found.get("no", "")) if entry]
        if "*" in entries:
            return cls({})
        exemptions = filter(None, map(Exemption.parse, entries))
        return cls({scheme: found[scheme] for scheme in ("http", "https", "all") if found.get(scheme)}, (*exemptions,))

    def scheme_for(self, url: httpx.URL) -> str | None:
        """Return the scheme whose proxy requests to `url` use, None for no proxy."""
        scheme = url.scheme if url.scheme in self.urls else "all"
        return scheme if scheme in self.urls and not any(one.covers(url) for one in self.exemptions) else None

    def proxy(self, scheme: str) -> httpx.Proxy:
        """Return the proxy of a scheme; raises `InvalidArgument`, without the URL, which can hold a password."""
        found = self.urls[scheme]
        try:
            url = httpx.URL(found if "://" in found else f"http://{found}")
        except httpx.InvalidURL:
            url = httpx.URL("")
        has_host = bool(url.host) and b"%" not in url.raw_host  # what no host can have, httpx escapes
        if url.scheme not in _SCHEMES or not has_host or not 0 < (url.port or 1) <= 65_535:
            raise _unusable(scheme, "is not the URL of a proxy; use one such as http://proxy.example:3128, or unset it")
        return httpx.Proxy(url)


class ProxyTransport(httpx.AsyncBaseTransport):
    """Sends each request through the proxy for its URL, if there is one. Each proxy is opened when it is needed."""

    def __init__(self, proxies: Proxies, limits: httpx.Limits) -> None:
        self._proxies = proxies
        self._limits = limits
        self._transports: dict[str | None, httpx.AsyncHTTPTransport] = {}

    def open(self, url: httpx.URL) -> httpx.AsyncHTTPTransport:
        """Return the transport for `url`; raises `InvalidArgument` for a proxy that cannot be used."""
        scheme = self._proxies.scheme_for(url)
        if scheme not in self._transports:
            proxy = None if scheme is None else self._proxies.proxy(scheme)
            try:
                self._transports[scheme] = httpx.AsyncHTTPTransport(limits=self._limits, proxy=proxy)
            except ImportError as error:
                reason = "is a SOCKS proxy, which needs a package: pip install 'httpx[socks]'"
                raise _unusable(scheme, reason) from error
        return self._transports[scheme]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.open(request.url).handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()


def _unusable(scheme: str | None, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{(scheme or 'all').upper()}_PROXY in the environment {reason}")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _ascii_name(name: str) -> str:
    """Return a host name as URLs have it; "" for what cannot be one."""
    try:
        return httpx.URL(f"http://{name}").raw_host.decode("ascii").lower().rstrip(".")
    except httpx.InvalidURL:
        return ""
