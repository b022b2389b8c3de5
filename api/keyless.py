"""Requests without an API key, which the API serves only to this machine while it requires none.

Three kinds of strangers can look like this machine: a page of another site in a local browser, as forms need no
CORS; a name that its owner points at 127.0.0.1 (DNS rebinding); and a client of a proxy that runs here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from shared.config.settings import Settings
from shared.errors import HostRefused, OriginRefused

READ_METHODS = frozenset(("GET", "HEAD"))
CREATE_KEY = "create a key with `fusequeue keys create`"

_HOST = re.compile(r"([a-z0-9_]([a-z0-9_.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)
_FORWARDED = re.compile(
    r"forwarded|x-forwarded(-.+)?|x-original-.+|via|cdn-loop|x-real-ip|x-(client|cluster-client|proxyuser)-ip"
    r"|(true-client|fastly-client|do-connecting)-ip|(cf|fly|x-amzn|x-azure|x-envoy)-(?!trace-id$).+"
)
_OWN_SITES = ("same-origin", "none")  # none: a person typed the address


def check_keyless(scope: Scope, settings: Settings) -> None:
    """Raise `HostRefused` or `OriginRefused` for a request without a key that is not of this machine."""
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if settings.auth != "insecure-no-keys":
        _check_host(hosts, settings)
        _check_peer(scope, headers)
    elif scope["method"] in READ_METHODS:  # a page cannot read the response, and may show the image
        return
    _check_page(headers, hosts, settings)


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address; other names can resolve to any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_of(values: Sequence[str]) -> str | None:
    """Return the host in a request's `Host` headers, without the port; None unless there is one, and it is valid.

    A parsed URL would not do: of `evil@localhost` it keeps the second part, and of an invalid host the server's own.
    """
    return valid_host(values[0]) if len(values) == 1 else None


@lru_cache(maxsize=1024)
def valid_host(value: str) -> str | None:
    """Return the host in the value of a `Host` header, in lower case and without the port; None if it is invalid."""
    return re.sub(r":[0-9]+$", "", value.lower()) if _HOST.fullmatch(value) else None


def origin_of(url: str) -> str:
    """Return the origin of an http(s) URL as browsers write it, without a default port."""
    parts = urlsplit(url.lower())
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.netloc.removesuffix(f':{default}')}"


def _check_host(hosts: Sequence[str], settings: Settings) -> None:
    host = host_of(hosts)
    if host is not None and is_loopback(host):
        return
    if host is not None and settings.public_url is not None and host == urlsplit(settings.public_url).hostname:
        return
    named = repr(" ".join(hosts)[:100]) if hosts else "no host"
    raise HostRefused(
        f"without API keys only localhost is served, not {named}; {CREATE_KEY}, or set FUSEQUEUE_PUBLIC_URL to the "
        "URL that programs on this machine use",
        param="Host",
    )


def _check_peer(scope: Scope, headers: Headers) -> None:
    """Raise `HostRefused` for a request that has come from another machine, as far as one can see.

    A proxy on this machine has a loopback address; its clients have not. HTTP/1.0 is what nginx sends by default.
    """
    forwarded = next((name for name in headers if _is_forwarded(name)), None)
    if forwarded is None and scope.get("http_version") == "1.0":
        forwarded = "HTTP/1.0"
    if forwarded is not None:
        raise HostRefused(
            f"without API keys no request through a proxy is served ({forwarded[:40]}); {CREATE_KEY}", param=forwarded
        )
    peer = scope.get("client")
    if peer is None or not is_loopback(peer[0]):
        raise HostRefused(f"without API keys only this machine is served; {CREATE_KEY}")


@lru_cache(maxsize=256)
def _is_forwarded(header: str) -> bool:
    return _FORWARDED.fullmatch(header) is not None


def _check_page(headers: Headers, hosts: Sequence[str], settings: Settings) -> None:
    """Raise `OriginRefused` for a request that a page of another origin has made in a browser.

    Browsers name the origin of every request other than a plain GET, and new ones the relation of the sites of all.
    """
    origins, sites = headers.getlist("origin"), headers.getlist("sec-fetch-site")
    if not origins and not sites:
        return
    own = {f"{scheme}://{host.lower()}" for scheme in ("http", "https") for host in hosts}
    listed = own | set(settings.cors_origins) | ({origin_of(settings.public_url)} if settings.public_url else set())
    if origins:
        refused = len(origins) > 1 or origins[0].lower() not in listed
    else:
        refused = any(site not in _OWN_SITES for site in sites)
    if refused:
        page = f"the page {origins[0][:100]!r}" if origins else "a page of another site"
        raise OriginRefused(
            f"without API keys {page} cannot call this API; list its origin in FUSEQUEUE_CORS_ORIGINS, or {CREATE_KEY}",
            param="Origin" if origins else "Sec-Fetch-Site",
        )
