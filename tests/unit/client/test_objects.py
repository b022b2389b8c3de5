"""Models, queues, workers, webhooks and batches as typed objects, read from the real API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny.safetensors_file import demo_lora

from fusequeue import AsyncClient, BatchTimeout, Invalid, NotFound, RefusedError
from fusequeue.resources import batches as client_batches
from shared.queue import Queue, UnavailableModel, WorkerInfo

PROMPT = "a red circle on a blue ground, left"
HOOK = "https://127.0.0.1:8443/hook"
BATCH: dict[str, Any] = {
    "id": "batch_1",
    "endpoint": "/v1/jobs",
    "status": "in_progress",
    "input_file_id": "file-1",
    "created_at": 1,
    "request_counts": {"total": 2, "completed": 0, "failed": 0},
}
Work = Callable[..., Awaitable[bytes]]


async def test_models_are_typed(api: AsyncClient) -> None:
    (model,) = await api.models()
    assert (model.id, model.tasks) == ("demo", ("text_to_image", "image_to_image", "inpaint"))
    assert (model.defaults.width, model.limits.max_side, model.step_cache.default) == (64, 128, "off")
    assert model.max_batch > 0


async def test_queues_workers_and_the_scale_are_typed(api: AsyncClient, fake_queue: Queue) -> None:
    await api.submit("demo", PROMPT, n=2, priority="bulk")
    failure = UnavailableModel("no memory", permanent=True, retry_in_s=0.0)
    await fake_queue.workers.heartbeat(
        WorkerInfo(id="w1", models=("demo", "sd"), slots=8, state="ready", unavailable={"sd": failure})
    )
    (queue,) = await api.queues()
    assert (queue.model, queue.jobs["bulk"], queue.slots["bulk"], queue.running_jobs) == ("demo", 1, 2, 0)
    (worker,) = await api.workers()
    assert (worker.id, worker.state, worker.slots, worker.models) == ("w1", "ready", 8, ("demo", "sd"))
    assert (worker.unavailable["sd"].reason, worker.unavailable["sd"].permanent) == ("no memory", True)
    scale = await api.scale(fake_queue.client.settings.namespace)
    assert (scale.wanted, scale.alive, scale.queued) == (1, 1, 2)


async def test_models_are_ordered_to_workers(api: AsyncClient, fake_queue: Queue) -> None:
    await fake_queue.workers.heartbeat(WorkerInfo("w1", ("demo",), worker_pool="big", kept=("demo",), kept_bytes=5))
    operations, (model,) = api.operations, await api.models()
    assert model.workers is not None
    assert (model.workers.kept, model.workers.loaded) == (1, 0)
    pinned = await operations.pin_model(model, worker_pool="big")
    assert [(one.worker, one.state) for one in pinned.workers] == [("w1", "kept")]
    with pytest.raises(RefusedError, match="pinned in worker pool big"):
        await operations.unload_model("demo")
    assert (await operations.unpin_model("demo", worker_pool="big")).action == "unpin"
    await operations.load_model("demo", worker="w1")
    await operations.unload_model("demo")
    assert [(one.action, one.worker) for one in await operations.model_orders()] == [("load", "w1"), ("unload", None)]
    (worker,) = await api.workers()
    assert (worker.worker_pool, worker.kept_bytes, worker.memory_state("demo")) == ("big", 5, "kept")


async def test_jobs_are_selected_by_typed_filters(api: AsyncClient) -> None:
    before = datetime.now(UTC)
    first = await api.submit("demo", PROMPT, metadata={"order": "1"}, batch_id="b")
    second = await api.submit("demo", PROMPT)
    await api.cancel(second)

    async def ids(**filters: Any) -> list[str]:
        return [job.id async for job in api.jobs(**filters)]

    assert await ids() == [second.id, first.id]
    assert await ids(limit=1) == [second.id]
    assert await ids(status="queued") == await ids(metadata={"order": "1"}) == await ids(batch_id="b") == [first.id]
    assert await ids(status=["canceled", "failed"], model="demo") == [second.id]
    assert await ids(created_after=before) == [second.id, first.id]
    assert await ids(created_before=before) == await ids(created_before=before.timestamp()) == []
    with pytest.raises(Invalid, match="stauts"):
        await ids(stauts="queued")


async def test_groups_are_listed_and_changed(api: AsyncClient) -> None:
    for name in ("a", "b", "b"):
        await api.submit("demo", PROMPT, group=name)
    assert {one.name: one.total async for one in api.groups()} == {"a": 1, "b": 2}
    assert len([one async for one in api.groups(limit=1)]) == 1
    assert len((await api.matching.pause(group="b")).ids) == 2
    group = await api.group("b")
    assert (group.jobs.paused, group.ended, group.eta_s) == (2, 0, None)
    assert len((await api.matching.resume(group="b", dry_run=True)).ids) == 2
    await api.matching.cancel(group="b")
    assert (await api.group("b")).ended == 2
    with pytest.raises(NotFound):
        await api.group("none")


async def test_adapters_are_uploaded_listed_and_deleted(api: AsyncClient, tmp_path: Path) -> None:
    """From a path or from bytes."""
    file = tmp_path / "ink.safetensors"
    file.write_bytes(demo_lora(1))
    first = await api.adapters.create("demo", file, scale=0.5)
    assert (first.model, first.name, first.scale, first.max_scale) == ("demo", "ink.safetensors", 0.5, 2.0)
    second = await api.adapters.create("demo", demo_lora(2), name="oil")
    assert [one.id async for one in api.adapters.list()] == [second.id, first.id]
    job = await api.submit("demo", PROMPT, adapters=[{"id": first.id}])
    assert (job.adapters[0].id, job.adapters[0].scale) == (first.id, 0.5)
    with pytest.raises(RefusedError, match="used by a job"):
        await api.adapters.delete(first)
    await api.adapters.delete(second)
    with pytest.raises(NotFound):
        await api.adapters.get(second.id)
    assert await api.adapters.get(first) == first


async def test_webhook_endpoints_are_created_changed_and_deleted(api: AsyncClient) -> None:
    hooks = api.webhooks
    endpoint = await hooks.create(HOOK, events=("job.failed", "batch.completed"), description="mine")
    assert (endpoint.url, endpoint.description) == (HOOK, "mine")
    assert set(endpoint.events) == {"job.failed", "batch.completed"}
    assert endpoint.secret is not None
    assert await hooks.get(endpoint) == await hooks.get(endpoint.id) == endpoint.model_copy(update={"secret": None})
    changed = await hooks.update(endpoint, events=["job.expired"], enabled=False)
    assert (changed.events, changed.enabled, changed.description) == (("job.expired",), False, "mine")
    rotated = await hooks.rotate(endpoint)
    assert rotated.secret not in (None, endpoint.secret)
    assert [one.id for one in await hooks.list()] == [endpoint.id]
    await hooks.delete(endpoint)
    with pytest.raises(NotFound):
        await hooks.get(endpoint)


async def test_webhook_deliveries_are_read_and_repeated(api: AsyncClient) -> None:
    endpoint, other = await api.webhooks.create(HOOK), await api.webhooks.create(HOOK)
    sent = [await api.webhooks.test(endpoint) for _ in range(2)]
    await api.webhooks.test(other.id)
    deliveries = [one async for one in api.webhooks.deliveries(endpoint=endpoint)]
    assert {one.id for one in deliveries} == set(sent)
    first = await api.webhooks.delivery(sent[0])
    assert (first.type, first.state, first.attempts, first.log) == ("webhook.test", "pending", 0, ())
    assert await api.webhooks.delivery(first) == first
    assert [one async for one in api.webhooks.deliveries(state="failed")] == []
    assert len([one async for one in api.webhooks.deliveries(limit=2)]) == 2
    await api.webhooks.redeliver(first)
    secret = await api.webhooks.secret()
    assert (await api.webhooks.secret(rotate=True)).secret != secret.secret


async def test_a_batch_is_created_listed_and_canceled(api: AsyncClient) -> None:
    bodies = [{"model": "demo", "prompt": PROMPT}, {"model": "demo", "prompt": PROMPT}]
    batch = await api.batches.create(bodies, endpoint="/v1/images/generations", metadata={"order": "7"})
    assert (batch.endpoint, batch.status, batch.metadata) == ("/v1/images/generations", "validating", {"order": "7"})
    assert not batch.ended
    other = await api.batches.create(iter(bodies))
    assert [one.id async for one in api.batches.list()] == [other.id, batch.id]
    assert [one.id async for one in api.batches.list(limit=1)] == [other.id]
    canceled = await api.batches.cancel(batch)
    assert canceled.status in ("cancelling", "cancelled")
    assert (await api.batches.get(batch.id)).status == canceled.status
    with pytest.raises(ValueError, match="still validating"):
        await anext(api.batches.results(other))
    with pytest.raises(BatchTimeout, match="validating after 0 s") as caught:
        await api.batches.wait(other, timeout_s=0)
    assert caught.value.batch.id == other.id


def canned(batch: dict[str, Any], files: dict[str, list[Any]]) -> AsyncClient:
    """Return a client of a service with one batch; its state advances with each request."""
    states = iter(["validating", "in_progress", "completed"])
    last = ["validating"]

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/batches/batch_1":
            last[0] = next(states, last[0])
            return httpx.Response(200, json={**batch, "status": last[0]})
        name = request.url.path.split("/")[3]
        return httpx.Response(200, text="".join(f"{json.dumps(line)}\n" for line in files[name]))

    return AsyncClient("http://api.test", transport=httpx.MockTransport(handler))


async def test_the_results_of_a_batch_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_batches, "POLL_S", 0.001)
    body = {"data": [{"b64_json": "cG5n"}]}
    files: dict[str, list[Any]] = {
        "out": [{"id": "r1", "custom_id": "0", "response": {"status_code": 200, "body": body}, "error": None}],
        "bad": [
            {"id": "r2", "custom_id": "1", "response": None, "error": {"code": "batch_expired", "message": "late"}}
        ],
    }
    async with canned({**BATCH, "output_file_id": "out", "error_file_id": "bad"}, files) as api:
        ended = await api.batches.wait("batch_1")
        assert (ended.status, ended.ended) == ("completed", True)
        good, bad = [row async for row in api.batches.results(ended)]
    assert good.response is not None
    assert (good.custom_id, good.response.status_code, good.response.body) == ("0", 200, body)
    assert bad.error is not None
    assert (bad.custom_id, bad.response, bad.error.code) == ("1", None, "batch_expired")


async def test_a_result_of_a_newer_service_is_read(api: AsyncClient, work: Work) -> None:
    """Fields and values that this version does not know are kept."""
    newer = {**BATCH, "status": "paused", "shards": 3}
    async with AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=newer))) as other:
        batch = await other.batches.get("batch_1")
    assert (str(batch.status), batch.model_dump()["shards"], batch.ended) == ("paused", 3, False)
    job = await api.submit("demo", PROMPT)
    running = asyncio.create_task(api.wait(job))
    await work()
    assert (await running).model_dump()["object"] == "job"
