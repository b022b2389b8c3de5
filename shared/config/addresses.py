"""Settings that hold a URL, a host, networks or a name: what each may be, and what an error says to do."""

import re
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, SecretStr

_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_URL = re.compile(r"[A-Za-z0-9._~:/\[\]@!$&'()*+,;=%?#-]+")
_WORD = re.compile(r"[!-~]+")


def _host_is_valid(name: str) -> bool:
    """Return whether a host is an address, without brackets, or a name as DNS has it."""
    try:
        if ":" in name:
            ip_address(name)
        elif name.strip("0123456789.") == "":
            IPv4Address(name)
        else:
            return _NAME.fullmatch(name) is not None
    except ValueError:
        return False
    return True


def _port_is_valid(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _split(url: str) -> SplitResult:
    """Return the parts of a URL, or raise `ValueError`. No message repeats the URL: it can hold a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("the URL's host is invalid; write an IPv6 address in brackets") from None
    if not _port_is_valid(parts):
        raise ValueError("the URL's port must be a number from 1 to 65535")
    if parts.hostname and not _host_is_valid(parts.hostname):
        raise ValueError("the URL's host must be an address or a name in ASCII, for others xn--...")
    return parts


def redis_url(url: str) -> str:
    """Return `url`, or raise `ValueError`."""
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("a URL must begin with redis://, rediss:// or unix://")
    if not url.isprintable() or " " in url:
        raise ValueError("a URL has no spaces or line breaks")
    parts = _split(url)
    if parts.scheme == "unix" and not parts.path:
        raise ValueError("unix:// needs the path of a socket")
    if parts.scheme != "unix" and re.fullmatch(r"(/[0-9]*)?", parts.path) is None:
        raise ValueError("the database after the host must be a number; in a password write / as %2F")
    return url


def http_url(url: str) -> str:
    """Return `url`, or raise `ValueError`: it is the base of other URLs, so it has no query."""
    if _URL.fullmatch(url) is None:
        raise ValueError("a URL has no spaces, line breaks or other than ASCII characters; a host's form is xn--...")
    parts = _split(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("a URL must begin with http:// or https:// and a host")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError("the URL must end before ? and #")
    return url


def origin(url: str) -> str:
    """Return an origin as browsers send it, or raise `ValueError`."""
    parts = urlsplit(http_url(url))
    if url != url.lower() or url != f"{parts.scheme}://{parts.netloc}" or "@" in url or url.endswith(":"):
        raise ValueError(f"{url[:80]!r} must be as browsers send it, such as https://shop.example:8443")
    return url


def host(name: str) -> str:
    """Return the address or name of a host, or raise `ValueError`."""
    if not _host_is_valid(name):
        raise ValueError("an address or host name, without scheme, port, brackets or spaces")
    return name


def host_pattern(text: str) -> str:
    """Return the name of a host, or `*.` and a name for all below it, in lower case, or raise `ValueError`."""
    if not _host_is_valid(text.removeprefix("*.")):
        raise ValueError("a host name, or *.name for all names below it, without scheme, port or spaces")
    return text.lower()


def word(text: str) -> str:
    """Return a name or key, or raise `ValueError`: files of secrets often end in a line break."""
    if _WORD.fullmatch(text) is None:
        raise ValueError("it has a space, a line break or other than ASCII characters; remove them")
    return text


def secret_word(secret: SecretStr) -> SecretStr:
    """Return a secret, or raise `ValueError`."""
    text = secret.get_secret_value()
    if text != text.strip() or not text.isprintable():
        raise ValueError("it begins or ends with a space, or has a line break; remove it")
    return secret


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
Origin = Annotated[str, AfterValidator(origin)]
Host = Annotated[str, AfterValidator(host)]
HostPattern = Annotated[str, AfterValidator(host_pattern)]
Word = Annotated[str, AfterValidator(word)]
SecretWord = Annotated[SecretStr, AfterValidator(secret_word)]
Proxies = Annotated[str, AfterValidator(proxies)]
