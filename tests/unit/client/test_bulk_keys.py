"""Bodies of `submit_many` that name others by their keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fusequeue import AsyncClient, InvalidArgument
from fusequeue.bulk_lines import LINES_PER_REQUEST

FULL = {"code": "queue_full", "message": "full", "retryable": True, "retry_after_s": 0}
Lines = dict[int, dict[str, Any]]


class Service:
    """Keeps the lines of each request; `refused` has the errors of lines, by request and number."""

    def __init__(self) -> None:
        self.requests: list[Lines] = []
        self.refused: dict[tuple[int, int], dict[str, Any]] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        lines = {at: json.loads(line) for at, line in enumerate(request.content.splitlines(), 1) if line}
        self.requests.append(lines)
        name = request.headers["Idempotency-Key"]
        results = (self._result(name, at, body) for at, body in lines.items())
        return httpx.Response(200, content="\n".join(map(json.dumps, results)))

    def _result(self, name: str, at: int, body: dict[str, Any]) -> dict[str, Any]:
        key = {"key": body["key"]} if "key" in body else {}
        error = self.refused.get((len(self.requests), at))
        return {"line": at, **key, **({"error": error} if error else {"id": f"job-{name}-{at}"})}


@pytest.fixture
def service() -> Service:
    return Service()


def client(service: Callable[[httpx.Request], httpx.Response]) -> AsyncClient:
    return AsyncClient("http://api.test", transport=httpx.MockTransport(service))


def many(count: int = LINES_PER_REQUEST - 1) -> list[dict[str, Any]]:
    return [{"prompt": "x"}] * count


async def test_a_body_names_one_of_an_earlier_request(service: Service) -> None:
    image = {"job": "a", "artifact": 1}
    later = {
        "after": ["a", "job_7"],
        "image": image,
        "images": (image, "in_1"),
        "controls": [{"id": "c", "image": image}],
    }
    async with client(service) as api:
        bodies = [{"key": "a"}, *many(), later]
        results = [one async for one in api.submit_many(bodies, idempotency_key="n")]
    assert (results[0].key, results[0].id, results[-1].line) == ("a", "job-n-1-1", LINES_PER_REQUEST + 1)
    named = {"job": "job-n-1-1", "artifact": 1}
    assert service.requests[1][1] == {
        **{"after": ["job-n-1-1", "job_7"], "image": named, "images": [named, "in_1"]},
        "controls": [{"id": "c", "image": named}],
    }
    assert later["after"] == ["a", "job_7"], "the caller's body is not changed"


async def test_lines_of_one_request_keep_their_keys_also_when_they_are_sent_again(service: Service) -> None:
    """The first is sent again, as the second names it; the service returns the same job for it."""
    service.refused = {(1, 2): FULL}
    async with client(service) as api:
        bodies = [{"key": "a"}, {"after": ["a"]}, {"prompt": "x"}]
        results = [one async for one in api.submit_many(bodies, idempotency_key="n")]
    assert [result.id for result in results] == ["job-n-1-1", "job-n-1-2", "job-n-1-3"]
    assert service.requests[1] == {1: {"key": "a"}, 2: {"after": ["a"]}}


async def test_a_body_that_names_a_refused_one_of_an_earlier_request_is_refused(service: Service) -> None:
    service.refused = {(1, 1): {"code": "invalid_request", "message": "steps: 900"}}
    async with client(service) as api:
        bodies = [{"key": "a"}, *many(), {"after": ["job_1", "a"]}, {"prompt": "x"}]
        results = [one async for one in api.submit_many(bodies)]
    error = results[-2].error
    assert error is not None
    assert (error.code, error.param, error.message) == (
        *("parent_refused", "after.1"),
        "after.1: line 1, a, was refused: steps: 900",
    )
    assert (results[-1].error, list(service.requests[1])) == (None, [2])


async def test_a_key_of_an_earlier_request_is_refused(service: Service) -> None:
    async with client(service) as api:
        with pytest.raises(InvalidArgument, match=r"^bodies.1000.key: bodies.0 has it too: 'a'"):
            [one async for one in api.submit_many([{"key": "a"}, *many(), {"key": "a"}])]
    assert len(service.requests) == 1
