"""Direct routes: the same responses as through FastAPI, which serves requests with a query."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from harness.http_server import BODY
from harness.tables import row

from api.http.direct_routes import DirectRoutes

CHANGING = ("id", "created_at", "seed", "urls", "request_id")
PATHS = {"direct": "/v1/jobs", "by FastAPI": "/v1/jobs?unused=1"}


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request was direct."""
    seen: list[bool] = []
    match = DirectRoutes._match

    def noted(self: DirectRoutes, scope: Any) -> Any:
        found = match(self, scope)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(DirectRoutes, "_match", noted)
    return seen


def comparable(response: httpx.Response) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Return status, headers and body without what differs between two equal requests."""
    names = ("etag", "location", "x-request-id", "content-length")
    headers = {name: value if name not in names else "" for name, value in response.headers.items()}
    body = response.json()
    queue = body.get("queue") and {**body["queue"], "position": None}
    return response.status_code, headers, {**{key: body[key] for key in body if key not in CHANGING}, "queue": queue}


SUBMITS: dict[str, dict[str, Any]] = {
    "valid": {"json": BODY},
    "with preference": {"json": BODY, "headers": {"Prefer": "wait=0"}},
    "invalid JSON": {"content": b"{", "headers": {"Content-Type": "application/json"}},
    "other type": {"content": b"{}", "headers": {"Content-Type": "text/plain"}},
    "faults": {"json": {**BODY, "width": 1, "steps": 0, "unknown": 1}},
    "unknown model": {"json": {**BODY, "model": "none"}},
    "invalid key": {"json": BODY, "headers": {"Idempotency-Key": "a b"}},
    "two requests": {"json": BODY, "headers": {"Idempotency-Key": "k"}},
    "other site": {"json": BODY, "headers": {"Origin": "https://other.example"}},
    "other host": {"json": BODY, "headers": {"Host": "other.example"}},
}


async def test_a_submit_has_the_same_response_either_way(api: httpx.AsyncClient, direct: list[bool]) -> None:
    for case, request in SUBMITS.items():
        with row(case):
            first, second = [await api.post(path, **request) for path in PATHS.values()]
            if case == "two requests":
                assert second.headers["idempotent-replayed"] == "true"
                assert first.json()["id"] == second.json()["id"]
            else:
                assert comparable(first) == comparable(second)
    assert direct == [True, False] * len(SUBMITS)


async def test_an_image_request_has_the_same_error_either_way(api: httpx.AsyncClient, direct: list[bool]) -> None:
    refused = [case for case in SUBMITS if case not in ("valid", "with preference", "two requests")]
    for case in refused:
        with row(case):
            paths = ("/v1/images/generations", "/v1/images/generations?unused=1")
            first, second = [await api.post(path, **SUBMITS[case]) for path in paths]
            assert first.status_code >= 400
            assert comparable(first) == comparable(second)
    assert direct == [True, False] * len(refused)


async def test_a_read_has_the_same_response_either_way(api: httpx.AsyncClient, direct: list[bool]) -> None:
    url = f"/v1/jobs/{(await api.post('/v1/jobs', json=BODY)).json()['id']}"
    direct.clear()
    for headers in ({}, {"If-None-Match": "*"}):
        one, other = [await api.get(path, headers=headers) for path in (url, f"{url}?wait=0")]
        assert (one.status_code, one.content, one.headers["etag"]) == (
            other.status_code,
            other.content,
            other.headers["etag"],
        )
    assert direct == [True, False, True, False]
    missing = [await api.get(f"/v1/jobs/job_{'0' * 26}{query}") for query in ("", "?wait=0")]
    assert comparable(missing[0]) == comparable(missing[1])
    assert missing[0].status_code == 404


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/v1/jobs"), ("GET", "/v1/jobs"), ("GET", "/v1/jobs/other"), ("POST", "/v1/jobs/")]
)
async def test_other_requests_are_fastapis(api: httpx.AsyncClient, direct: list[bool], method: str, path: str) -> None:
    await api.request(method, path)
    assert direct == [False]
