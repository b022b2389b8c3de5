"""Dead letters by filter: listed, redriven and purged."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from harness.http_server import BODY, WORKER, claimed

from api.routes.operators import dead_letters
from shared.job import State
from shared.job_record import Outcome
from shared.queue import Queue


async def bury(api: httpx.AsyncClient, queue: Queue, reason: str, **fields: Any) -> str:
    """Make a dead letter of a new job, and return its id."""
    job_id = str((await api.post("/v1/jobs", json={**BODY, **fields})).json()["id"])
    claim = await claimed(queue, job_id)
    assert await queue.claims.settle(WORKER, job_id, claim.epoch, Outcome(state=State.FAILED))
    await queue.dead_letters.bury(job_id, reason, "")
    return job_id


async def ids(api: httpx.AsyncClient, **params: Any) -> list[str]:
    return [letter["id"] for letter in (await api.get("/v1/dead-letters", params=params)).json()["data"]]


async def test_dead_letters_are_listed_and_redriven_by_reason(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    lost, broken = await bury(api, fake_queue, "worker_lost"), await bury(api, fake_queue, "unreadable")
    assert await ids(api, reason="worker_lost") == [lost]
    assert await ids(api, model="demo") == [broken, lost]
    assert await ids(api, tenant="other") == []
    dry = (await api.post("/v1/dead-letters:redrive", params={"reason": "worker_lost", "dry_run": "true"})).json()
    assert (dry["ids"], dry["dry_run"]) == ([lost], True)
    assert await ids(api) == [broken, lost]
    done = (await api.post("/v1/dead-letters:redrive", params={"reason": "worker_lost"})).json()
    assert (done["ids"], done["dry_run"]) == ([lost], False)
    assert await ids(api) == [broken]
    assert (await api.get(f"/v1/jobs/{lost}")).json()["status"] == "queued"
    (entry,) = (await api.get("/v1/actions")).json()["data"]
    assert (entry["action"], entry["count"], entry["detail"]) == ("redrive", 1, "reason=worker_lost")


async def test_dead_letters_are_purged_by_time_in_pieces(
    api: httpx.AsyncClient, fake_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "MAX_CHANGED", 2)
    buried = [await bury(api, fake_queue, "worker_lost") for _ in range(3)]
    assert (await api.post("/v1/dead-letters:purge", params={"at_after": "2100-01-01"})).json()["ids"] == []
    params: dict[str, Any] = {"at_before": "2100-01-01", "tenant": "default"}
    first = (await api.post("/v1/dead-letters:purge", params=params)).json()
    assert (first["ids"], first["has_more"]) == (buried[:2], True)
    rest = (await api.post("/v1/dead-letters:purge", params={**params, "after": first["next_cursor"]})).json()
    assert (rest["ids"], rest["has_more"]) == (buried[2:], False)
    assert await ids(api) == []
    assert (await api.get(f"/v1/jobs/{buried[0]}")).status_code == 404


async def test_an_entry_without_a_job_is_purged_and_not_redriven(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    await fake_queue.dead_letters.bury("an entry", "no_record", "")
    redriven = (await api.post("/v1/dead-letters:redrive", params={"reason": "no_record"})).json()
    assert (redriven["ids"], redriven["skipped"]) == ([], 1)
    assert (await api.post("/v1/dead-letters:purge", params={"reason": "no_record"})).json()["ids"] == ["an entry"]


@pytest.mark.parametrize("action", ["redrive", "purge"])
async def test_all_dead_letters_at_once_are_refused(api: httpx.AsyncClient, fake_queue: Queue, action: str) -> None:
    letter = await bury(api, fake_queue, "worker_lost")
    for params, param in (({}, "reason"), ({"resaon": "x"}, "resaon")):
        refused = await api.post(f"/v1/dead-letters:{action}", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, param)
    assert await ids(api) == [letter]
