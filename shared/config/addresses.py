"""Settings that hold a URL, a host or networks: what each may be, and what an error says to do."""

import re
from ipaddress import ip_network
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

_HOST = re.compile(r"[A-Za-z0-9.:%_-]{1,253}")


def _port_is_valid(url: str) -> bool:
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def redis_url(url: str) -> str:
    """Return `url`, or raise `ValueError`. The message does not repeat the URL: it can hold a password."""
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("a URL must begin with redis://, rediss:// or unix://")
    if not _port_is_valid(url):
        raise ValueError("the URL's port must be a number from 1 to 65535")
    return url


def http_url(url: str) -> str:
    """Return `url`, or raise `ValueError`: it is the base of other URLs, so it has no query. It can hold a password."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError("a URL has no spaces, line breaks or other than ASCII characters; a host's form is xn--...")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL must begin with http:// or https:// and a host")
    if not _port_is_valid(url):
        raise ValueError("the URL's port must be a number from 1 to 65535")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("the URL must end before ? and #")
    return url


def host(name: str) -> str:
    """Return the address or name of a host, or raise `ValueError`."""
    if _HOST.fullmatch(name) is None:
        raise ValueError("an address or host name, without scheme, port or spaces")
    return name


def proxies(entries: str) -> str:
    """Return the networks of a comma-separated list, or `*`; raise `ValueError` for names, which nobody looks up."""
    listed = [entry.strip() for entry in entries.split(",") if entry.strip()]
    return "*" if "*" in listed else ",".join(map(_network, listed))


def _network(entry: str) -> str:
    """Return a network without the bits of its hosts, which the server would compare as text, or an address."""
    try:
        network = ip_network(entry, strict=False)
    except ValueError:
        raise ValueError(f"{entry[:80]!r} is no IP address or network; names are not looked up") from None
    return str(network) if "/" in entry else str(network.network_address)


RedisUrl = Annotated[str, AfterValidator(redis_url)]
HttpUrl = Annotated[str, AfterValidator(http_url)]
Host = Annotated[str, AfterValidator(host)]
Proxies = Annotated[str, AfterValidator(proxies)]
