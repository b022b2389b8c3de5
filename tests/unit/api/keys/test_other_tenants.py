"""`tenant=` on every route: only an operator reads or changes what belongs to another tenant."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from harness.http_server import BODY, bearer, finish, paths, png, serving
from harness.tables import row

from shared.auth import Scope
from shared.queue import Queue

ALL = frozenset(Scope)
SECRET = "what acme alone may see"
IDS = re.compile(r"\{(\w+)(?::path)?\}")
LISTS = ("/v1/jobs", "/v1/inputs", "/v1/webhooks", "/v1/files", "/v1/batches", "/compat/replicate/v1/predictions")


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path, auth="keys", presign_expires_s=10**9) as client:
        yield client


async def created(api: httpx.AsyncClient, queue: Queue, folder: Path, headers: dict[str, str]) -> dict[str, str]:
    """Create one object of each kind, and return their ids by the names of parameters."""
    body = {**BODY, "prompt": SECRET}
    done, waiting, paused = [(await api.post("/v1/jobs", json=body, headers=headers)).json()["id"] for _ in range(3)]
    await api.post(f"/v1/jobs/{paused}/pause", headers=headers)
    await finish(queue, folder, done)
    image = {"file": ("a.png", png(), "image/png")}
    input_id = (await api.post("/v1/inputs", files=image, headers=headers)).json()["id"]
    hook = {"url": "https://93.184.216.34/acme"}
    endpoint = (await api.post("/v1/webhooks", json=hook, headers=headers)).json()["id"]
    line = {"custom_id": "1", "method": "POST", "url": "/v1/jobs", "body": body}
    lines = {"file": ("in.jsonl", json.dumps(line).encode(), "application/jsonl")}
    file = (await api.post("/v1/files", files=lines, data={"purpose": "batch"}, headers=headers)).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/jobs", "completion_window": "24h"}
    batch_id = (await api.post("/v1/batches", json=batch, headers=headers)).json()["id"]
    jobs = dict.fromkeys(("job_id", "request_id", "prediction_id", "video_id", "letter_id"), done)
    others = {"input_id": input_id, "endpoint_id": endpoint, "file_id": file, "batch_id": batch_id, "index": "0"}
    return jobs | others | {"waiting": waiting, "paused": paused, "tenant": "acme", "model": "demo"}


async def everything(api: httpx.AsyncClient, headers: dict[str, str]) -> list[str]:
    """Return what a tenant has; its URLs are signed anew, and a time to live is milliseconds old."""
    texts = [(await api.get(path, headers=headers)).text for path in LISTS]
    return [re.sub(r'\?expires=[^"]*|"expires_at":"[^"]*"', "", text) for text in texts]


async def test_a_key_without_the_scope_admin_names_no_other_tenant(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """This covers routes added later."""
    mine = await bearer(fake_queue, "acme")
    theirs = await bearer(fake_queue, "evil", scopes=ALL - {Scope.ADMIN, Scope.METRICS})
    ids = await created(api, fake_queue, tmp_path, mine)
    private = {name: one for name, one in ids.items() if name not in ("index", "tenant", "model")}
    before = await everything(api, mine)
    for method, path in paths(fake_queue, tmp_path):
        for job in ("job_id", "waiting", "paused") if "{job_id}" in path else ("job_id",):
            known = ids | {"job_id": ids[job]}
            url = IDS.sub(lambda found: known.get(found[1], "x"), path)  # noqa: B023  # called at once
            with row(method, url):
                query = {"tenant": "acme"} | ({"status": "queued"} if url.startswith("/v1/jobs") else {})
                response = await api.request(method, url, params=query, headers=theirs)
                assert SECRET not in response.text
                assert response.content != png()
                if response.status_code < 400:
                    assert not [name for name in IDS.findall(path) if name in private]
                    assert not [one for one in private.values() if one in response.text]
    assert await everything(api, mine) == before


READS = ("/v1/jobs", "/v1/jobs?status=queued", "/v1/jobs/{job_id}", "/v1/jobs/{job_id}?wait=1", "/v1/usage")


async def test_an_operator_reads_results_and_events_of_another_tenant(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """Those of a job by the signed URLs in it."""
    operator = await bearer(fake_queue, "ops", scopes=frozenset((Scope.ADMIN,)))
    ids = await created(api, fake_queue, tmp_path, await bearer(fake_queue, "acme"))
    for path in READS:
        with row(path):
            url = httpx.URL(path.format(**ids)).copy_merge_params({"tenant": "acme"})
            response = await api.get(url, headers=operator)
            assert response.status_code == 200
            assert "acme" in response.text if path == "/v1/usage" else SECRET in response.text
    job = (await api.get(f"/v1/jobs/{ids['job_id']}?tenant=acme", headers=operator)).json()
    assert (await api.get(job["artifacts"][0]["url"])).content == png()
    assert SECRET in (await api.get(job["urls"]["events"])).text
    for action in ("pause", "resume", "cancel"):
        changed = await api.post(f"/v1/jobs/{ids['waiting']}/{action}?tenant=acme", headers=operator)
        assert (changed.status_code, changed.json()["paused_at"] is not None) == (200, action == "pause")
    (page, _) = await fake_queue.actions.page(None, 3)
    assert [one.action.name for one in page] == ["cancel", "resume_job", "pause_job"]
