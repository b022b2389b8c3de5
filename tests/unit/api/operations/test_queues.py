"""Models, queues, workers, metrics and documentation over HTTP."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from harness.http_server import BODY, WORKER, deliver

from api.jobs.request import parse
from shared.queue import Queue, UnavailableModel, WorkerInfo


async def test_models_are_listed_in_openais_form_with_their_limits(api: httpx.AsyncClient) -> None:
    page = (await api.get("/v1/models")).json()
    assert page["object"] == "list"
    (model,) = page["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("demo", "model", "fusequeue")
    assert isinstance(model["created"], int)
    assert model["tasks"] == ["text_to_image", "image_to_image", "inpaint"]
    assert (model["defaults"]["width"], model["limits"]["max_side"]) == (64, 128)
    assert "source" not in model
    assert (await api.get("/v1/models/demo")).json() == model


async def test_a_queue_has_an_estimate_only_while_a_worker_serves_its_model(
    api: httpx.AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """The pace of earlier workers says nothing without one."""
    first, _ = [(await api.post("/v1/jobs", json=BODY)).json()["id"] for _ in range(2)]
    (claim,) = await fake_queue.claims.claim(WORKER, ["demo"], 1)
    assert claim.job.id == first
    await deliver(fake_queue, tmp_path, claim)
    (queue,) = (await api.get("/v1/queues")).json()["data"]
    assert queue["eta_s"] is None
    await fake_queue.workers.heartbeat(WorkerInfo(id="w1", models=("demo",)))
    (queue,) = (await api.get("/v1/queues")).json()["data"]
    assert queue["eta_s"] is not None


async def test_cost_curves_have_their_points_and_efficient_rows(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    for rows, seconds in ((1, 1.0), (2, 1.1), (4, 4.0)):
        await fake_queue.workers.learn_cost("cpu", "demo", "64x64", rows, seconds)
    (curve,) = (await api.get("/v1/cost-curves", params={"model": "demo"})).json()["data"]
    assert (curve["model"], curve["device"], curve["shape"], curve["efficient_rows"]) == ("demo", "cpu", "64x64", 2)
    assert curve["points"] == [{"rows": 1, "seconds": 1.0}, {"rows": 2, "seconds": 1.1}, {"rows": 4, "seconds": 4.0}]
    assert (await api.get("/v1/cost-curves")).json()["data"] == [curve]
    assert (await api.get("/v1/cost-curves", params={"model": "other"})).status_code == 404


async def test_a_worker_that_can_load_no_model_is_not_alive_for_the_scale(
    api: httpx.AsyncClient, fake_queue: Queue
) -> None:
    """It would count as capacity, and its idle presence as a reason for more workers."""
    failure = UnavailableModel("the hub cannot be reached", permanent=False, retry_in_s=4.0)
    await fake_queue.workers.heartbeat(WorkerInfo("w1", ("demo",), "unavailable", unavailable={"demo": failure}))
    await fake_queue.workers.heartbeat(WorkerInfo("w2", ("demo",)))
    assert (await api.get(f"/v1/scale/{fake_queue.client.settings.namespace}")).json()["alive"] == 1
    shown = {worker["id"]: worker["unavailable"] for worker in (await api.get("/v1/workers")).json()["data"]}
    reason = {"reason": "the hub cannot be reached", "permanent": False, "retry_in_s": 4.0}
    assert shown == {"w1": {"demo": reason}, "w2": {}}


async def test_metrics_count_requests_by_route_and_never_by_job(api: httpx.AsyncClient) -> None:
    job_id = (await api.post("/v1/jobs", json=BODY)).json()["id"]
    await api.get(f"/v1/jobs/{job_id}")
    await api.get("/no/such/path")
    text = (await api.get("/metrics")).text
    assert re.search(r'fusequeue_http_requests_total\{method="GET",route="/v1/jobs/\{job_id\}",status="200"\} \d', text)
    assert re.search(r'fusequeue_http_requests_total\{method="GET",route="none",status="404"\} \d', text)
    assert re.search(r'fusequeue_submits_total\{model="demo",outcome="accepted"\} \d', text)
    assert 'fusequeue_queued_jobs{model="demo",priority="standard"} 1.0' in text
    assert job_id not in text
    assert "/no/such" not in text


async def test_metrics_have_the_time_of_workers(api: httpx.AsyncClient, fake_queue: Queue) -> None:
    await fake_queue.workers.heartbeat(WorkerInfo(id="w1", models=("demo",), busy_s=40.5, idle_while_queued_s=1.25))
    text = (await api.get("/metrics")).text
    assert 'fusequeue_worker_busy_seconds{worker="w1"} 40.5' in text
    assert 'fusequeue_worker_idle_while_queued_seconds{worker="w1"} 1.25' in text


async def test_the_documentation_has_examples(api: httpx.AsyncClient) -> None:
    page = (await api.get("/openapi.json")).json()
    submit = page["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    assert submit["examples"]["text to image"]["value"]["model"] == "demo"
    for name, example in submit["examples"].items():
        assert parse(example["value"]).prompt, f"{name} is a body that is taken"
    assert {"/v1/jobs:bulk", "/v1/inputs", "/v1/jobs/{job_id}/events", "/readyz"} <= set(page["paths"])
