"""Lists of jobs."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import httpx
import pytest
from harness.http_server import BODY
from harness.tables import row

from api.routes import job_lists
from shared.queue.jobs import Jobs


async def submit(api: httpx.AsyncClient, **fields: Any) -> str:
    return str((await api.post("/v1/jobs", json={**BODY, **fields})).json()["id"])


async def pages(api: httpx.AsyncClient, **params: Any) -> list[list[str]]:
    """Return the ids of all pages, following the cursor."""
    found = []
    while True:
        page = (await api.get("/v1/jobs", params=params)).json()
        found.append([job["id"] for job in page["data"]])
        assert page["object"] == "list"
        assert page["has_more"] == (page["next_cursor"] is not None)
        if not page["has_more"]:
            return found
        params["after"] = page["next_cursor"]


async def test_jobs_are_listed_newest_first_in_pages(api: httpx.AsyncClient) -> None:
    ids = [await submit(api) for _ in range(7)]
    found = await pages(api, limit=3)
    assert [len(page) for page in found] == [3, 3, 1]
    assert list(chain(*found)) == ids[::-1]


async def test_a_page_has_the_ids_of_its_first_and_last_job(api: httpx.AsyncClient) -> None:
    ids = [await submit(api) for _ in range(3)]
    page = (await api.get("/v1/jobs", params={"limit": 2})).json()
    assert (page["first_id"], page["last_id"], page["next_cursor"]) == (ids[2], ids[1], ids[1])
    empty = (await api.get("/v1/jobs", params={"batch_id": "none"})).json()
    assert (empty["data"], empty["first_id"], empty["has_more"]) == ([], None, False)


async def test_jobs_are_listed_by_batch_and_time(api: httpx.AsyncClient) -> None:
    await submit(api)
    mine = await submit(api, batch_id="b1")
    at = (await api.get(f"/v1/jobs/{mine}")).json()["created_at"]
    assert await pages(api, batch_id="b1") == [[mine]]
    assert mine in list(chain(*await pages(api, created_after=at)))
    assert mine not in list(chain(*await pages(api, created_before=at)))
    assert await pages(api, created_after="2100-01-01T00:00:00Z") == [[]]
    assert await pages(api, created_before="1000000000") == [[]]
    assert await pages(api, created_before="0") == [[]]


async def test_jobs_are_listed_by_a_part_of_their_prompt(api: httpx.AsyncClient) -> None:
    """In any case; changes of all that match use the same filters."""
    mine = await submit(api, prompt="An old Lighthouse, STRASSE")
    await submit(api, prompt="a red circle")
    for part in ("lighthouse", "OLD LIGHT", "straße"):
        assert await pages(api, prompt=part) == [[mine]]
    assert await pages(api, prompt="house light") == [[]]
    canceled = (await api.post("/v1/jobs:cancel", params={"prompt": "lighthouse"})).json()
    assert canceled["ids"] == [mine]


async def test_jobs_are_listed_and_changed_by_the_job_that_they_wait_for(api: httpx.AsyncClient) -> None:
    """Together with other filters, of which another index has the group."""
    parent, other = await submit(api), await submit(api)
    first = await submit(api, after=[parent, other])
    second = await submit(api, after=[parent], group="nightly", prompt="a green cross")
    await submit(api, group="nightly")
    assert await pages(api, parent=parent) == [[second, first]]
    assert await pages(api, parent=parent, limit=1) == [[second], [first]]
    assert await pages(api, parent=other) == [[first]]
    assert await pages(api, parent=first) == [[]]
    assert await pages(api, parent=parent, group="nightly") == [[second]]
    assert await pages(api, parent=parent, prompt="circle") == [[first]]
    refused = await api.get("/v1/jobs", params={"parent": "first"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "parent")
    assert (await api.post("/v1/jobs:cancel", params={"parent": other})).json()["ids"] == [first]
    assert await pages(api, parent=parent, status="canceled") == [[first]]


async def test_filters_find_all_jobs_over_all_pages(api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_lists, "SCAN_PAGE_SIZE", 4)
    monkeypatch.setattr(job_lists, "MAX_SCANNED", 8)
    marked = [await submit(api, metadata={"order": "7" if number % 5 == 0 else "8"}) for number in range(23)][::5]
    found = await pages(api, **{"metadata.order": "7", "limit": 2})
    assert list(chain(*found)) == marked[::-1]
    assert all(len(page) <= 2 for page in found)


async def test_jobs_are_filtered_by_state_and_model(api: httpx.AsyncClient) -> None:
    waiting, ended = await submit(api), await submit(api)
    await api.post(f"/v1/jobs/{ended}/cancel")
    assert await pages(api, status="canceled") == [[ended]]
    assert await pages(api, status="queued,running") == [[waiting]]
    assert await pages(api, model="other") == [[]]
    assert await pages(api, model="demo", status="queued") == [[waiting]]


async def test_a_list_can_begin_with_the_oldest_job(api: httpx.AsyncClient) -> None:
    ids = [await submit(api) for _ in range(5)]
    assert list(chain(*await pages(api, order="asc", limit=2))) == ids
    assert list(chain(*await pages(api, order="asc", status="queued", limit=2))) == ids
    (await api.post(f"/v1/jobs/{ids[1]}/cancel")).raise_for_status()
    (await api.delete(f"/v1/jobs/{ids[1]}")).raise_for_status()
    after_a_deleted_one = await pages(api, order="asc", after=ids[1])
    assert after_a_deleted_one == [ids[2:]]


LISTS = (
    *("/v1/jobs", "/v1/inputs", "/v1/models", "/v1/webhooks", "/v1/webhooks/deliveries", "/v1/dead-letters"),
    *("/v1/queues", "/v1/workers", "/v1/files", "/v1/batches", "/v1/videos"),
    *("/compat/replicate/v1/predictions", "/compat/replicate/v1/models"),
)
INVALID = (400, 422)  # 400 is that of OpenAI's protocol
PAGED = [path for path in LISTS if path.rpartition("/")[2] not in ("models", "webhooks", "queues", "workers")]


async def test_every_list_refuses_an_unknown_parameter(api: httpx.AsyncClient) -> None:
    for path in LISTS:
        with row(path):
            response = await api.get(path, params={"colour": "red"})
            assert response.status_code in INVALID
            assert response.json()["errors"][0]["param"] == "colour"
            assert (await api.get(path)).status_code == 200


async def test_every_list_refuses_a_bad_cursor(api: httpx.AsyncClient) -> None:
    for path in PAGED:
        with row(path):
            name = "cursor" if "predictions" in path else "after"
            response = await api.get(path, params={name: "nothing"})
            assert response.status_code in INVALID
            assert response.json()["errors"][0]["param"] == name


ORDERED = [path for path in PAGED if "predictions" not in path]


async def test_every_list_caps_its_limit_and_has_an_order(api: httpx.AsyncClient) -> None:
    for path in ORDERED:
        with row(path):
            assert (await api.get(path, params={"limit": 10_000, "order": "asc"})).status_code == 200
            for params in ({"limit": "0"}, {"order": "up"}):
                response = await api.get(path, params=params)
                assert response.status_code in INVALID
                assert response.json()["errors"][0]["param"] == next(iter(params))


async def test_a_repeated_parameter_is_refused(api: httpx.AsyncClient) -> None:
    """Ignoring one value would list the wrong jobs."""
    answer = await api.get("/v1/jobs?status=failed&status=succeeded")
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "status")


async def test_filtered_lists_of_a_tenant_take_turns(api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each can read a thousand jobs: 64 at once kept other tenants waiting."""
    at_once: list[int] = [0]
    read = Jobs.page

    async def page(*values: Any, **options: Any) -> Any:
        at_once.append(at_once[-1] + 1)
        await asyncio.sleep(0.01)
        rows = await read(*values, **options)
        at_once.append(at_once[-1] - 1)
        return rows

    monkeypatch.setattr(Jobs, "page", page)
    responses = await asyncio.gather(*(api.get("/v1/jobs?model=none") for _ in range(20)))
    assert {response.status_code for response in responses} == {200}
    assert max(at_once) == 4
