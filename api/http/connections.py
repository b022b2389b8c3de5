"""Connections of an API process: how many there are in all and per client address, and which one makes room."""

from __future__ import annotations

import ipaddress
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from api.keyless import is_loopback
from shared.runtime import metrics

MAX_WAITERS = 10_000
WANTED_FILES = 15_600
MOST_RESERVED_FILES = 4_100  # for Redis, storage, uploads, and connections that are accepted before they are refused


@dataclass(frozen=True)
class Capacity:
    """What a process can hold: connections, those of them that wait for events, how many it accepts at once, and large
    responses, each with an open file."""

    connections: int
    waiters: int
    accepted_at_once: int
    downloads: int


def capacity(files: int, max_connections: int | None = None) -> Capacity:
    """Return what a process that can open `files` holds.

    asyncio accepts three times before the first of these connections has made room for itself by closing another.
    """
    reserved = min(MOST_RESERVED_FILES, max(1, files // 3))
    connections = max(1, min(files - reserved, max_connections or files))
    waiters = min(MAX_WAITERS, connections - connections // 8)
    return Capacity(connections, waiters, max(1, reserved // 8), max(2, reserved // 4))


def open_files() -> int:
    """Return how many files this process can open, after raising its soft limit to what the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft


class Evictable(Protocol):
    """A connection that can be closed while it has no request."""

    def evict(self) -> None:
        """Close the connection at once."""
        ...


@dataclass
class _Address:
    """The connections of one client address; `idle` in the order in which they became idle."""

    key: str
    count: int = 0
    idle: dict[Place, None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Place:
    """A connection's place among those of its process. It is idle before its first request and between two."""

    _connections: Connections
    _address: _Address
    _connection: Evictable
    _left: bool = False

    def idle(self) -> None:
        """Note that the connection has no request, or only a part of its head: it can be closed for another one."""
        self.busy()
        if not self._left:
            self._address.idle[self] = None
            self._connections.idle += 1

    def busy(self) -> None:
        """Note that the connection has a request."""
        if self in self._address.idle:
            del self._address.idle[self]
            self._connections.idle -= 1

    def leave(self) -> None:
        """Free the place; a second call does nothing."""
        if not self._left:
            self.busy()
            self._left = True
            self._connections.remove(self._address)

    def evict(self) -> None:
        """Close the connection and free its place."""
        metrics.http_connections_closed.labels("evicted").inc()
        self.leave()
        self._connection.evict()


class Connections:
    """The places of a process. An idle connection is closed where another one needs its place."""

    def __init__(self, limit: int, per_address: int | None, is_proxy: Callable[[str], bool]) -> None:
        self.limit = limit
        self.count = 0
        self.idle = 0
        self._per_address = per_address
        self.is_proxy = is_proxy
        self._addresses: dict[str, _Address] = {}

    def admit(self, connection: Evictable, host: str) -> Place | str:
        """Return a place, or why there is none."""
        key = address_key(host)
        address = self._addresses.get(key) or _Address(key)
        if not self._has_share(address, host) and not _evict_oldest(address):
            metrics.http_connections_closed.labels("address_limit").inc()
            return f"{address.count} connections from this address are open, its share of {self.limit}; close some"
        if self.count >= self.limit and not _evict_oldest(self._fullest()):
            metrics.http_connections_closed.labels("process_limit").inc()
            return f"{self.limit} connections are open at this process, each with a request; try again later"
        self._addresses[key] = address
        address.count += 1
        self.count += 1
        metrics.http_connections.set(self.count)
        place = Place(self, address, connection)
        place.idle()
        return place

    def remove(self, address: _Address) -> None:
        """Count one connection of `address` less."""
        self.count -= 1
        metrics.http_connections.set(self.count)
        address.count -= 1
        if not address.count:
            self._addresses.pop(address.key, None)

    def _has_share(self, address: _Address, host: str) -> bool:
        """Return whether one more connection fits into the share of an address.

        It is the configured number, else as many as have no request; then processes of this machine have no limit.
        """
        if self.is_proxy(host):
            return True
        if self._per_address is not None:
            return address.count < self._per_address
        return is_loopback(address.key) or address.count < max(1, self.limit - self.count + self.idle)

    def _fullest(self) -> _Address | None:
        """Return the address with the most connections among those with an idle one."""
        return max((each for each in self._addresses.values() if each.idle), key=lambda each: each.count, default=None)


def _evict_oldest(address: _Address | None) -> bool:
    """Close the connection of an address that has been idle for the longest time; False if none is."""
    if address is None or not address.idle:
        return False
    next(iter(address.idle)).evict()
    return True


def address_key(host: str) -> str:
    """Return what counts as one client address: an IPv6 network of 64 bits is assigned to one client."""
    address = ipaddress.ip_address(host.partition("%")[0] or "127.0.0.1")  # a Unix socket has none
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address) if address.is_loopback else str(ipaddress.ip_network((address, 64), strict=False))
