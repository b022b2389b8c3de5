"""How many connections an API process holds, and which one makes room."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from api.http.connections import Capacity, Connections, Place, address_key, capacity
from api.http.request_limits import ArrivalLimits, ConnectionPhase, overdue


@dataclass(eq=False)
class FakeConnection:
    """A connection that notes whether it has been closed."""

    name: str = ""
    closed: bool = False

    def evict(self) -> None:
        self.closed = True


@dataclass
class Visitors:
    """Connections of several addresses to one process."""

    places: Connections
    made: list[FakeConnection] = field(default_factory=list)

    def connect(self, host: str, *, busy: bool = False) -> tuple[FakeConnection, Place]:
        connection = FakeConnection(f"{host} {len(self.made)}")
        place = self.places.admit(connection, host)
        assert isinstance(place, Place), place
        self.made.append(connection)
        if busy:
            place.busy()
        return connection, place

    def refused(self, host: str) -> str:
        reason = self.places.admit(FakeConnection(), host)
        assert isinstance(reason, str), "it was admitted"
        return reason

    @property
    def closed(self) -> list[str]:
        return [connection.name for connection in self.made if connection.closed]


def visitors(limit: int, per_address: int | None = None, proxies: tuple[str, ...] = ()) -> Visitors:
    return Visitors(Connections(limit, per_address, proxies.__contains__))


def test_the_connection_that_was_idle_for_longest_makes_room() -> None:
    here = visitors(3)
    for _ in range(3):
        here.connect("10.0.0.1")
    here.connect("10.0.0.1")
    assert here.closed == ["10.0.0.1 0"]
    assert (here.places.count, here.places.idle) == (3, 3)


def test_a_connection_that_was_used_is_the_last_to_make_room() -> None:
    here = visitors(2)
    _, first = here.connect("10.0.0.1")
    here.connect("10.0.0.1")
    first.busy()
    first.idle()
    here.connect("10.0.0.1")
    assert here.closed == ["10.0.0.1 1"]


def test_the_address_with_most_connections_makes_room() -> None:
    here = visitors(5)
    here.connect("10.0.0.2")
    for _ in range(4):
        here.connect("10.0.0.1")
    here.connect("10.0.0.3")
    assert here.closed == ["10.0.0.1 1"]


def test_a_request_keeps_its_connection() -> None:
    here = visitors(2, proxies=("10.0.0.1",))
    for _ in range(2):
        here.connect("10.0.0.1", busy=True)
    assert "2 connections are open at this process" in here.refused("10.0.0.2")
    assert here.closed == []


def test_an_address_that_takes_all_it_can_leaves_room_for_others() -> None:
    here = visitors(100)
    for _ in range(50):
        here.connect("10.0.0.1", busy=True)
    assert "50 connections from this address" in here.refused("10.0.0.1")
    for number in range(2, 52):
        here.connect(f"10.0.0.{number}", busy=True)
    assert here.places.count == 100


def test_idle_connections_of_one_address_take_no_room_from_requests_of_another() -> None:
    here = visitors(100)
    for _ in range(150):
        here.connect("10.0.0.1")
    for _ in range(50):
        here.connect("10.0.0.2", busy=True)
    assert len(here.closed) == 100
    assert all(name.startswith("10.0.0.1 ") for name in here.closed)


def test_a_configured_limit_per_address_closes_its_own_idle_connection() -> None:
    here = visitors(100, per_address=2)
    here.connect("10.0.0.1", busy=True)
    here.connect("10.0.0.2")
    here.connect("10.0.0.1")
    here.connect("10.0.0.1", busy=True)
    assert here.closed == ["10.0.0.1 2"]
    assert "2 connections from this address" in here.refused("10.0.0.1")


@pytest.mark.parametrize("host", ["10.9.9.9", "127.0.0.1", "::1", ""])
def test_a_trusted_proxy_and_this_machine_have_no_limit_of_their_own(host: str) -> None:
    here = visitors(10, proxies=("10.9.9.9",))
    for _ in range(10):
        here.connect(host, busy=True)
    assert "10 connections are open at this process" in here.refused(host)


def test_a_configured_limit_counts_for_this_machine_but_not_for_a_proxy() -> None:
    here = visitors(10, per_address=1, proxies=("10.9.9.9",))
    for _ in range(3):
        here.connect("10.9.9.9", busy=True)
    here.connect("127.0.0.1", busy=True)
    assert "1 connections from this address" in here.refused("127.0.0.1")


def test_a_place_is_freed_once() -> None:
    here = visitors(2)
    _, place = here.connect("10.0.0.1")
    here.connect("10.0.0.1", busy=True)
    place.leave()
    place.leave()
    place.idle()
    assert (here.places.count, here.places.idle) == (1, 0)
    here.connect("10.0.0.2", busy=True)
    assert here.refused("10.0.0.3")


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.3.2.1", "127.3.2.1"),
        ("::1", "::1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("", "127.0.0.1"),
    ],
)
def test_an_address_is_what_one_client_has(host: str, key: str) -> None:
    assert address_key(host) == key


@pytest.mark.parametrize(
    ("files", "max_connections", "expected"),
    [
        (15_600, None, Capacity(11_500, 10_000, 512, 1_025)),
        (15_600, 100, Capacity(100, 88, 512, 1_025)),
        (15_600, 50_000, Capacity(11_500, 10_000, 512, 1_025)),
        (1_024, None, Capacity(683, 598, 42, 85)),
        (300, None, Capacity(200, 175, 12, 25)),
        (4, None, Capacity(3, 3, 1, 2)),
        (1, None, Capacity(1, 1, 1, 2)),
    ],
)
def test_capacity_leaves_files_for_everything_else(files: int, max_connections: int | None, expected: Capacity) -> None:
    assert capacity(files, max_connections) == expected


@pytest.mark.parametrize(
    ("phase", "elapsed_s", "body_bytes", "expected"),
    [
        (ConnectionPhase.IDLE, 15, 0, False),
        (ConnectionPhase.IDLE, 15.1, 0, True),
        (ConnectionPhase.HEAD, 15.1, 0, True),
        (ConnectionPhase.BODY, 60, 0, False),
        (ConnectionPhase.BODY, 60.1, 0, True),
        (ConnectionPhase.BODY, 160, 25_600, False),
        (ConnectionPhase.BODY, 160.1, 25_600, True),
        (ConnectionPhase.BODY, 3600, 10**9, False),
        (ConnectionPhase.BODY, 3600.1, 10**9, True),
        (ConnectionPhase.RESPONSE, 10**9, 0, False),
        (ConnectionPhase.CLOSING, 10**9, 0, False),
    ],
)
def test_what_is_overdue(phase: ConnectionPhase, elapsed_s: float, body_bytes: int, expected: bool) -> None:
    assert overdue(phase, elapsed_s, body_bytes, ArrivalLimits()) is expected
