"""Deletions of many callers in few requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import chain

import pytest

from shared.storage.grouped_deletions import MOST_KEYS, MOST_REQUESTS, GroupedDeletions


class Refused(Exception):
    """A request that the server does not accept as it is."""


class Server:
    """Deletes when it is let; `broken` keys are left, and a request with one in `refused` is refused."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []
        self.broken: set[str] = set()
        self.refused: set[str] = set()
        self.is_down = False
        self.let = asyncio.Event()

    async def delete(self, keys: list[str]) -> Mapping[str, Exception]:
        self.requests.append(keys)
        await self.let.wait()
        if self.is_down:
            raise ConnectionError
        if self.refused.intersection(keys):
            raise Refused
        return {key: ValueError(key) for key in keys if key in self.broken}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def deletions(server: Server) -> GroupedDeletions:
    return GroupedDeletions(server.delete, lambda error: isinstance(error, Refused))


async def deleted(server: Server, deletions: GroupedDeletions, *groups: list[str]) -> list[BaseException | None]:
    """Delete concurrently, and return the error of each caller."""
    tasks = [asyncio.create_task(deletions.delete(keys)) for keys in groups]
    await asyncio.sleep(0.01)
    server.let.set()
    async with asyncio.timeout(10):
        return await asyncio.gather(*tasks, return_exceptions=True)


async def test_callers_share_requests_while_others_are_in_progress(server: Server, deletions: GroupedDeletions) -> None:
    groups = [[f"{number}/a", f"{number}/b"] for number in range(100)]
    assert await deleted(server, deletions, *groups) == [None] * 100
    assert sorted(chain(*server.requests)) == sorted(chain(*groups))
    assert len(server.requests) <= 2 * MOST_REQUESTS


async def test_a_request_has_a_bounded_number_of_keys(server: Server, deletions: GroupedDeletions) -> None:
    groups = [[f"{number}/{key}" for key in range(400)] for number in range(12)]
    assert await deleted(server, deletions, *groups) == [None] * 12
    assert max(map(len, server.requests)) <= MOST_KEYS
    assert await deleted(server, deletions, [str(key) for key in range(MOST_KEYS)]) == [None]


async def test_only_the_caller_of_a_key_that_is_left_gets_its_error(
    server: Server, deletions: GroupedDeletions
) -> None:
    server.broken = {"7/b"}
    errors = await deleted(server, deletions, *([f"{number}/a", f"{number}/b"] for number in range(20)))
    assert [number for number, error in enumerate(errors) if error is not None] == [7]
    assert str(errors[7]) == "7/b"


async def test_keys_that_the_server_refuses_fail_their_caller_only(server: Server, deletions: GroupedDeletions) -> None:
    server.refused = {"17"}
    errors = await deleted(server, deletions, *([str(number)] for number in range(20)))
    assert [number for number, error in enumerate(errors) if error is not None] == [17]


async def test_an_outage_fails_all_callers_with_few_requests(server: Server, deletions: GroupedDeletions) -> None:
    server.is_down = True
    errors = await deleted(server, deletions, *([str(number)] for number in range(100)))
    assert all(isinstance(error, ConnectionError) for error in errors)
    assert len(server.requests) <= 2 * MOST_REQUESTS
    server.is_down = False
    assert await deleted(server, deletions, ["again"]) == [None]


async def test_a_caller_that_is_gone_is_left_out(server: Server, deletions: GroupedDeletions) -> None:
    first = []
    for number in range(MOST_REQUESTS):
        first.append(asyncio.create_task(deletions.delete([str(number)])))
        await asyncio.sleep(0.01)
    gone, kept = (asyncio.create_task(deletions.delete([name])) for name in ("gone", "kept"))
    await asyncio.sleep(0.01)
    gone.cancel()
    await asyncio.wait([gone])
    server.let.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*first, kept)
    assert [request for request in server.requests if "gone" in request] == []


def test_it_goes_on_in_another_event_loop() -> None:
    """As in the chores that run a loop each, one of which ended during a request."""
    server: list[Server] = []

    async def interrupted(deletions: GroupedDeletions) -> None:
        for number in range(2 * MOST_REQUESTS):
            asyncio.create_task(deletions.delete([str(number)]))  # noqa: RUF006
        await asyncio.sleep(0.01)

    async def again(deletions: GroupedDeletions) -> None:
        server[0].let = asyncio.Event()
        server[0].let.set()
        async with asyncio.timeout(10):
            await deletions.delete(["again"])

    async def made() -> GroupedDeletions:
        server.append(Server())
        return GroupedDeletions(server[0].delete, lambda _: False)

    deletions = asyncio.run(made())
    asyncio.run(interrupted(deletions))
    asyncio.run(again(deletions))
    assert server[0].requests[-1] == ["again"]


async def test_a_caller_with_too_many_keys_does_not_stop_the_others(
    server: Server, deletions: GroupedDeletions
) -> None:
    server.refused = {"0"}
    many = [str(number) for number in range(MOST_KEYS + 1)]
    first, second = await deleted(server, deletions, many, ["a"])
    assert isinstance(first, Refused)
    assert second is None
