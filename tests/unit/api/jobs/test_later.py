"""Jobs for later over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import BODY, WORKER, deliver, next_claim, serving, without_window
from harness.queue import come_due

from shared.queue import Queue, WorkerInfo

HOUR = timedelta(hours=1)
WAITING = {"position": None, "eta_s": None, "reason": "waiting"}


def after(time: timedelta) -> str:
    """Return a time so far from now, to the second."""
    return (datetime.now(UTC) + time).replace(microsecond=0).isoformat()


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path, models=without_window(tmp_path)) as client:
        yield client


async def submit(api: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await api.post("/v1/jobs", json={**BODY, **fields})
    assert response.status_code == 202, response.text
    return dict(response.json())


async def claimed(queue: Queue) -> list[str]:
    return [one.job.id for one in await queue.claims.claim(WORKER, ["demo"], 8)]


async def test_a_job_for_later_says_when_it_is_queued_and_starts_then(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    later = after(HOUR)
    job = await submit(api, not_before=later, deadline_s=60)
    assert (job["status"], job["queue"]) == ("queued", WAITING)
    assert datetime.fromisoformat(job["not_before"]) == datetime.fromisoformat(later)
    assert datetime.fromisoformat(job["deadline_at"]) == datetime.fromisoformat(later) + timedelta(minutes=1)
    assert (await api.get(f"/v1/jobs/{job['id']}")).json() == job
    assert (await api.get("/v1/queues")).json() | {"workers": 0} == {
        **{"object": "list", "data": [], "waiting_jobs": 1, "workers": 0}
    }
    assert "fusequeue_waiting_jobs 1.0" in (await api.get("/metrics")).text
    assert await claimed(fake_queue) == []
    await come_due(fake_queue, job["id"])
    await fake_queue.maintenance.queue_due()
    queued = (await api.get(f"/v1/jobs/{job['id']}")).json()
    assert queued["queue"]["position"] == 0
    assert queued["not_before"] == job["not_before"]
    assert await claimed(fake_queue) == [job["id"]]


async def test_a_job_that_waits_says_when_it_is_expected_to_end(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    await fake_queue.workers.heartbeat(WorkerInfo(id="w1", models=("demo",)))
    await submit(api)
    await deliver(fake_queue, tmp_path, await next_claim(fake_queue))
    parent = await submit(api)
    child = await submit(api, after=[parent["id"]])
    assert child["queue"] == WAITING | {"eta_s": child["queue"]["eta_s"]}
    assert child["queue"]["eta_s"] > parent["queue"]["eta_s"]
    later = await submit(api, not_before=after(HOUR))
    read = await api.get(f"/v1/jobs/{later['id']}")
    assert 3500 < read.json()["queue"]["eta_s"] < 3700
    assert read.headers["Retry-After"] == "30"
    listed = (await api.get("/v1/jobs")).json()["data"]
    assert [one["queue"]["reason"] for one in listed if one["queue"]] == ["waiting", "waiting", None]


@pytest.mark.parametrize(
    "text",
    [
        *("tomorrow", "", "2026-01-31", "2026-01-31T22:00:00", "22:00Z", "9999-12-31T00:00:00Z", "600", "10m", "PT10M"),
        *(1769896800, 30 * 86_400 + 1, -1, True, ["x"]),
    ],
)
async def test_a_time_or_a_delay_that_is_wrong_or_too_long_is_refused(api: httpx.AsyncClient, text: Any) -> None:
    """Such as a Unix time, which would be a delay of decades."""
    refused = await api.post("/v1/jobs", json={**BODY, "not_before": text})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["message"].count("not_before")) == (422, "not_before", 1)
    assert "30 days" in error["message"]


@pytest.mark.parametrize("delay_s", [600, 0.5, 30 * 86_400])
async def test_a_delay_counts_from_the_submit(api: httpx.AsyncClient, delay_s: float) -> None:
    """Also of a request like an earlier one, whose job is a copy of that."""
    for _ in range(2):
        job = await submit(api, not_before=delay_s, deadline_s=60)
        due = datetime.fromisoformat(job["created_at"]) + timedelta(seconds=delay_s)
        assert (job["queue"], datetime.fromisoformat(job["not_before"])) == (WAITING, due)
        assert datetime.fromisoformat(job["deadline_at"]) == due + timedelta(minutes=1)
    assert (await submit(api, not_before=0))["queue"]["position"] == 0


async def test_a_repeated_request_with_a_delay_is_the_same_job(api: httpx.AsyncClient) -> None:
    request = {"json": {**BODY, "not_before": 600}, "headers": {"Idempotency-Key": "once"}}
    first, again = [(await api.post("/v1/jobs", **request)).json() for _ in range(2)]
    assert (again["id"], again["not_before"]) == (first["id"], first["not_before"])
    request["json"] |= {"not_before": 700}
    assert (await api.post("/v1/jobs", **request)).json()["code"] == "idempotency_key_reused"


async def test_a_job_can_be_for_later_by_up_to_30_days(api: httpx.AsyncClient) -> None:
    assert (await submit(api, not_before=after(timedelta(days=30) - HOUR)))["queue"] == WAITING
    refused = await api.post("/v1/jobs", json={**BODY, "not_before": after(timedelta(days=30) + HOUR)})
    assert "30 days" in refused.json()["detail"]
    assert (await submit(api, not_before="2020-01-31T22:00:00+01:00"))["queue"] != WAITING


async def test_a_deadline_cannot_be_before_the_time(api: httpx.AsyncClient) -> None:
    job = await submit(api, not_before=after(HOUR))
    refused = await api.patch(f"/v1/jobs/{job['id']}", json={"deadline_s": 60})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "deadline_s")
    other = await submit(api)
    piece = await api.post("/v1/jobs:update", params={"model": "demo"}, json={"deadline_s": 60})
    assert piece.json()["ids"] == [other["id"]]
    changed = await api.patch(f"/v1/jobs/{job['id']}", json={"deadline_s": 7200, "priority": "bulk"})
    assert changed.json()["deadline_at"] > changed.json()["not_before"]
    assert changed.json()["queue"] == WAITING


async def test_a_retry_starts_at_once(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    job = await submit(api, not_before=after(HOUR))
    canceled = (await api.post(f"/v1/jobs/{job['id']}/cancel")).json()
    assert (canceled["status"], canceled["queue"]) == ("canceled", None)
    again = (await api.post(f"/v1/jobs/{job['id']}/retry")).json()
    assert (again["not_before"], again["queue"]["position"]) == (None, 0)
    assert await claimed(fake_queue) == [again["id"]]


async def test_lines_of_a_bulk_request_have_times_of_their_own(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    lines = [{**BODY, "not_before": after(HOUR)}, {**BODY, "not_before": 3600}, BODY]
    text = "\n".join(map(json.dumps, lines))
    response = await api.post("/v1/jobs:bulk", content=text, headers={"Content-Type": "application/x-ndjson"})
    *later, now = (json.loads(line)["id"] for line in response.text.splitlines())
    assert await claimed(fake_queue) == [now]
    assert [(await api.get(f"/v1/jobs/{job_id}")).json()["queue"] for job_id in later] == [WAITING] * 2


async def test_a_paused_job_for_later_waits_until_it_is_resumed_and_due(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    job = await submit(api, not_before=after(HOUR))
    paused = (await api.post(f"/v1/jobs/{job['id']}/pause")).json()
    assert paused["queue"]["reason"] == "paused"
    assert (await api.post(f"/v1/jobs/{job['id']}/resume")).json()["queue"] == WAITING
    assert await claimed(fake_queue) == []


async def test_a_job_waits_for_others_and_fails_with_them(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    first = await submit(api)
    second = await submit(api, after=[first["id"], first["id"]], deadline_s=60)
    assert (second["after"], second["queue"], second["deadline_at"]) == ([first["id"]], WAITING, None)
    refused = await api.patch(f"/v1/jobs/{second['id']}", json={"deadline_s": 60})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "deadline_s")
    third = await submit(api, after=[second["id"]], on_parent_failure="run")
    await api.post(f"/v1/jobs/{first['id']}/cancel")
    await fake_queue.maintenance.queue_due()
    failed = (await api.get(f"/v1/jobs/{second['id']}")).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "parent_failed")
    assert await claimed(fake_queue) == [third["id"]]
    again = (await api.post(f"/v1/jobs/{second['id']}/retry")).json()
    assert (again["after"], again["queue"]["position"]) == ([], 0)


@pytest.mark.parametrize(
    ("after_", "param"),
    [
        ("job_00000000000000000000000000", "after"),
        (["other"], "after.0"),
        (["job_00000000000000000000000000"], "after.0"),
        (["job_00000000000000000000000000"] * 17, "after"),
    ],
)
async def test_what_a_job_cannot_wait_for_is_named(api: httpx.AsyncClient, after_: Any, param: str) -> None:
    refused = await api.post("/v1/jobs", json={**BODY, "after": after_})
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, param)


async def test_jobs_that_are_retried_together_wait_for_each_other_again(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """The failed jobs of a group go on in their order."""
    first = await submit(api, group="nightly")
    second = await submit(api, group="nightly", after=[first["id"]])
    third = await submit(api, group="nightly", after=[first["id"], second["id"]])
    await api.post(f"/v1/jobs/{first['id']}/cancel")
    await fake_queue.maintenance.queue_due()
    new_ids = (await api.post("/v1/jobs:retry?group=nightly")).json()["new_ids"]
    jobs = [(await api.get(f"/v1/jobs/{new_ids[one['id']]}")).json() for one in (first, second, third)]
    names = [job["id"] for job in jobs]
    assert [job["after"] for job in jobs] == [[], names[:1], names[:2]]
    assert await claimed(fake_queue) == names[:1]


async def test_a_retry_waits_for_earlier_retries_of_its_parents_that_have_not_ended(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    first = await submit(api)
    second = await submit(api, after=[first["id"]])
    third = await submit(api, after=[first["id"]])
    await api.post(f"/v1/jobs/{first['id']}/cancel")
    await fake_queue.maintenance.queue_due()
    again = (await api.post(f"/v1/jobs/{first['id']}/retry")).json()
    waiting = (await api.post(f"/v1/jobs/{second['id']}/retry")).json()
    assert (waiting["after"], waiting["queue"]) == ([again["id"]], WAITING)
    await api.post(f"/v1/jobs/{again['id']}/cancel")
    at_once = (await api.post(f"/v1/jobs/{third['id']}/retry")).json()
    assert (at_once["after"], at_once["queue"]["position"]) == ([], 0)
