"""What a request may look like and how long it may take to arrive: decisions without I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property

_DIGITS = frozenset(b"0123456789")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class ConnectionPhase(Enum):
    """What a connection waits for."""

    IDLE = auto()  # the first byte of a request
    HEAD = auto()
    BODY = auto()
    RESPONSE = auto()  # this process, or the client that reads
    CLOSING = auto()


@dataclass(frozen=True)
class ArrivalLimits:
    """Times of one connection, in seconds."""

    idle_s: float = 15
    proxy_idle_s: float = 620
    """`idle_s` for trusted proxies."""
    head_s: float = 15
    body_s: float = 60
    """For the body, beside the time that it takes at `body_bytes_per_s`."""
    body_bytes_per_s: float = 256
    request_s: float = 3600
    unread_s: float = 30
    """In which a client reads `MIN_READ_BYTES`, or all there are."""
    linger_s: float = 10
    """After a response before the end of the request: a reset during it would take the response from the client."""
    check_every_s: float = 2.5

    @cached_property
    def of_proxies(self) -> ArrivalLimits:
        """The limits of a trusted proxy's connection."""
        return replace(self, idle_s=self.proxy_idle_s)


def overdue(phase: ConnectionPhase, elapsed_s: float, body_bytes: int, limits: ArrivalLimits) -> bool:
    """Return whether a connection has waited too long; `elapsed_s` counts from the beginning of its phase."""
    if phase is ConnectionPhase.IDLE:
        return elapsed_s > limits.idle_s
    if phase is ConnectionPhase.HEAD:
        return elapsed_s > limits.head_s
    if phase is ConnectionPhase.BODY:
        return elapsed_s > min(limits.request_s, limits.body_s + body_bytes / limits.body_bytes_per_s)
    return False


def head_fault(method: str, version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return what is wrong with a request's head, where llhttp accepts it; None for a valid one.

    A proxy before this server could take a request with two lengths for two requests, or the reverse.
    """
    if version not in ("1.0", "1.1"):
        return f"the HTTP version is {version}; send HTTP/1.1"
    if method == "CONNECT":
        return "CONNECT is not supported"
    hosts, lengths, encodings = (
        [value for name, value in headers if name == wanted]
        for wanted in (b"host", b"content-length", b"transfer-encoding")
    )
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return "send exactly one Host header"
    if len(lengths) + len(encodings) > 1:
        return "send one Content-Length, or Transfer-Encoding: chunked"
    if encodings and (encodings[0].lower() != b"chunked" or version == "1.0"):
        return "the only supported Transfer-Encoding is chunked"
    if lengths and not (lengths[0] and _DIGITS.issuperset(lengths[0])):
        return "Content-Length must be a number"
    return _target_fault(target, hosts[0] if hosts else b"")


def _target_fault(target: bytes, host: bytes) -> str | None:
    """Return what is wrong with a request's target: an absolute one names the same host as the header."""
    if target[:1] == b"/" or target == b"*":
        return None
    absolute = _ABSOLUTE.match(target)
    if absolute is None or absolute[1].lower() != host.lower():
        return "the request target must be a path, or a URL with the host of the header"
    return None
