"""A job's result as the input image of the next job."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from harness.http_server import BODY, WORKER, bearer, claimed, finish, serving

from shared.job import State
from shared.job_record import Artifact, Outcome
from shared.queue import Queue


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(fake_queue, tmp_path, auth="keys") as client:
        yield client


@pytest.fixture
async def acme(fake_queue: Queue) -> dict[str, str]:
    return await bearer(fake_queue, "acme")


async def finished(api: httpx.AsyncClient, queue: Queue, folder: Path, headers: dict[str, str]) -> tuple[str, str]:
    """Run a job, and return its id and the URL of its image."""
    job_id = (await api.post("/v1/jobs", json=BODY, headers=headers)).json()["id"]
    await finish(queue, folder, job_id)
    return job_id, (await api.get(f"/v1/jobs/{job_id}", headers=headers)).json()["artifacts"][0]["url"]


async def test_a_job_id_an_artifact_url_and_a_reference_name_the_same_image(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, acme: dict[str, str]
) -> None:
    job_id, url = await finished(api, fake_queue, tmp_path, acme)
    assert "signature=" in url
    used = []
    for image in (job_id, url, url.partition("?")[0], {"job": job_id}, {"job": job_id, "artifact": 0}):
        response = await api.post("/v1/jobs", json={**BODY, "image": image}, headers=acme)
        assert response.status_code == 202, response.text
        used.append(response.json()["image"])
    assert all(image == used[0] for image in used)
    assert (used[0]["id"][:3], used[0]["job"], used[0]["artifact"]) == ("in_", job_id, 0)
    assert (used[0]["width"], used[0]["content_type"]) == (64, "image/png")
    repainted = {**BODY, "image": job_id, "mask": url}
    assert (await api.post("/v1/jobs", json=repainted, headers=acme)).json()["mask"] == used[0]


async def test_the_image_outlives_the_job_that_made_it(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, acme: dict[str, str]
) -> None:
    job_id, _ = await finished(api, fake_queue, tmp_path, acme)
    image = (await api.post("/v1/jobs", json={**BODY, "image": job_id}, headers=acme)).json()["image"]["id"]
    assert (await api.delete(f"/v1/jobs/{job_id}", headers=acme)).status_code == 204
    assert (await api.post("/v1/jobs", json={**BODY, "image": image}, headers=acme)).status_code == 202


async def test_a_retry_names_the_result_that_the_job_started_from(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, acme: dict[str, str]
) -> None:
    """Also after the job that made it is deleted; the graph is then without that one."""
    job_id, _ = await finished(api, fake_queue, tmp_path, acme)
    child = (await api.post("/v1/jobs", json={**BODY, "image": job_id}, headers=acme)).json()
    await api.post(f"/v1/jobs/{child['id']}/cancel", headers=acme)
    retry = (await api.post(f"/v1/jobs/{child['id']}/retry", headers=acme)).json()
    assert retry["image"] == child["image"]
    graph = (await api.get("/page/graph", params={"job": job_id}, headers=acme)).json()["data"]
    assert {node["id"]: node["parents"] for node in graph} == {job_id: [], child["id"]: [job_id], retry["id"]: [job_id]}
    for filters in ({"parent": job_id}, {"parent": job_id, "model": "demo"}):
        children = (await api.get("/v1/jobs", params=filters, headers=acme)).json()["data"]
        assert [one["id"] for one in children] == [retry["id"], child["id"]]
    assert (await api.delete(f"/v1/jobs/{job_id}", headers=acme)).status_code == 204
    await api.post(f"/v1/jobs/{retry['id']}/cancel", headers=acme)
    last = await api.post(f"/v1/jobs/{retry['id']}/retry", headers=acme)
    assert (last.status_code, last.json()["image"]) == (202, child["image"])


async def test_a_result_of_another_tenant_is_refused_like_one_that_does_not_exist(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path, acme: dict[str, str]
) -> None:
    job_id, url = await finished(api, fake_queue, tmp_path, acme)
    unknown = "job_" + 26 * "0"
    other = await bearer(fake_queue, "other")
    for known, missing in ((job_id, unknown), (url, url.replace(job_id, unknown))):
        for path, body in (("/v1/jobs", BODY), ("/v1/images/edits", BODY)):
            answers = []
            for image in (known, missing):
                response = await api.post(path, json={**body, "image": image}, headers=other)
                problem = response.json()
                del problem["request_id"]
                answers.append((response.status_code, str(problem).replace(job_id, unknown)))
            assert answers[0] == answers[1]
            assert answers[0][0] in (400, 422)
            assert "signature" not in answers[0][1]
    assert not (await fake_queue.jobs.page("other"))[0]
    assert (await fake_queue.api_keys.footprint("other")).stored_objects == 0


async def test_a_job_without_a_usable_image_is_refused_with_its_state(
    api: httpx.AsyncClient, fake_queue: Queue, acme: dict[str, str]
) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY, headers=acme)).json()["id"]
    canceled = (await api.post("/v1/jobs", json=BODY, headers=acme)).json()["id"]
    await api.post(f"/v1/jobs/{canceled}/cancel", headers=acme)
    without = await api.post("/v1/jobs", json={**BODY, "image": canceled}, headers=acme)
    assert without.json()["detail"].startswith(f"image: job {canceled} is canceled and has 0 artifacts")
    claim = await claimed(fake_queue, job_id)
    video = Artifact(
        index=0, kind="video", key="a.mp4", content_type="video/mp4", bytes=9, width=64, height=64, seed=1, frames=5
    )
    outcome = Outcome(state=State.SUCCEEDED, artifacts=(video,))
    assert await fake_queue.claims.settle(WORKER, job_id, claim.epoch, outcome)
    made_a_video = await api.post("/v1/jobs", json={**BODY, "image": job_id}, headers=acme)
    assert "is a video" in made_a_video.json()["detail"]
    assert made_a_video.json()["error"]["param"] == "image"


@pytest.mark.parametrize(
    ("image", "fault"),
    [
        ({}, "image: job: "),
        ({"job": "a"}, "image: job: "),
        ({"job": "job_" + 26 * "0", "artifact": -1}, "image: artifact: "),
        ({"job": "job_" + 26 * "0", "artifact": "0"}, "image: artifact: "),
        ({"job": "job_" + 26 * "0", "index": 0}, "image: index: there is no such field"),
        ([], "image: it must be a text, or an object such as"),
    ],
)
async def test_a_reference_that_names_no_artifact_is_refused(
    api: httpx.AsyncClient, acme: dict[str, str], image: object, fault: str
) -> None:
    refused = await api.post("/v1/jobs", json={**BODY, "image": image}, headers=acme)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "image")
    assert refused.json()["detail"].startswith(fault)


async def test_the_url_of_another_host_is_fetched_like_any_other(api: httpx.AsyncClient, acme: dict[str, str]) -> None:
    url = f"https://elsewhere.invalid/v1/jobs/job_{26 * '0'}/artifacts/0"
    response = await api.post("/v1/jobs", json={**BODY, "image": url}, headers=acme)
    assert "there is no job" not in response.json()["detail"]
